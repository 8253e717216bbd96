"""The compiled kernels: where their cache lies, and compiling them with a word to the user.

numba's own cache misses a change inside an imported intrinsics module, so the directory's name is a
digest of every kernel source, the compiler's versions and the CPU: code compiled from anything else is
never found.
"""

from __future__ import annotations

import hashlib
import sys
import time
from importlib import import_module, metadata
from pathlib import Path

import caldrix_kernels
from caldrixd.lanes.lane import Report

INTERPRETER = "caldrix_kernels.step.numba_cpu"
CPU_INFO = Path("/proc/cpuinfo")


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


def compile_kernels(report: Report) -> None:
    """Import the interpreter: from the cache in half a second, else compiled, with status lines.

    ImportError when numba is missing.
    """
    if INTERPRETER in sys.modules:
        return
    config = import_module("numba").config
    cache = Path(config.CACHE_DIR) if config.CACHE_DIR else None
    cold = cache is None or next(cache.rglob("*.nbi"), None) is None
    started = time.monotonic()
    if cold:
        report("status/compiling", {})
    import_module(INTERPRETER)
    if cold:
        report("status/compiled", {"seconds": round(time.monotonic() - started, 1)})
