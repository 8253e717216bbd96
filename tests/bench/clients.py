"""Several clients of one model: what they get together, and how long one waits for another's prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from caldrixd.engine.engine import Engine, Request
from tests.bench.engine import DECODED, LONG_PREFILL, LONGEST_DECODE, WARM
from tests.bench.figures import Figure, Measure, figure, interleaved
from tests.bench.llama_cpp import LlamaCpp
from tests.bench.loaded import CLIENT_CONTEXT, MOST_CLIENTS, Loaded
from tests.bench.targets import LLAMA_CPP, targets

COUNTS = (1, 2, 4, MOST_CLIENTS)
REPLY = 200


def clients(loaded: Loaded) -> Iterator[Figure]:
    """Tokens a second of all replies together, for prompts of 16 tokens that share nothing."""
    threads = loaded.effort.threads
    engine = Engine(loaded.program, max_sessions=MOST_CLIENTS)
    measures: dict[str, Measure] = {}
    for count in COUNTS:
        measures[f"ours {count}"] = _ours(engine, loaded.tokens, count, threads)
        if LLAMA_CPP in loaded.peers:
            measures[f"{LLAMA_CPP} {count}"] = _peer(loaded.peers[LLAMA_CPP], loaded.tokens, count, threads)
    found = interleaved(measures, loaded.effort.rounds, loaded.effort.seconds())
    for count in COUNTS:
        name, case = f"clients-{count}", loaded.case("f32", threads)
        others = {LLAMA_CPP: found.get(f"{LLAMA_CPP} {count}", [])}
        if count > 1:
            others["clients-1"] = found["ours 1"]
        yield figure(name, case, found[f"ours {count}"], others, targets=targets(name, case, threads))


def _prompt(tokens: Sequence[int], number: int) -> tuple[int, ...]:
    return tuple(tokens[WARM * number : WARM * (number + 1)])


def _ours(engine: Engine, tokens: Sequence[int], count: int, threads: int) -> Measure:
    """From the step that gives the last of the first tokens to the end; all replies are equally long."""

    def measure() -> float:
        for number in range(count):
            prompt = _prompt(tokens, number)
            engine.submit(Request(number, prompt, CLIENT_CONTEXT, max_tokens=DECODED + 1, threads=threads))
        begun: set[int] = set()
        while len(begun) < count:
            begun |= {event.id for event in engine.step()}
        started, made = time.perf_counter(), 0
        while engine.busy:
            made += len(engine.step())
        return made / (time.perf_counter() - started)

    return measure


def _peer(peer: LlamaCpp, tokens: Sequence[int], count: int, threads: int) -> Measure:
    """One batch of a token for each sequence a step, in one context."""

    def measure() -> float:
        peer.use(threads)
        for number in range(count):
            peer.feed_rows([number] * WARM, range(WARM), _prompt(tokens, number))
        sequences = range(count)
        started = now = time.perf_counter()
        for done in range(1, DECODED + 1):
            position = WARM + done - 1
            peer.feed_rows(sequences, [position] * count, tokens[position : position + count])
            now = time.perf_counter()
            if now - started > LONGEST_DECODE:
                break
        return count * done / (now - started)

    return measure


def stall(loaded: Loaded) -> Iterator[Figure]:
    """The longest time between two tokens of a reply while a prompt of 2,000 tokens is read beside it."""
    threads = loaded.effort.threads
    engine = Engine(loaded.program, max_sessions=MOST_CLIENTS)
    first = iter(range(len(loaded.tokens)))

    def measure() -> float:
        context, shift = LONG_PREFILL + 2, next(first)
        engine.submit(Request(0, _prompt(loaded.tokens, 0), context, max_tokens=REPLY, threads=threads))
        engine.step()
        # Another one each time: nothing of it is held from before.
        prompt = tuple(loaded.tokens[shift + 1 :] + loaded.tokens[: shift + 1])
        engine.submit(Request(1, prompt, context, max_tokens=1, threads=threads))
        last, longest, reading = time.perf_counter(), 0.0, True
        while engine.busy:
            ids = {event.id for event in engine.step()}
            now = time.perf_counter()
            reading = reading and 1 not in ids
            if 0 in ids:
                longest, last = max(longest, now - last), now
            if not reading:
                engine.cancel(0)
        return longest

    found = interleaved({"ours": measure}, loaded.effort.rounds, loaded.effort.seconds(), warm=False)
    case = loaded.case("f32", threads)
    promised = targets("stall", case, threads)
    yield figure("stall", case, found["ours"], unit="s", digits=3, targets=promised)
