"""`python -m tests.bench [NAME ...] [--rounds N] [--threads N]`: one JSON line on stdout for each figure."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from caldrixd.lanes.drivers.cores import default_threads
from tests.bench import CACHE, commands, engine, gguf_file, machine
from tests.bench.contestants import Ours, Peer, disagreements
from tests.bench.figures import Figure, figure, interleaved
from tests.bench.stages import stages
from tests.support import models

MODEL = "smollm2-135m-instruct"


class Setting:
    """What the benches share; the engines are loaded when the first bench needs them."""

    def __init__(self, threads: int, rounds: int) -> None:
        self.threads = threads
        self.rounds = rounds
        self.failed = False
        self.exits = ExitStack()

    @cached_property
    def directory(self) -> Path:
        return models.smollm2()

    @cached_property
    def pair(self) -> engine.Pair:
        ours = Ours(self.directory, self.threads)
        self.exits.callback(ours.close)
        return engine.Pair(ours, self._peer(ours), self.threads, self.rounds)

    def _peer(self, ours: Ours) -> Peer | None:
        missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
        if missing:
            say(f"no peer: {' and '.join(missing)} not installed")
            return None
        peer = Peer(gguf_file.cached(self.directory, CACHE / "bench"), self.threads)
        say(f"peer: {peer.system}")
        wrong = disagreements(ours, peer, models.reference(MODEL))
        if wrong:
            say(f"the peer computes another model, so nothing is compared: {'; '.join(wrong)}")
            self.failed = True
            return None
        return peer


def _limits(setting: Setting) -> Iterator[Figure]:
    for name, unit, measure in (
        ("read-limit", "GB/s", machine.read_bandwidth(setting.threads)),
        ("multiply-add-limit", "GFLOP/s", machine.multiply_peak(setting.threads)),
    ):
        results, _ = interleaved(measure, None, setting.rounds)
        yield figure(name, results, [], unit=unit, threads=setting.threads)


BENCHES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "limits": _limits,
    "decode": lambda setting: engine.decode(setting.pair),
    "decode-long": lambda setting: engine.decode_long(setting.pair),
    "prefill": lambda setting: engine.prefill(setting.pair),
    "contention": lambda setting: engine.contention(setting.pair),
    "warm": lambda setting: commands.warm(setting.directory, setting.threads, setting.rounds),
    "cold": lambda setting: commands.cold(setting.directory, setting.threads, setting.rounds),
    "stages": lambda setting: stages(setting.pair.ours, setting.rounds),
}
# Looks inside the engine rather than at what a user gets: run by name only.
ON_REQUEST = {"stages"}


def say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


def main() -> int:
    """The exit status is 1 when the peer was found to compute another model."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_threads())
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHES.keys()
    if unknown or min(arguments.rounds, arguments.threads) < 1:
        parser.error(
            f"no bench is named {', '.join(sorted(unknown))}" if unknown else "not a positive number"
        )
    setting = Setting(arguments.threads, arguments.rounds)
    say(f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}")
    with setting.exits:
        for name in arguments.names or [name for name in BENCHES if name not in ON_REQUEST]:
            for found in BENCHES[name](setting):
                sys.stdout.write(f"{found.line()}\n")
                sys.stdout.flush()
    say(f"load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}")
    return int(setting.failed)


if __name__ == "__main__":
    # So that a stopped bench ends its busy loops and its daemon.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
