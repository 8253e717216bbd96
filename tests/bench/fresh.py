"""`python -m tests.bench.fresh NAME DIRECTORY THREADS`: what only a new process can tell.

Each measurement is one dictionary of numbers, printed as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from caldrixd.lanes import cpu, packing
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.drivers.compiler import compile_kernels
from caldrixd.lanes.lane import Rows
from caldrixd.lanes.lowering import lower
from caldrixd.models.files import weight_files
from tests.bench import checkpoints
from tests.support import models

CONTEXT = 2048
CHUNK = 512
ROUNDS = 5

Numbers = dict[str, float]


def run(name: str, directory: Path, threads: int) -> Numbers:
    """One of `MEASUREMENTS` in a new process."""
    command = [sys.executable, "-m", "tests.bench.fresh", name, str(directory), str(threads)]
    result: Numbers = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return result


def _ignore(code: str, fields: dict[str, object]) -> None:
    """Status lines of a load."""


def memory(directory: Path, threads: int) -> Numbers:
    """Bytes after a whole context in float32 arithmetic: the process's most, weights, state."""
    program = _load(directory, threads)
    plan = program.plan
    slot = program.allocate(CONTEXT)
    tokens = [token % plan.vocab_size for token in range(CONTEXT)]
    for first in range(0, CONTEXT, CHUNK):
        program.step(
            Rows([slot] * CHUNK, range(first, first + CHUNK), tokens[first : first + CHUNK], [CHUNK - 1]),
            threads=threads,
        )
        program.commit(slot, first + CHUNK)
    return {
        "peak": _status("VmHWM"),
        "mapped": _status("RssFile"),
        "weights": float(program.size),
        "state": float(plan.kv_bytes(CONTEXT) + plan.recurrent_bytes),
    }


def _status(field: str) -> float:
    """Bytes, of /proc/self/status."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) * 1024
    raise KeyError(field)


def load(directory: Path, threads: int) -> Numbers:
    """Seconds of Lane.load with compiled kernels and files in the page cache, and GB/s of packing alone."""
    kernels = compile_kernels(_ignore)
    plan, tensors = models.opened(directory)
    size = sum(tensors[weight.name].data.size for weight in plan.weights)
    loads, packs = [], []
    for _ in range(ROUNDS + 1):
        loads.append(_seconds(lambda: cpu.load(plan, tensors, threads=threads, report=_ignore).close()))
        packs.append(
            _seconds(lambda: packing.pack_weights(lower(plan), tensors, kernels.pack_panels, threads))
        )
    return {
        "load": statistics.median(loads[1:]),
        "packing": size / statistics.median(packs[1:]) / 1e9,
    }


def second(directory: Path, threads: int) -> Numbers:
    """A model of another family after this one: compilations, seconds to load it and to read its file.

    Both from the page cache and from the disk; "from_disk" says whether the system let go of the file.
    """
    from numba.core import event

    with tempfile.TemporaryDirectory() as made:
        other = checkpoints.as_qwen2(directory, Path(made))
        if other is None:
            return {}
        _first_step(directory, threads)
        with event.install_recorder("numba:run_pass") as passes:
            _first_step(other, threads)
        files = [other / name for name in weight_files(other)]
        found: Numbers = {"compiled": float(len(passes.buffer))}
        read, loaded = [], []
        for _ in range(ROUNDS):
            read.append(_seconds(lambda: _read(files)))
            loaded.append(_seconds_of_load(other, threads))
        found |= {"read": statistics.median(read), "load": statistics.median(loaded)}
        size = sum(path.stat().st_size for path in files)
        before = _read_from_disk()
        read, loaded = [], []
        for _ in range(ROUNDS):
            _leave_page_cache(files)
            read.append(_seconds(lambda: _read(files)))
            loaded.append(_seconds_of_load(other, threads, not_cached=files))
        found |= {"disk_read": statistics.median(read), "disk_load": statistics.median(loaded)}
        found["from_disk"] = float(_read_from_disk() - before >= 2 * ROUNDS * size * 0.9)
        return found


def _load(directory: Path, threads: int) -> cpu.CpuProgram:
    plan, tensors = models.opened(directory)
    return cpu.load(plan, tensors, threads=threads, report=_ignore)


def _first_step(directory: Path, threads: int) -> None:
    program = _load(directory, threads)
    slot = program.allocate(CONTEXT)
    program.step(Rows([slot], [0], [1], [0]), threads=threads)
    program.close()


def _seconds_of_load(directory: Path, threads: int, not_cached: Sequence[Path] = ()) -> float:
    """Of the lane's load alone: the files are open and the plan is made."""
    plan, tensors = models.opened(directory)
    _leave_page_cache(not_cached)
    return _seconds(lambda: cpu.load(plan, tensors, threads=threads, report=_ignore))


def _read(files: Sequence[Path]) -> list[Arena]:
    """Files, read whole into new memory of the kind that holds weights."""
    arenas = []
    for path in files:
        with open(path, "rb", buffering=0) as file:
            arenas.append(Arena(path.stat().st_size, huge=True))
            memory = arenas[-1].bytes.data
            while read := file.readinto(memory):
                memory = memory[read:]
    return arenas


def _leave_page_cache(files: Sequence[Path]) -> None:
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_from_disk() -> int:
    """Bytes this process has had read from storage."""
    for line in Path("/proc/self/io").read_text("ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def _seconds(work: Callable[[], object]) -> float:
    """That it takes; freeing what it returns is not counted."""
    started = time.perf_counter()
    made = work()
    seconds = time.perf_counter() - started
    del made
    return seconds


MEASUREMENTS: dict[str, Callable[[Path, int], Numbers]] = {"memory": memory, "load": load, "second": second}

if __name__ == "__main__":
    name, directory, threads = sys.argv[1:]
    sys.stdout.write(json.dumps(MEASUREMENTS[name](Path(directory), int(threads))))
