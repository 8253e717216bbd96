"""Recurrent state is extended, or goes back to a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from caldrixd.engine.cache import SNAPSHOTS
from caldrixd.engine.engine import TAIL, Engine, Request
from caldrixd.lanes.lane import Rows
from tests.support.mock_program import PIECE_BYTES, RECURRENT_BYTES, MockProgram, mock_plan, reply
from tests.support.replies import Reply, collect, drain

PROMPT = tuple(i * i % 59 for i in range(50))


@pytest.fixture
def program() -> Iterator[MockProgram]:
    result = MockProgram(plan=mock_plan(recurrent=True))
    yield result
    result.close()


def ask(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 4) -> int:
    """Cached tokens of a request whose reply is checked."""
    engine.submit(Request(1, prompt, 256, max_tokens))
    got = drain(engine)[1]
    assert got.tokens == reply(prompt, max_tokens)
    assert got.usage is not None
    return got.usage.cached_tokens


def ends(program: MockProgram, done: int = 0) -> list[int]:
    """One past the last position of each step, of a single sequence."""
    return [rows.positions[-1] + 1 for rows in program.steps[done:]]


def test_a_prompt_is_cut_where_the_snapshot_is_taken(program: MockProgram) -> None:
    assert ask(Engine(program, prefill_chunk=20), PROMPT) == 0
    assert ends(program) == [16, 34, 50, 51, 52, 53]
    assert program.calls["snapshot"] == 1


@pytest.mark.parametrize(("length", "snapshots"), [(TAIL, 0), (2 * TAIL, 0), (2 * TAIL + 1, 1)])
def test_a_short_prompt_is_not_cut(program: MockProgram, length: int, snapshots: int) -> None:
    ask(Engine(program), PROMPT[:length])
    assert program.calls["snapshot"] == snapshots


def test_what_can_be_cut_anywhere_needs_no_snapshot() -> None:
    program = MockProgram()
    ask(Engine(program, prefill_chunk=16), PROMPT)
    assert program.calls["snapshot"] == 0
    assert ends(program)[:4] == [16, 32, 48, 50]


def test_a_turn_that_goes_on_extends_all_of_it(program: MockProgram) -> None:
    engine = Engine(program)
    ask(engine, PROMPT)
    turn = (*PROMPT, *reply(PROMPT, 4), 50, 51)
    done = len(program.steps)
    assert ask(engine, turn) == len(PROMPT) + 3
    assert ends(program, done) == [56, 57, 58, 59]
    assert program.calls["restore"] == 0
    assert len(program.slots) == 1


def test_a_turn_that_writes_the_end_of_the_prompt_anew_starts_before_it(program: MockProgram) -> None:
    engine = Engine(program)
    ask(engine, PROMPT)
    turn = (*PROMPT[:-3], 60, 61, 62, *range(30))
    assert ask(engine, turn) == len(PROMPT) - TAIL
    assert program.calls["restore"] == 1
    assert len(program.slots) == 1


def test_the_same_prompt_again_starts_from_its_snapshot(program: MockProgram) -> None:
    engine = Engine(program)
    ask(engine, PROMPT, 100)
    for _ in range(3):
        assert ask(engine, PROMPT, 100) == len(PROMPT) - TAIL
    assert program.calls == {"snapshot": 1, "restore": 3}
    assert len(program.slots) == 1


def test_all_but_the_last_token_held_is_not_one_token_too_many(program: MockProgram) -> None:
    engine = Engine(program)
    ask(engine, PROMPT, 1)
    assert ask(engine, PROMPT, 1) == len(PROMPT) - TAIL
    assert ask(engine, (*PROMPT, *reply(PROMPT, 1)), 1) == len(PROMPT)


def test_a_history_that_differs_before_every_snapshot_is_computed_anew(program: MockProgram) -> None:
    engine = Engine(program)
    ask(engine, PROMPT)
    assert ask(engine, (*PROMPT[:30], 60, 61, *PROMPT)) == 0


def conversation(engine: Engine, turns: int) -> list[tuple[int, ...]]:
    """The prompts of a conversation, each of them answered."""
    prompt, prompts = PROMPT, []
    for _ in range(turns):
        prompts.append(prompt)
        ask(engine, prompt)
        prompt = (*prompt, *reply(prompt, 4), *range(20))
    return prompts


def test_a_user_who_goes_back_a_turn_finds_the_snapshot_of_that_turn(program: MockProgram) -> None:
    engine = Engine(program)
    prompts = conversation(engine, 4)
    edited = (*prompts[2][:-4], *range(30))
    assert ask(engine, edited) == len(prompts[2]) - TAIL
    assert ask(engine, (*edited[:-1], 60)) == len(edited) - TAIL


def test_only_the_newest_snapshots_of_a_sequence_are_held(program: MockProgram) -> None:
    engine = Engine(program)
    conversation(engine, SNAPSHOTS + 2)
    (slot,) = program.slots.values()
    assert len(slot.valid()) == SNAPSHOTS
    assert program.calls["restore"] == 0


def test_snapshots_count_as_bytes(program: MockProgram) -> None:
    one = PIECE_BYTES + (2 + 1) * RECURRENT_BYTES
    engine = Engine(program, cache_bytes=3 * one - 1)
    for first in range(4):
        ask(engine, (first, *PROMPT))
        assert program.state_bytes() == min(first + 1, 2) * one


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("k", range(9))
def test_a_reply_cancelled_at_step_k_leaves_a_clean_cache(program: MockProgram, k: int, inside: bool) -> None:
    engine = Engine(program, prefill_chunk=16)
    neighbour = (8,) * 40
    engine.submit(Request(1, PROMPT, 256, None))
    engine.submit(Request(2, neighbour, 256, 20))
    replies: dict[int, Reply] = {}
    for _ in range(k):
        collect(replies, engine.step())

    def during(rows: Rows) -> None:
        engine.cancel(1)
        program.cancel()

    if inside:
        program.during = during
        collect(replies, engine.step())
        program.during = lambda rows: None
    else:
        engine.cancel(1)
    while engine.busy:
        collect(replies, engine.step())
    got = replies[1].tokens
    assert replies[1].finish == "cancelled"
    assert got == reply(PROMPT, len(got))
    assert replies[2].tokens == reply(neighbour, 20)
    again = ask(engine, (*PROMPT, *got, 7, 8))
    # Both prompts share the rows of a step; the last 16 of this one are a step of its own.
    assert again == [0, 8, 16, 24, 32, 34, 50, 51, 52][k]
