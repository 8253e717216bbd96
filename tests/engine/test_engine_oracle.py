"""The engine on the numpy oracle: neighbours, chunks and cached prefixes never change a reply."""

from __future__ import annotations

from typing import Any

import pytest

from caldrixd.engine.engine import Engine, Request
from caldrixd.plan.oracle import Program
from tests.support.models import oracle_program, reference, tiny
from tests.support.replies import Reply, collect, drain

CTX = 400


@pytest.fixture(scope="module")
def program() -> Program:
    return oracle_program(tiny("tiny-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = reference("tiny-llama")["prompts"]
    return result


def request(id: int, prompt: dict[str, Any], **settings: Any) -> Request:
    tokens = len(prompt["generated_ids"])
    return Request(id, tuple(prompt["prompt_ids"]), **{"ctx": CTX, "max_tokens": tokens, **settings})


@pytest.mark.parametrize("chunk", [1, 16, 64, 265, 266, 267, 500])
@pytest.mark.parametrize("delay", [0, 3])
def test_sessions_side_by_side_give_the_reference(
    program: Program, prompts: list[dict[str, Any]], chunk: int, delay: int
) -> None:
    engine = Engine(program, prefill_chunk=chunk, max_sessions=8, cache_bytes=0)
    replies: dict[int, Reply] = {}
    for id, prompt in enumerate(prompts * 2):
        engine.submit(request(id, prompt))
        for _ in range(delay):
            collect(replies, engine.step())
    while engine.busy:
        collect(replies, engine.step())
    for id, prompt in enumerate(prompts * 2):
        assert replies[id].tokens == prompt["generated_ids"]
        assert replies[id].finish == "length"


def test_an_end_token_ends_the_reply_where_the_reference_says(
    program: Program, prompts: list[dict[str, Any]]
) -> None:
    prompt = next(prompt for prompt in prompts if prompt["eos_step"] is not None)
    engine = Engine(program)
    engine.submit(request(1, prompt, stop_ids=frozenset(reference("tiny-llama")["eos_token_ids"])))
    got = drain(engine)[1]
    assert got.tokens == prompt["generated_ids"][: prompt["eos_step"] + 1]
    assert got.finish == "stop"


def test_a_context_is_filled_exactly(program: Program, prompts: list[dict[str, Any]]) -> None:
    prompt = prompts[0]
    ctx = len(prompt["prompt_ids"]) + 7
    engine = Engine(program)
    engine.submit(request(1, prompt, ctx=ctx, max_tokens=None))
    got = drain(engine)[1]
    assert (got.tokens, got.finish) == (prompt["generated_ids"][:7], "length")


@pytest.mark.parametrize("k", [0, 1, 5, 17, 18, 19, 30])
def test_a_cancelled_reply_leaves_the_next_turn_as_a_clean_run(
    program: Program, prompts: list[dict[str, Any]], k: int
) -> None:
    prompt = prompts[3]
    follow_up = (*prompt["prompt_ids"], 5, 6, 7)
    clean = Engine(program, cache_bytes=0)
    clean.submit(Request(1, follow_up, CTX, 12))
    expected = drain(clean)[1].tokens

    engine = Engine(program, prefill_chunk=16)
    engine.submit(request(1, prompt))
    for _ in range(k):
        engine.step()
    engine.cancel(1)
    assert drain(engine)[1].finish == "cancelled"
    engine.submit(Request(2, follow_up, CTX, 12))
    got = drain(engine)[2]
    assert got.tokens == expected
    assert got.usage is not None
    assert got.usage.cached_tokens == min(16 * k, len(prompt["prompt_ids"]))


def test_a_cached_prefix_gives_the_reference(program: Program, prompts: list[dict[str, Any]]) -> None:
    prompt = prompts[3]
    engine = Engine(program)
    for cached in (0, len(prompt["prompt_ids"]) - 1):
        engine.submit(request(1, prompt))
        got = drain(engine)[1]
        assert got.tokens == prompt["generated_ids"]
        assert got.usage is not None
        assert got.usage.cached_tokens == cached
