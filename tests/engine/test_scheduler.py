"""Which rows a step holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caldrixd.engine.cache import Slot
from caldrixd.engine.pace import Pace
from caldrixd.engine.scheduler import PROMPT_SECONDS, REPLY_SECONDS, Batch, schedule, split
from caldrixd.engine.session import Request, Session
from tests.support.mock_program import mock_plan


def session(id: int, tokens: list[int], committed: int = 0, dtype: str = "f32", threads: int = 0) -> Session:
    request = Request(id, tuple(tokens), 1000, dtype=dtype, threads=threads)
    return Session(request, Slot(10 + id, 1000, dtype), tokens, committed, committed, 0.0, 0.0)


def pace(rows_a_second: int = 0, kinds: tuple[tuple[str, int], ...] = (("f32", 0), ("bf16", 0))) -> Pace:
    """What is measured of a plan whose rows cost the same everywhere; 0: nothing yet."""
    result = Pace(mock_plan(fixed=7))
    for kind in kinds if rows_a_second else ():
        result.measured(kind, range(64), 64 / rows_a_second)
    return result


def counts(batch: Batch) -> dict[int, int]:
    return {share.session.request.id: share.count for share in batch.shares}


@pytest.mark.parametrize(
    ("wants", "budget", "expected"),
    [
        ([100], 8, [8]),
        ([3], 8, [3]),
        ([100, 100], 8, [4, 4]),
        ([100, 100], 9, [5, 4]),
        ([2, 100, 100], 8, [2, 3, 3]),
        ([100, 100, 100], 2, [1, 1, 0]),
        ([], 8, []),
        ([5, 5], 0, [0, 0]),
    ],
)
def test_split(wants: list[int], budget: int, expected: list[int]) -> None:
    assert split(wants, budget) == expected


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(0, 300))
def test_split_is_fair_and_leaves_nothing(wants: list[int], budget: int) -> None:
    given_rows = split(wants, budget)
    assert sum(given_rows) == min(budget, sum(wants))
    assert all(0 <= rows <= want for rows, want in zip(given_rows, wants, strict=True))
    unsatisfied = [rows for rows, want in zip(given_rows, wants, strict=True) if rows < want]
    if unsatisfied:
        assert max(given_rows) <= min(unsatisfied) + 1
        assert unsatisfied == sorted(unsatisfied, reverse=True)


def test_a_running_reply_has_its_row_beside_a_full_chunk() -> None:
    long, running = session(1, list(range(100))), session(2, [1, 2, 3], committed=2)
    (batch,) = schedule([long, running], pace(), chunk=8, max_rows=64)
    assert counts(batch) == {2: 1, 1: 8}


def test_the_chunk_shrinks_to_the_rows_of_the_lane() -> None:
    sessions = [session(i, [1, 2], committed=1) for i in range(3)] + [session(9, list(range(100)))]
    (batch,) = schedule(sessions, pace(), chunk=64, max_rows=8)
    assert counts(batch) == {0: 1, 1: 1, 2: 1, 9: 5}


def test_rows_carry_slot_position_and_token_and_want_each_last_one() -> None:
    first, second = session(1, [5, 6, 7], committed=1), session(2, [8, 9, 4, 3])
    (batch,) = schedule([first, second], pace(), chunk=5, max_rows=64)
    rows = batch.rows()
    assert list(rows.slots) == [11, 11, 12, 12, 12]
    assert list(rows.positions) == [1, 2, 0, 1, 2]
    assert list(rows.tokens) == [6, 7, 8, 9, 4]
    assert list(rows.wanted) == [1]


def test_each_dtype_is_a_batch_with_the_most_threads_asked_for() -> None:
    sessions = [
        session(1, [1, 2], committed=1, threads=2),
        session(2, [1, 2], committed=1, dtype="bf16"),
        session(3, [1, 2], committed=1, threads=3),
    ]
    batches = schedule(sessions, pace(), chunk=8, max_rows=64)
    assert [(batch.dtype, batch.threads, sorted(counts(batch))) for batch in batches] == [
        ("f32", 3, [1, 3]),
        ("bf16", 0, [2]),
    ]


def test_a_default_is_not_slowed_by_one_who_asked_for_few() -> None:
    sessions = [session(1, [1, 2], committed=1, threads=1), session(2, [1, 2], committed=1)]
    assert [batch.threads for batch in schedule(sessions, pace(), chunk=8, max_rows=64)] == [0]


def test_nothing_to_schedule() -> None:
    assert schedule([], pace(), chunk=8, max_rows=64) == []


def test_a_prompt_alone_gets_the_rows_of_a_longer_step() -> None:
    long, running = session(1, list(range(900))), session(2, [1, 2, 3], committed=2)
    (alone,) = schedule([long], pace(1024), chunk=600, max_rows=600)
    (beside,) = schedule([long, running], pace(1024), chunk=600, max_rows=600)
    assert counts(alone) == {1: int(1024 * PROMPT_SECONDS)}
    assert counts(beside) == {2: 1, 1: int(1024 * REPLY_SECONDS - 1)}


def test_a_reply_waits_for_the_prompts_of_every_dtype() -> None:
    sessions = [
        session(1, list(range(900))),
        session(2, list(range(900)), dtype="bf16"),
        session(3, [1, 2], committed=1),
    ]
    batches = schedule(sessions, pace(1024), chunk=600, max_rows=600)
    assert [sum(counts(batch).values()) for batch in batches] == [76, 76]


def test_other_threads_are_another_pace() -> None:
    sessions = [session(1, list(range(900)), threads=1)]
    (batch,) = schedule(sessions, pace(1024), chunk=600, max_rows=600)
    assert counts(batch) == {1: 16}


def test_no_share_goes_past_a_mark() -> None:
    marked = session(1, list(range(50)))
    marked.mark = 34
    ends = []
    while marked.pending:
        (batch,) = schedule([marked], pace(1024), chunk=20, max_rows=64)
        marked.committed += counts(batch)[1]
        ends.append(marked.committed)
    assert ends == [20, 34, 50]
