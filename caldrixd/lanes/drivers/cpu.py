"""Looks at the processor, at numba and for a C compiler, for the CPU lane."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Set
from pathlib import Path

from caldrix_protocol.refusals import Refused, sentence
from caldrixd.lanes.drivers.finding import Finding

CPUINFO = Path("/proc/cpuinfo")
X86_64 = ("x86_64", "amd64")
BELOW_V2 = "x86-64"
NO_NUMBA = "No module named 'numba'"
# What each level of the x86-64 psABI adds, in the kernel's names for the flags.
_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}


def isa_level(flags: Set[str]) -> str:
    """The highest x86-64 level of which all flags are there: "x86-64", "x86-64-v2", ... "x86-64-v4"."""
    reached = BELOW_V2
    for level, needed in _LEVELS.items():
        if not needed <= flags:
            break
        reached = level
    return reached


def cpu_flags(path: Path = CPUINFO) -> frozenset[str]:
    """The feature flags of the first processor as the kernel lists them; empty when there are none.

    OSError when it lists them and does not let them be read.
    """
    try:
        text = path.read_text("ascii", "replace")
    except FileNotFoundError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def find_numba() -> bool:
    """Whether numba is installed. Whether it works is known only once it compiles."""
    return importlib.util.find_spec("numba") is not None


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """The path of cc, looked for on the PATH of `environment`."""
    return shutil.which("cc", path=environment.get("PATH", ""))


def glance(environment: Mapping[str, str]) -> Finding:
    """Every reason that can be seen without importing numba."""
    reasons = _machine()
    if not reasons and not find_numba() and find_compiler(environment) is None:
        reasons = (Refused("lane/cpu-no-compiler"),)
    return Finding(reasons, complete=bool(reasons))


def probe(environment: Mapping[str, str]) -> Finding:
    """As `glance`, with numba tried for real; the details say whose kernels would be used, and why."""
    reasons = _machine()
    level = isa_level(cpu_flags())
    details = [sentence("detail/processor", level=level, count=os.cpu_count() or 1)]
    if level == "x86-64-v2":
        details.append(sentence("detail/no-fma"))
    try:
        details.append(sentence("detail/kernels-numba", version=_try_numba()))
    except Exception as error:  # numba raises what it likes where it cannot compile
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        compiler = find_compiler(environment)
        if compiler is None:
            return Finding((*reasons, Refused("lane/cpu-no-compiler")), tuple(details))
        details.append(sentence("detail/kernels-c", compiler=compiler, reason=reason))
    return Finding(reasons, tuple(details))


def _try_numba() -> str:
    """The version of a numba that compiles; it raises anything when it does not."""
    import numba

    assert numba.njit(lambda number: number + 1)(1) == 2
    version: str = numba.__version__
    return version


def _machine() -> tuple[Refused, ...]:
    if sys.platform != "linux":
        return (Refused("lane/cpu-linux"),)
    if platform.machine() not in X86_64:
        return (Refused("lane/cpu-architecture", machine=platform.machine()),)
    if isa_level(cpu_flags()) == BELOW_V2:
        return (Refused("lane/cpu-isa"),)
    return ()
