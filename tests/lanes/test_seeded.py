"""A seeded reply is the same whatever runs beside it, was cached, or cut it into chunks and threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from caldrixd.engine.engine import Engine, Request
from caldrixd.engine.sampling import Sampling
from caldrixd.lanes import cpu
from caldrixd.lanes.cpu import CpuProgram
from tests.support import models
from tests.support.replies import drain

KNOBS = Sampling(1.2, top_k=200, top_p=0.97, min_p=0.001, repetition_penalty=1.1, seed=7)
LENGTH = 24


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3_5"])
def program(request: pytest.FixtureRequest) -> Iterator[CpuProgram]:
    plan, tensors = models.opened(models.tiny(request.param))
    loaded = cpu.load(plan, tensors, threads=2, report=lambda code, fields: None)
    yield loaded
    loaded.close()


def prompt(length: int, seed: int = 3) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 500, length).tolist())


def request(
    id: int, tokens: tuple[int, ...], sampling: Sampling = KNOBS, threads: int = 0, length: int = LENGTH
) -> Request:
    return Request(id, tokens, 256, length, threads=threads, sampling=sampling)


def replies(engine: Engine, *requests: Request) -> dict[int, list[int]]:
    for each in requests:
        engine.submit(each)
    return {id: reply.tokens for id, reply in drain(engine).items()}


def alone(program: CpuProgram, sampling: Sampling = KNOBS) -> list[int]:
    return replies(Engine(program), request(0, prompt(70), sampling))[0]


def test_a_seed_is_the_whole_difference(program: CpuProgram) -> None:
    first = alone(program)
    assert len(first) == LENGTH
    assert alone(program) == first
    assert alone(program, Sampling(**{**vars(KNOBS), "seed": 8})) != first


def test_seven_neighbours_change_nothing(program: CpuProgram) -> None:
    neighbours = [
        request(id, prompt(10 * id, id), Sampling(0.3 * id, seed=id), length=5 * id) for id in range(1, 8)
    ]
    together = replies(Engine(program), *neighbours[:3], request(0, prompt(70)), *neighbours[3:])
    assert together[0] == alone(program)
    for neighbour in neighbours:
        assert together[neighbour.id] == replies(Engine(program), neighbour)[neighbour.id]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_and_threads_change_nothing(program: CpuProgram, chunk: int, threads: int) -> None:
    engine = Engine(program, prefill_chunk=chunk)
    assert replies(engine, request(0, prompt(70), threads=threads))[0] == alone(program)


def test_a_cached_prompt_changes_nothing(program: CpuProgram) -> None:
    engine = Engine(program)
    replies(engine, request(1, prompt(70)[:50]), request(2, prompt(70), Sampling(2.0, seed=1)))
    engine.submit(request(0, prompt(70)))
    reply = drain(engine)[0]
    assert reply.usage is not None
    assert reply.usage.cached_tokens > 0
    assert reply.tokens == alone(program)
