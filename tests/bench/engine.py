"""Tokens a second: decode, prefill, several clients, and decode on a busy machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Variant
from tests.bench.contestants import Contestant, Ours
from tests.bench.figures import Figure, Measure, Series, figure, interleaved
from tests.bench.loaded import DTYPES, Loaded, say, timed
from tests.bench.targets import LLAMA_CPP, NUMBA, READ_LIMIT, targets

WARM = 16
DECODED = 32
LONGEST_DECODE = 3.0
LONG = 1500
PREFILL = 512
LONG_PREFILL = 2000
LOOPS = 2
LOOP = "while True: pass"
SETTLING_SECONDS = 0.3


def thread_counts(loaded: Loaded) -> list[int]:
    """All cores, then one."""
    return sorted({loaded.effort.threads, 1}, reverse=True)


def _steps(engine: Contestant, tokens: Sequence[int], before: int) -> float:
    """Tokens a second of steps of one token, the first at position `before`; fewer of a slow engine."""
    started = now = time.perf_counter()
    for done in range(1, DECODED + 1):
        position = before + done - 1
        engine.feed(tokens[position : position + 1], position)
        now = time.perf_counter()
        if now - started > LONGEST_DECODE:
            break
    return done / (now - started)


def _short_decode(engine: Contestant, tokens: Sequence[int]) -> float:
    engine.feed(tokens[:WARM], 0)
    return _steps(engine, tokens, WARM)


def _prompt(engine: Contestant, tokens: Sequence[int]) -> float:
    started = time.perf_counter()
    engine.feed(tokens, 0)
    return len(tokens) / (time.perf_counter() - started)


def decode(loaded: Loaded) -> Iterator[Figure]:
    for threads in thread_counts(loaded):
        limits = {READ_LIMIT: loaded.read_limit(threads, WARM + DECODED // 2)}
        yield from loaded.compare(
            "decode", lambda engine: _short_decode(engine, loaded.tokens), threads, limits
        )


def decode_long(loaded: Loaded) -> Iterator[Figure]:
    """A model that cannot be rewound reads its context again before each measurement."""
    engines: dict[str, Contestant] = {**loaded.ours, **loaded.peers}
    for engine in engines.values():
        engine.use(loaded.effort.threads)
        engine.feed(loaded.tokens[:LONG], 0)

    def speed(engine: Contestant) -> float:
        if not loaded.plan.rewindable:
            engine.feed(loaded.tokens[:LONG], 0)
        return _steps(engine, loaded.tokens, LONG)

    limits = {READ_LIMIT: loaded.read_limit(loaded.effort.threads, LONG)}
    yield from loaded.compare(f"decode-at-{LONG}", speed, loaded.effort.threads, limits)


def prefill(loaded: Loaded) -> Iterator[Figure]:
    """A peer has one arithmetic for its weights, so it stands beside both of ours."""
    for threads in thread_counts(loaded):
        limits = loaded.multiply_limits(threads, PREFILL)
        yield from loaded.compare(
            f"prefill-{PREFILL}", lambda engine: _prompt(engine, loaded.tokens[:PREFILL]), threads, limits
        )


def prefill_long(loaded: Loaded) -> Iterator[Figure]:
    """Beside ours of the short prompt; and, with all cores alone to save time, beside that of peers."""
    name, short = f"prefill-{LONG_PREFILL}", f"prefill-{PREFILL}"
    read_long, read_short = (
        partial(_prompt, tokens=loaded.tokens[:length]) for length in (LONG_PREFILL, PREFILL)
    )
    rounds, most = loaded.effort.rounds, loaded.effort.threads
    for threads in thread_counts(loaded):
        measures: dict[str, Measure] = {}
        for dtype, engine in loaded.ours.items():
            measures[dtype] = timed(engine, threads, read_long)
            measures[f"{dtype} {short}"] = timed(engine, threads, read_short)
        found = interleaved(measures, rounds, loaded.effort.seconds())
        for dtype in DTYPES:
            case = loaded.case(dtype, threads)
            others = {short: found[f"{dtype} {short}"]}
            yield figure(name, case, found[dtype], others, targets=targets(name, case, most))
    if not loaded.peers:
        return
    engines: dict[str, Contestant] = {**loaded.ours, **loaded.peers}
    measures = {label: timed(engine, most, read_long) for label, engine in engines.items()}
    found = interleaved(measures, rounds, loaded.effort.seconds(), warm=False)
    for dtype in DTYPES:
        others = {label: found[label] for label in loaded.peers}
        yield figure(f"{name}-beside-peers", loaded.case(dtype, most), found[dtype], others)


def contention(loaded: Loaded) -> Iterator[Figure]:
    """Decode beside busy loops; "decode" is its quiet speed just before they started."""
    threads = loaded.effort.threads
    engines: dict[str, Contestant] = {"ours": loaded.ours["f32"]}
    if LLAMA_CPP in loaded.peers:
        engines[LLAMA_CPP] = loaded.peers[LLAMA_CPP]
    quiet: Series = {label: [] for label in engines}
    busy: Series = {label: [] for label in engines}
    ends = time.perf_counter() + loaded.effort.seconds()
    for number in range(loaded.effort.rounds):
        if number and time.perf_counter() > ends:
            break
        for label, engine in engines.items():
            engine.use(threads)
            _short_decode(engine, loaded.tokens)
            quiet[label].append(_short_decode(engine, loaded.tokens))
        with busy_loops(LOOPS):
            for label, engine in engines.items():
                busy[label].append(_short_decode(engine, loaded.tokens))
    name, case = f"decode-beside-{LOOPS}-loops", loaded.case("f32", threads)
    others = {"decode": quiet["ours"], **{label: busy[label] for label in engines if label != "ours"}}
    yield figure(name, case, busy["ours"], others, targets=targets(name, case, threads))


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


def decode_c(loaded: Loaded) -> Iterator[Figure]:
    """Decode with the kernels that cc compiles, beside those of numba."""
    threads = loaded.effort.threads
    try:
        engines = {"c": Ours(loaded.load(Variant(kernels="c")), "f32"), NUMBA: loaded.ours["f32"]}
    except Refused as refused:
        say(f"no kernels in C: {refused}")
        return
    measures = {
        label: timed(engine, threads, lambda engine: _short_decode(engine, loaded.tokens))
        for label, engine in engines.items()
    }
    found = interleaved(measures, loaded.effort.rounds, loaded.effort.seconds())
    case = loaded.case("f32", threads)
    promised = targets("decode-c", case, threads)
    yield figure("decode-c", case, found["c"], {NUMBA: found[NUMBA]}, targets=promised)
