"""The engine on the numpy oracle: neighbours, chunks, cancels and kept sequences never change a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from caldrixd.engine.engine import TAIL, Engine, Request
from caldrixd.lanes.lane import Logits, Rows
from caldrixd.plan import oracle
from caldrixd.plan.oracle import Program
from tests.support.models import oracle_program, reference, tiny
from tests.support.replies import Reply, collect, drain

Float32 = npt.NDArray[np.float32]

CTX = 400
# Plain, with windows, and with recurrent state.
MODELS = ("tiny-llama", "tiny-mistral-window", "tiny-qwen2-window", "tiny-qwen3_5")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def program(model: str) -> Program:
    return oracle_program(tiny(model))


@pytest.fixture(scope="module")
def prompts(model: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = reference(model)["prompts"]
    return result


def engine_of(program: Program, **settings: Any) -> Engine:
    """An engine on a clock that stands still: no step is ever too long."""
    return Engine(program, clock=lambda: 0.0, **settings)


def request(id: int, prompt: dict[str, Any], **settings: Any) -> Request:
    tokens = len(prompt["generated_ids"])
    return Request(id, tuple(prompt["prompt_ids"]), **{"ctx": CTX, "max_tokens": tokens, **settings})


class Recorder:
    """The logits of every step of a program, row by row, and the slots that each step held."""

    def __init__(self, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Float32] = []
        self.slots: list[set[int]] = []
        self._step = program.step
        monkeypatch.setattr(program, "step", self._record)

    def _record(self, rows: Rows, *, threads: int, dtype: str = "f32") -> Logits:
        result = self._step(rows, threads=threads, dtype=dtype)
        self.logits += [row.copy() for row in result.values]
        self.slots.append(set(rows.slots))
        return result

    def take(self) -> Float32:
        """The logits since the last call, float32[rows, vocab_size]."""
        taken, self.logits = np.array(self.logits), []
        return taken


@pytest.fixture
def recorder(program: Program, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(program, monkeypatch)


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int = 6) -> int:
    """Cached tokens of a request that is alone."""
    engine.submit(Request(99, tuple(prompt), CTX, max_tokens))
    usage = drain(engine)[99].usage
    assert usage is not None
    return usage.cached_tokens


# --- neighbours and chunks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "delay"),
    [(1, 3), (7, 0), (16, 3), (64, 0), (64, 3), (265, 0), (266, 3), (267, 0), (500, 3)],
)
def test_sessions_side_by_side_give_the_reference(
    program: Program, prompts: list[dict[str, Any]], chunk: int, delay: int
) -> None:
    engine = engine_of(program, prefill_chunk=chunk, cache_bytes=0)
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


def test_eight_share_the_steps_of_a_reply(
    program: Program, prompts: list[dict[str, Any]], recorder: Recorder
) -> None:
    engine = engine_of(program)
    for id in range(10):
        engine.submit(request(id, prompts[id % 3]))
    replies = drain(engine)
    assert all(replies[id].tokens == prompts[id % 3]["generated_ids"] for id in range(10))
    assert max(map(len, recorder.slots)) == 8


def test_one_that_is_to_be_alone_is(
    program: Program, prompts: list[dict[str, Any]], recorder: Recorder
) -> None:
    engine = engine_of(program)
    for id, prompt in enumerate(prompts):
        engine.submit(request(id, prompt, max_batch=1))
    replies = drain(engine)
    assert [replies[id].tokens for id in range(4)] == [prompt["generated_ids"] for prompt in prompts]
    assert set(map(len, recorder.slots)) == {1}


def test_a_neighbour_of_another_arithmetic_changes_nothing(
    program: Program, prompts: list[dict[str, Any]], recorder: Recorder
) -> None:
    engine = engine_of(program, prefill_chunk=16)
    engine.submit(request(1, prompts[3]))
    engine.submit(request(2, prompts[3], dtype="bf16"))
    together = drain(engine)
    assert together[1].tokens == prompts[3]["generated_ids"]
    assert set(map(len, recorder.slots)) == {1}
    alone = engine_of(program)
    alone.submit(request(2, prompts[3], dtype="bf16"))
    assert drain(alone)[2].tokens == together[2].tokens


def test_an_end_token_ends_the_reply_where_the_reference_says(
    program: Program, model: str, prompts: list[dict[str, Any]]
) -> None:
    ends = [prompt for prompt in prompts if prompt["eos_step"] is not None]
    engine = engine_of(program)
    for id, prompt in enumerate(ends):
        engine.submit(request(id, prompt, stop_ids=frozenset(reference(model)["eos_token_ids"])))
    replies = drain(engine)
    for id, prompt in enumerate(ends):
        assert replies[id].tokens == prompt["generated_ids"][: prompt["eos_step"] + 1]
        assert replies[id].finish == "stop"


def test_a_context_is_filled_exactly(program: Program, prompts: list[dict[str, Any]]) -> None:
    prompt = prompts[0]
    ctx = len(prompt["prompt_ids"]) + 7
    engine = engine_of(program)
    engine.submit(request(1, prompt, ctx=ctx, max_tokens=None))
    got = drain(engine)[1]
    assert (got.tokens, got.finish) == (prompt["generated_ids"][:7], "length")


# --- what is kept -------------------------------------------------------------------------------

# Prompts of the tests below, in tokens, and the rows of their steps: 16, 16, 8, and the last 16 (recurrent),
# or 16, 16, 16, 8; with a neighbour of 11 tokens beside them the first two steps hold 8 and 13.
LENGTH = 56


def cancelled_in_step(engine: Engine, k: int, inside: bool, monkeypatch: pytest.MonkeyPatch) -> Reply:
    """Request 1, cancelled after `k` steps, or inside the step after them when all state is written."""
    replies: dict[int, Reply] = {}
    for _ in range(k):
        collect(replies, engine.step())
    if not inside:
        engine.cancel(1)
    else:
        gather = oracle.RUN["gather"]

        def cancel(*arguments: Any) -> Any:
            engine.cancel(1)
            engine._program.cancel()
            return gather(*arguments)

        with monkeypatch.context() as patch:
            patch.setitem(oracle.RUN, "gather", cancel)
            collect(replies, engine.step())
    collect(replies, engine.step())
    return replies[1]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("k", range(9))
def test_a_cancel_at_every_step_leaves_the_next_turn_as_a_clean_run(
    program: Program,
    prompts: list[dict[str, Any]],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    inside: bool,
) -> None:
    prompt = prompts[3]["prompt_ids"][:LENGTH]
    engine = engine_of(program, prefill_chunk=16)
    engine.submit(Request(1, tuple(prompt), CTX, 20))
    got = cancelled_in_step(engine, k, inside, monkeypatch)
    assert (got.finish, len(got.tokens)) == ("cancelled", max(0, k - 3))
    assert not engine.busy
    follow_up = [*prompt, *got.tokens, 5, 6, 7]
    recorder.take()
    held = [0, 16, 32, 40 if program.plan.recurrent else 48][k] if k < 4 else LENGTH + k - 4
    assert ask(engine, follow_up) == held
    continued = recorder.take()
    assert ask(engine_of(program), follow_up) == 0
    np.testing.assert_array_equal(continued, recorder.take())


@pytest.mark.parametrize("k", range(6))
def test_the_neighbour_of_a_cancelled_reply_gives_the_reference(
    program: Program, prompts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    engine = engine_of(program, prefill_chunk=16)
    engine.submit(request(1, prompts[3]))
    engine.submit(request(2, prompts[1]))
    replies: dict[int, Reply] = {}
    collected = engine.step

    def step() -> Any:
        events = collected()
        collect(replies, [event for event in events if event.id == 2])
        return events

    monkeypatch.setattr(engine, "step", step)
    assert cancelled_in_step(engine, k, True, monkeypatch).finish == "cancelled"
    while engine.busy:
        engine.step()
    assert replies[2].tokens == prompts[1]["generated_ids"]


Turn = Callable[[list[int]], list[int]]
TURNS: dict[str, tuple[Turn, int, int]] = {
    # Name: the next prompt from prompt + reply, tokens held for it, and with recurrent state.
    "again": (lambda all: all[:LENGTH], LENGTH - 1, LENGTH - TAIL),
    "goes on": (lambda all: [*all, 7, 8], LENGTH + 5, LENGTH + 5),
    "other end": (lambda all: [*all[: LENGTH - 5], 7, 8, 9, *all[LENGTH:]], LENGTH - 5, LENGTH - TAIL),
    "shorter": (lambda all: all[: LENGTH - 8], LENGTH - 9, LENGTH - TAIL),
    "other start": (lambda all: [7, *all], 0, 0),
}


@pytest.mark.parametrize("turn", TURNS)
def test_a_kept_sequence_gives_the_bits_of_a_cold_one(
    program: Program, prompts: list[dict[str, Any]], recorder: Recorder, turn: str
) -> None:
    follow_up, whole, recurrent = TURNS[turn]
    prompt = prompts[3]["prompt_ids"][:LENGTH]
    engine = engine_of(program)
    engine.submit(Request(1, tuple(prompt), CTX, 6))
    next_prompt = follow_up([*prompt, *drain(engine)[1].tokens])
    recorder.take()
    assert ask(engine, next_prompt) == (recurrent if program.plan.recurrent else whole)
    warm = recorder.take()
    assert ask(engine_of(program), next_prompt) == 0
    np.testing.assert_array_equal(warm, recorder.take())
