"""Which compiled code the CPU lane runs: `settle` before a worker starts, `load_kernels` inside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import compiler, cpu
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Report, Variant

NATIVE = "native"


def settle(isa: str, kernels: str, environment: Mapping[str, str]) -> Variant:
    """What a worker is to run, as far as a glance tells: one variant has one name.

    `environment` gives the PATH on which cc is looked for. Refused "lane/cpu-isa-flag", "lane/cpu-numba" or
    "lane/cpu-no-compiler".
    """
    level = cpu.isa_level(cpu.cpu_flags())
    if isa != NATIVE and isa > level:
        raise Refused("lane/cpu-isa-flag", wanted=isa, level=level)
    usable = cpu.find_numba()
    if kernels == "numba" and not usable:
        raise Refused("lane/cpu-numba", reason=cpu.NO_NUMBA)
    if kernels == "c" or not usable:
        if cpu.find_compiler(environment) is None:
            raise Refused("lane/cpu-no-compiler")
        kernels = "c"
    return Variant(NATIVE if isa == level else isa, kernels)


def load_kernels(variant: Variant, environment: Mapping[str, str], report: Report) -> Kernels:
    """The compiled code of a variant, in the process whose `environment` its worker_environment made.

    "auto" takes C where numba fails. Refused "lane/cpu-numba", "lane/cpu-cache" or "lane/cpu-no-compiler".
    """
    kernels = _compiled(variant, environment, report)
    return kernels if variant.isa == NATIVE else replace(kernels, name=f"{kernels.name} {variant.isa}")


def _compiled(variant: Variant, environment: Mapping[str, str], report: Report) -> Kernels:
    if variant.kernels != "c":
        try:
            return _from_numba(variant, report)
        except (Refused, MemoryError):
            raise
        except Exception as error:  # numba raises what it likes where it cannot compile
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if variant.kernels == "numba":
                raise Refused("lane/cpu-numba", reason=reason) from None
            logging.warning("the kernels are compiled by cc, because numba cannot be used: %s", reason)
    from caldrixd.lanes.drivers.c_compiler import c_kernels

    return c_kernels(variant.isa, Path(environment[compiler.KERNEL_CACHE]), environment, report)


def _from_numba(variant: Variant, report: Report) -> Kernels:
    if "x86-64-v2" in (variant.isa, cpu.isa_level(cpu.cpu_flags())):
        compiler.supply_conversions()
    return compiler.compile_kernels(report)
