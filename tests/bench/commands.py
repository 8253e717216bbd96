"""Wall time of the command: with a warm model, with a daemon to start, with kernels to compile."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from caldrix_protocol.address import cache_directory
from tests.bench.figures import Case, Figure, figure
from tests.support.cli import Home, new_home

LEAST_WARM_ROUNDS = 15
COLD_ROUNDS = 5


def warm(directory: Path, case: Case, rounds: int) -> Iterator[Figure]:
    """What a run costs beside its prefill and decode, when daemon and model are there already."""
    with new_home() as home:
        _run(home, directory, case.threads, _user_cache())
        runs = [
            _run(home, directory, case.threads, _user_cache()) for _ in range(max(rounds, LEAST_WARM_ROUNDS))
        ]
    beside = [(wall - computing) * 1e3 for wall, computing in runs]
    yield figure("warm-run", case, beside, unit="ms beside prefill and decode")


def cold(directory: Path, case: Case, rounds: int) -> Iterator[Figure]:
    """No daemon and no model loaded, with compiled kernels and with none. Files are in the page cache."""
    walls = []
    for number in range(min(rounds, COLD_ROUNDS) + 1):
        with new_home() as home:
            wall, _ = _run(home, directory, case.threads, _user_cache())
            if number:
                walls.append(wall)
    yield figure("cold-run", case, walls, unit="s", digits=2)
    with new_home() as home:
        wall, _ = _run(home, directory, case.threads, home.path / "cache")
    yield figure("cold-run-compiling", case, [wall], unit="s", digits=2)


def _user_cache() -> Path:
    return Path(cache_directory(os.environ)).parent


def _run(home: Home, directory: Path, threads: int, cache: Path) -> tuple[float, float]:
    """Seconds of one run, and those of its prefill and decode."""
    arguments = ("run", str(directory), "-p", "hi", "--max-tokens", "1", "--json", "--threads", str(threads))
    started = time.perf_counter()
    result = home.caldrix(*arguments, XDG_CACHE_HOME=str(cache))
    wall = time.perf_counter() - started
    if result.status != 0:
        raise RuntimeError(f"caldrix run: status {result.status}: {result.err}")
    timings = json.loads(result.out)["timings"]
    return wall, timings["prefill_seconds"] + timings["decode_seconds"]
