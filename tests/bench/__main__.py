"""`python -m tests.bench [NAME ...] [--model DIR ...]`: one JSON line on stdout for each figure.

At the end the figures that something is promised of stand as a table on stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from caldrix_client.environment import model_argument
from caldrix_kernels.intrinsics.vector import HAS_BF16
from caldrix_protocol.options import MAX_THREADS
from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.models import gate, weights
from caldrixd.models.resolve import check_directory, resolve
from caldrixd.text import files as text_files
from caldrixd.text import tokenizer
from tests.bench import CACHE, checkpoints, clients, commands, engine, loading, machine, work
from tests.bench.figures import Case, Figure, figure, interleaved, table
from tests.bench.loaded import Effort, Loaded, say
from tests.bench.stages import stages
from tests.support import models

DEMO = "demo"
# A float32 copy of a model larger than this is not made.
LARGEST_COPY = 8 << 30
LARGE_READ = 1 << 30


def _limits(loaded: Loaded) -> Iterator[Figure]:
    size = work.weight_bytes(loaded.plan, loaded.tensors)
    large, same = machine.filled(LARGE_READ), machine.filled(size or LARGE_READ)
    for threads in engine.thread_counts(loaded):
        measures = {
            ("read-limit", "GB/s"): machine.read_bandwidth(large, threads),
            ("read-limit-of-weights", "GB/s"): machine.read_bandwidth(same, threads),
            ("multiply-add-limit", "GFLOP/s"): machine.multiply_peak(threads),
        }
        if HAS_BF16:
            measures["bfloat16-limit", "GFLOP/s"] = machine.multiply_peak(threads, dot=True)
        found = interleaved({name: measure for (name, _), measure in measures.items()}, *_effort(loaded))
        for name, unit in measures:
            yield figure(name, Case(loaded.name, "", "", threads), found[name], unit=unit)


def _effort(loaded: Loaded) -> tuple[int, float]:
    return loaded.effort.rounds, loaded.effort.seconds()


# With engines loaded: of the weights as they are stored, or of a float32 copy too.
STORED: dict[str, Callable[[Loaded], Iterator[Figure]]] = {
    "limits": _limits,
    "decode": engine.decode,
    "prefill": engine.prefill,
    "decode-long": engine.decode_long,
    "clients": clients.clients,
    "contention": engine.contention,
    "decode-c": engine.decode_c,
    "prefill-long": engine.prefill_long,
    "stall": clients.stall,
    "stages": stages,
}
WIDENED = {name: STORED[name] for name in ("decode", "prefill", "prefill-long")}
# In processes of their own.
APART: dict[str, Callable[[Path, Case, int], Iterator[Figure]]] = {
    "memory": lambda directory, case, rounds: loading.memory(directory, case),
    "load": lambda directory, case, rounds: loading.load(directory, case),
    "second": lambda directory, case, rounds: loading.second(directory, case),
    "warm": commands.warm,
    "cold": commands.cold,
}
# Looks inside the engine rather than at what a user gets: run by name only.
ON_REQUEST = {"stages"}
NAMES = [*STORED, *APART]


def _directory(model: str) -> Path:
    """Where a model that can be run is. Refused as a run of it would be, or as what no directory is."""
    named = str(models.smollm2()) if model == DEMO else model_argument(model)
    directory = resolve(named).directory if named.startswith("/") else None
    if directory is None:
        raise Refused("model/no-such-directory", path=model)
    check_directory(directory)
    spec = gate.read_spec(directory)
    text_files.check_directory(directory)
    family = FAMILIES[spec.architecture]
    found = weights.open_checkpoint(directory, family.stacked)
    found.check(family.build(spec), family.ignored, architecture=spec.architecture)
    tokenizer.load(directory, spec)
    return directory.resolve()


class Run:
    """All benches of one model, within its minutes."""

    def __init__(self, model: str, directory: Path, arguments: argparse.Namespace) -> None:
        self.model = model
        self.directory = directory
        self.name = DEMO if model == DEMO else self.directory.name
        self.names = arguments.names or [name for name in NAMES if name not in ON_REQUEST]
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.effort = Effort(
            arguments.rounds,
            lambda: max(0.0, min(arguments.seconds, self.deadline - time.monotonic())),
            arguments.threads,
        )
        self.failed = False

    def figures(self) -> Iterator[Figure]:
        form = checkpoints.stored_format(self.directory)
        yield from self._loaded(self.directory, form, CACHE / "bench", STORED)
        for name, bench in APART.items():
            case = Case(self.name, form, "f32", self.effort.threads)
            yield from self._bench(name, partial(bench, self.directory, case, self.effort.rounds))
        if form == "f32" or not WIDENED.keys() & set(self.names):
            return
        if 2 * checkpoints.size(self.directory) > LARGEST_COPY:
            say(f"{self.name}: no float32 copy is made of a model this large")
            return
        with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as gguf:
            checkpoints.float32_copy(self.directory, Path(copy))
            yield from self._loaded(Path(copy), "f32", Path(gguf), WIDENED)

    def _loaded(
        self,
        directory: Path,
        form: str,
        gguf: Path,
        benches: dict[str, Callable[[Loaded], Iterator[Figure]]],
    ) -> Iterator[Figure]:
        loaded = Loaded(directory, self.name, form, gguf, self.effort)
        try:
            for name, bench in benches.items():
                yield from self._bench(name, partial(bench, loaded))
        finally:
            loaded.close()
            self.failed |= loaded.failed

    def _bench(self, name: str, bench: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
        if name not in self.names:
            return
        if time.monotonic() >= self.deadline:
            say(f"{self.name}: no time is left for {name}")
            return
        yield from bench()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, and not again how it is called."""

    def error(self, message: str) -> NoReturn:
        say(message)
        sys.exit(2)


def _arguments() -> argparse.Namespace:
    parser = _Parser(prog="python -m tests.bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument(
        "--model", action="append", metavar="DIR", help="a model directory, or demo; may be given again"
    )
    parser.add_argument("--rounds", type=int, default=7, help="most rounds of a comparison")
    parser.add_argument("--seconds", type=float, default=20, help="about the most of a comparison")
    parser.add_argument("--minutes", type=float, default=9, help="when no further bench of a model is begun")
    parser.add_argument("--threads", type=int, default=default_threads())
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no bench is named {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name, most in (("rounds", None), ("seconds", None), ("minutes", None), ("threads", MAX_THREADS)):
        number = getattr(arguments, name)
        if not 0 < number <= (most or number):
            parser.error(f"--{name} must be over 0{f' and at most {most}' if most else ''}, got {number}")
    return arguments


def main() -> int:
    """The exit status is 1 when a peer was found to compute another model, 2 when a model cannot be run."""
    arguments = _arguments()
    try:
        return _measured(arguments, {model: _directory(model) for model in arguments.model or [DEMO]})
    except Refused as refused:
        say(refused.text)
        return 2


def _measured(arguments: argparse.Namespace, directories: Mapping[str, Path]) -> int:
    found: list[Figure] = []
    failed = False
    say(f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}")
    for model, directory in directories.items():
        run = Run(model, directory, arguments)
        for one in run.figures():
            found.append(one)
            sys.stdout.write(f"{one.line()}\n")
            sys.stdout.flush()
        failed |= run.failed
    say(f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}")
    sys.stderr.write(f"{table(found)}\n")
    return int(failed)


if __name__ == "__main__":
    # So that a stopped bench ends its busy loops and its daemon.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
