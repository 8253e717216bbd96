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
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Report

INTERPRETER = "caldrix_kernels.step.numba_cpu"
CPU_INFO = Path("/proc/cpuinfo")
# A file in the cache: everything has been compiled into it.
COMPLETE = "complete"


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


def worker_environment(cache_directory: Path) -> dict[str, str]:
    """The variables a worker needs before it imports numba. Makes the private cache directory."""
    digest = source_digest(Path(caldrix_kernels.__file__).parent, host_cpu())
    directory = cache_directory / "kernels" / digest
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {"NUMBA_CACHE_DIR": str(directory)}


def compile_kernels(report: Report) -> Kernels:
    """The kernels as numba compiles them; raises what `import_kernels` does."""
    import_kernels(report)
    return Kernels(name="numba", **import_module(INTERPRETER).compiled())


def import_kernels(report: Report) -> None:
    """Import the interpreter: from the cache in half a second, else compiled, with status lines.

    The cache is that of `worker_environment`; what is damaged in it is compiled again. ImportError
    when numba is missing, Refused "lane/cpu-cache" when there is no room for compiled kernels.
    """
    if INTERPRETER in sys.modules:
        return
    try:
        cache = Path(import_module("numba").config.CACHE_DIR)
    except OSError as error:  # the compiler's library does not load
        raise ImportError(" ".join(str(error).split())) from None
    try:
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


def _empty(cache: Path) -> None:
    """Forget what was compiled, but leave the unfinished files of another worker alone."""
    for path in (cache / COMPLETE, *cache.rglob("*.nbi"), *cache.rglob("*.nbc")):
        path.unlink(missing_ok=True)
