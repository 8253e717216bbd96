"""Tokens a second of the two engines: decode, prefill, and decode on a busy machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tests.bench.contestants import Contestant, Ours, Peer
from tests.bench.figures import Figure, figure, interleaved

WARM = 16
DECODED = 64
LONG = 1500
PREFILL = 512
LOOPS = 2
LOOP = "while True: pass"
SETTLING_SECONDS = 0.3
# Any tokens will do: what they are does not change the work.
TOKENS = [int(token) for token in np.random.default_rng(0).integers(100, 40000, 2000)]


@dataclass(frozen=True)
class Pair:
    """Both engines, loaded. The peer is None where it is not installed or not the same model."""

    ours: Ours
    peer: Peer | None
    threads: int
    rounds: int

    def compare(self, name: str, speed: Callable[[Contestant], float]) -> Figure:
        peer = self.peer
        results = interleaved(
            lambda: speed(self.ours), None if peer is None else lambda: speed(peer), self.rounds
        )
        return figure(name, *results, unit="tokens/s", threads=self.threads)


def _decode(engine: Contestant, before: int) -> float:
    """Tokens a second of 64 steps of one token, the first at position `before`."""
    started = time.perf_counter()
    for position in range(before, before + DECODED):
        engine.feed(TOKENS[position : position + 1], position)
    return DECODED / (time.perf_counter() - started)


def _short_decode(engine: Contestant) -> float:
    engine.feed(TOKENS[:WARM], 0)
    return _decode(engine, WARM)


def _prefill(engine: Contestant) -> float:
    started = time.perf_counter()
    engine.feed(TOKENS[:PREFILL], 0)
    return PREFILL / (time.perf_counter() - started)


def decode(pair: Pair) -> Iterator[Figure]:
    yield pair.compare("decode", _short_decode)


def decode_long(pair: Pair) -> Iterator[Figure]:
    for engine in (pair.ours, pair.peer):
        if engine is not None:
            engine.feed(TOKENS[:LONG], 0)
    yield pair.compare(f"decode-at-{LONG}", lambda engine: _decode(engine, LONG))


def prefill(pair: Pair) -> Iterator[Figure]:
    """The peer has one arithmetic for bf16 weights, so it stands beside both of ours."""
    for dtype in ("f32", "bf16"):
        pair.ours.dtype = dtype
        yield pair.compare(f"prefill-{PREFILL}-{dtype}", _prefill)
    pair.ours.dtype = "f32"


def contention(pair: Pair) -> Iterator[Figure]:
    """Decode beside busy loops, and what it keeps of the speed it had just before they started."""
    engines = [engine for engine in (pair.ours, pair.peer) if engine is not None]
    beside: list[list[float]] = [[], []]
    kept: list[list[float]] = [[], []]
    for engine in engines:
        _short_decode(engine)
    for _ in range(pair.rounds):
        quiet = [_short_decode(engine) for engine in engines]
        with busy_loops(LOOPS):
            busy = [_short_decode(engine) for engine in engines]
        for number, speed in enumerate(busy):
            beside[number].append(speed)
            kept[number].append(speed / quiet[number])
    yield figure(f"decode-beside-{LOOPS}-loops", *beside, unit="tokens/s", threads=pair.threads)
    yield figure(f"kept-beside-{LOOPS}-loops", *kept, unit="of quiet", threads=pair.threads, digits=3)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """That many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        time.sleep(SETTLING_SECONDS)
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
