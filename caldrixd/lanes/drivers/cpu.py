"""Looks at the processor and at numba for the CPU lane."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping, Set
from pathlib import Path

from caldrix_protocol.refusals import Refused, sentence
from caldrixd.lanes.drivers.finding import Finding

CPUINFO = Path("/proc/cpuinfo")
X86_64 = ("x86_64", "amd64")
BELOW_V2 = "x86-64"
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
    """The feature flags of the first processor as the kernel lists them; empty when there are none."""
    try:
        text = path.read_text("ascii", "replace")
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def glance() -> Finding:
    """Every reason that can be seen without importing numba."""
    reasons = _machine()
    if not reasons and importlib.util.find_spec("numba") is None:
        reasons = (Refused("lane/cpu-numba", reason="No module named 'numba'"),)
    return Finding(reasons, complete=bool(reasons))


def probe(environment: Mapping[str, str]) -> Finding:
    """As `glance`, and numba is imported for real."""
    reasons = _machine()
    details = [sentence("detail/processor", level=isa_level(cpu_flags()), count=os.cpu_count() or 1)]
    try:
        import numba
    except Exception as error:
        failure = Refused("lane/cpu-numba", reason=f"{type(error).__name__}: {error}")
        return Finding((*reasons, failure), tuple(details))
    details.append(sentence("detail/numba", version=numba.__version__))
    return Finding(reasons, tuple(details))


def _machine() -> tuple[Refused, ...]:
    if sys.platform != "linux":
        return (Refused("lane/cpu-linux"),)
    if platform.machine() not in X86_64:
        return (Refused("lane/cpu-architecture", machine=platform.machine()),)
    level = isa_level(cpu_flags())
    if level == BELOW_V2:
        return (Refused("lane/cpu-isa"),)
    if level == "x86-64-v2":
        return (Refused("lane/cpu-isa-v3"),)
    return ()
