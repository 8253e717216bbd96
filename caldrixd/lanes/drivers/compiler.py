"""The compiled kernels: where their cache lies, and compiling them with a word to the user.

numba's own cache misses a change inside an imported intrinsics module, so the directory's name is a
digest of every kernel source, the compiler's versions and the CPU: code compiled from anything else is
never found.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path

import caldrix_kernels
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import kernel_cache
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Report

INTERPRETER = "caldrix_kernels.step.numba_cpu"
CPU_INFO = Path("/proc/cpuinfo")
# A file in the cache: everything has been compiled into it.
COMPLETE = "complete"
# The variable that gives a worker its private directory for compiled kernels.
KERNEL_CACHE = "CALDRIX_KERNEL_CACHE"
# Below it, the directory of what cc compiled.
LIBRARIES = "c"
# What numba is told to compile for at a level below the host's: its own look at the processor would add
# AVX-512 to the CPU's name alone.
_V2 = "+cx16,+popcnt,+sahf,+sse3,+ssse3,+sse4.1,+sse4.2"
_V3 = f"{_V2},+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+xsave"
_TARGETS: dict[str, dict[str, str]] = {
    "native": {},
    "x86-64-v4": {},
    "x86-64-v2": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": _V2},
    "x86-64-v3": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": _V3},
}
# Processors without F16C convert half floats by a function that LLVM looks for.
LIBGCC, CONVERSION = "libgcc_s.so.1", "__extendhfsf2"


def source_digest(directory: Path, cpu: str) -> str:
    """Hex digest of the kernel sources below `directory`, the compiler's versions and the CPU."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(f"{path.relative_to(directory)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {_version(package)}\0".encode())
    digest.update(cpu.encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def host_cpu() -> str:
    """The lines of /proc/cpuinfo that decide what code may run."""
    try:
        lines = CPU_INFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "unknown"
    kept = [line for line in lines if line.startswith(("model name", "flags", "cpu family", "model\t"))]
    return "\n".join(sorted(set(kept)))


def worker_environment(cache_directory: Path, isa: str = "native") -> dict[str, str]:
    """The variables a worker needs before it imports numba. Makes the private cache directories.

    `isa` "native" leaves it to numba what this processor is. OSError where no files can be made there.
    """
    kernels = cache_directory / kernel_cache.KERNELS
    directory = kernels / _digest(isa)
    kernel_cache.make_writable(directory)
    kernel_cache.clear_builds(kernels / LIBRARIES)
    return {**_TARGETS[isa], "NUMBA_CACHE_DIR": str(directory), KERNEL_CACHE: str(kernels)}


def _digest(isa: str) -> str:
    cpu = "\n".join((host_cpu(), *_TARGETS[isa].values()))
    return source_digest(Path(caldrix_kernels.__file__).parent, cpu)


def supply_conversions() -> None:
    """Let code for x86-64-v2 find its conversion of half floats. ImportError where no libgcc has it."""
    binding = import_module("llvmlite.binding")
    with suppress(RuntimeError):
        binding.load_library_permanently(LIBGCC)
    if binding.address_of_symbol(CONVERSION) is None:
        raise ImportError(f"{LIBGCC} has no {CONVERSION}")


def compile_kernels(report: Report) -> Kernels:
    """The kernels as numba compiles them; raises what `import_kernels` does."""
    import_kernels(report)
    return Kernels(name="numba", **import_module(INTERPRETER).compiled())


def import_kernels(report: Report) -> None:
    """Import the interpreter: from the cache in half a second, else compiled, with status lines.

    The cache is that of `worker_environment`; what is damaged in it is compiled again. A process without one
    of its own leaves caching to numba. ImportError when numba is missing, Refused "lane/cpu-cache" when
    there is no room for compiled kernels.
    """
    if INTERPRETER in sys.modules:
        return
    try:
        directory = import_module("numba").config.CACHE_DIR
    except OSError as error:  # the compiler's library does not load
        raise ImportError(" ".join(str(error).split())) from None
    if not directory:
        import_module(INTERPRETER)
        return
    cache = Path(directory)
    try:
        kernel_cache.hold(cache)
        try:
            _import_interpreter(cache, report)
        except OSError:
            raise
        except Exception as error:  # unpickling damaged files may raise anything
            logging.warning("the compiled kernels in %s are damaged: %s", cache, type(error).__name__)
            _empty(cache)
            _import_interpreter(cache, report)
    except OSError as error:
        raise Refused("lane/cpu-cache", path=cache, reason=error.strerror or error) from None


def _import_interpreter(cache: Path, report: Report) -> None:
    complete = cache / COMPLETE
    if complete.exists():
        import_module(INTERPRETER)
        return
    started = time.monotonic()
    report("status/compiling", {})
    import_module(INTERPRETER)
    report("status/compiled", {"seconds": round(time.monotonic() - started, 1)})
    with suppress(OSError):
        complete.touch()
    current = {_digest(isa) for isa in _TARGETS}
    if cache.name in current:
        kernel_cache.prune(cache.parent, current)


def _empty(cache: Path) -> None:
    """Forget what was compiled, but leave the unfinished files of another worker alone."""
    for path in (cache / COMPLETE, *cache.rglob("*.nbi"), *cache.rglob("*.nbc")):
        path.unlink(missing_ok=True)
