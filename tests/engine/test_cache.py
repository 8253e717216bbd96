"""Prompts that begin as an earlier sequence reuse its slot."""

from __future__ import annotations

import pytest

from caldrixd.engine.cache import common_prefix
from caldrixd.engine.engine import Engine, Request
from tests.support.mock_program import PIECE_BYTES, MockProgram, reply
from tests.support.replies import drain

PROMPT = tuple(range(20))


def ask(engine: Engine, prompt: tuple[int, ...], **settings: object) -> int:
    """Cached tokens of a request whose reply is checked."""
    engine.submit(Request(1, prompt, **{"ctx": 256, "max_tokens": 4, **settings}))  # type: ignore[arg-type]
    got = drain(engine)[1]
    assert got.tokens == reply(prompt, len(got.tokens))
    assert got.usage is not None
    return got.usage.cached_tokens


@pytest.mark.parametrize(
    ("a", "b", "length"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 5, 3), 1), ((4,), (5,), 0)]
)
def test_common_prefix(a: tuple[int, ...], b: tuple[int, ...], length: int) -> None:
    assert common_prefix(a, b) == length


def test_the_next_turn_computes_only_what_is_new() -> None:
    program = MockProgram()
    engine = Engine(program)
    assert ask(engine, PROMPT) == 0
    turn = (*PROMPT, *reply(PROMPT, 4), 50, 51)
    done = len(program.steps)
    # The reply's last token was never run.
    assert ask(engine, turn) == len(PROMPT) + 3
    assert [len(rows.tokens) for rows in program.steps[done:]] == [3, 1, 1, 1]
    assert len(program.slots) == 1


def test_the_same_prompt_computes_its_last_token_again() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT)
    assert ask(engine, PROMPT) == len(PROMPT) - 1


def test_the_same_prompt_is_found_below_a_long_reply() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT, max_tokens=100)
    assert ask(engine, PROMPT) == len(PROMPT) - 1


def test_a_conversation_that_went_on_keeps_its_slot_when_its_first_prompt_is_asked_again() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT)
    longer = (*PROMPT, *reply(PROMPT, 4), *range(40))
    ask(engine, longer)
    assert ask(engine, PROMPT) == 0
    assert ask(engine, PROMPT) == len(PROMPT) - 1
    assert ask(engine, (*longer, 1)) == len(longer)


def test_a_shorter_prompt_goes_back() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT)
    assert ask(engine, PROMPT[:15]) == 14


def test_a_history_that_was_edited_is_computed_from_the_edit_on() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT)
    assert ask(engine, (*PROMPT[:18], 60, 61, 62)) == 18


@pytest.mark.parametrize("settings", [{"ctx": 255}, {"dtype": "bf16"}])
def test_a_slot_of_other_knobs_is_not_reused(settings: dict[str, object]) -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT)
    assert ask(engine, PROMPT, **settings) == 0
    assert ask(engine, PROMPT, **settings) == len(PROMPT) - 1


def test_the_slot_with_the_longest_common_prefix_is_taken() -> None:
    engine = Engine(MockProgram())
    ask(engine, PROMPT[:12])
    ask(engine, (9, 9, 9))
    ask(engine, (*PROMPT[:6], 40, 41, 42, 43, 44, 45))
    assert ask(engine, PROMPT) == 12


def test_two_conversations_with_one_opening_keep_a_slot_each() -> None:
    engine = Engine(MockProgram())
    opening = (60, 61)
    first, second = (*opening, *PROMPT), (*opening, *PROMPT[::-1])
    assert ask(engine, first) == 0
    assert ask(engine, second) == 0
    assert ask(engine, (*first, 1)) == len(first)
    assert ask(engine, (*second, 1)) == len(second)


def test_when_no_more_may_be_kept_even_a_short_prefix_counts() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=PIECE_BYTES)
    ask(engine, PROMPT)
    assert ask(engine, (*PROMPT[:2], 60, 61, 62)) == 2
    assert len(program.slots) == 1


def test_the_least_recently_used_slot_goes_first() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=2 * PIECE_BYTES)
    a, b, c = (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)
    ask(engine, a)
    ask(engine, b)
    ask(engine, (*a, 9))
    ask(engine, c)
    assert len(program.slots) == 2
    assert ask(engine, (*a, 9)) == 4
    assert ask(engine, b) == 0


def test_a_slot_is_not_cut_for_an_opening_while_an_older_one_can_go() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=2 * PIECE_BYTES)
    opening = (60, 61)
    first, second = (*opening, *PROMPT), (*opening, *PROMPT[::-1])
    ask(engine, (1, 1, 1, 1))
    ask(engine, first)
    assert ask(engine, second) == 0
    assert len(program.slots) == 2
    assert ask(engine, (*first, 1)) == len(first)
    assert ask(engine, (*second, 1)) == len(second)


def test_what_is_kept_is_counted_in_bytes() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=4 * PIECE_BYTES)
    for number, length in enumerate((10, 60, 130, 30, 200, 250, 5, 64, 65)):
        ask(engine, (number,) * length, max_tokens=1)
        assert program.state_bytes() <= 4 * PIECE_BYTES
        assert len(program.slots) == [1, 2, 2, 2, 1, 1, 1, 2, 3][number]


def test_a_slot_that_was_cut_is_counted_with_what_it_has_touched() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=4 * PIECE_BYTES)
    ask(engine, (1,) * 200)
    assert ask(engine, (1, 2, 3)) == 1
    ask(engine, (4, 5, 6))
    assert len(program.slots) == 1
    assert ask(engine, (1, 2, 3)) == 0


def test_nothing_is_kept_when_nothing_may_be() -> None:
    program = MockProgram()
    engine = Engine(program, cache_bytes=0)
    ask(engine, PROMPT)
    assert program.slots == {}
    assert ask(engine, PROMPT) == 0
