"""Rows that fit into some seconds."""

from __future__ import annotations

import math

import pytest

from caldrixd.engine.pace import LEAST_ROWS, Pace, Work, count
from caldrixd.plan.builder import PlanBuilder
from caldrixd.spec import Rope
from tests.support.mock_program import mock_plan

KIND = ("f32", 2)


def test_the_work_of_a_row_is_that_of_its_products() -> None:
    b = PlanBuilder(Rope("default", 1e4, 8))
    x = b.embed("table", 100, 16)
    q, k, v = b.linear(x, "q", 32), b.linear(x, "k", 8), b.linear(x, "v", 8)
    y = b.attention(q, k, v, heads=4, kv_heads=1, head_dim=8, window=10)
    x = b.add(x, b.linear(y, "o", 16))
    y = b.attention(q, k, v, heads=4, kv_heads=1, head_dim=8)
    x = b.linear(b.gather(b.add(x, b.linear(y, "p", 16))), "head", 100)
    work = count(b.finish(vocab_size=100, hidden_size=16, max_context=64))
    assert work == Work(1 + 16 * (32 + 8 + 8) + 2 * 32 * 16, {10: 64, math.inf: 64})
    assert work.row(0) == work.fixed + 64 + 64
    assert work.row(19) == work.fixed + 10 * 64 + 20 * 64


def test_only_the_experts_of_a_row_are_its_work() -> None:
    b = PlanBuilder(Rope("default", 1e4, 8))
    x = b.embed("table", 100, 16)
    experts = [(f"{i}.gate", f"{i}.up", f"{i}.down") for i in range(4)]
    y = b.experts(x, b.linear(x, "router", 4), experts, 8, top_k=2, normalise=True)
    b.linear(b.gather(y), "head", 100)
    work = count(b.finish(vocab_size=100, hidden_size=16, max_context=64))
    assert work.fixed == 1 + 16 * 4 + 2 * 3 * 16 * 8


def test_nothing_measured_is_the_least() -> None:
    assert Pace(mock_plan()).rows(KIND, 1.0, beside=[], first=100, most=1 << 30) == LEAST_ROWS


@pytest.mark.parametrize(("seconds", "rows"), [(0.1, 100), (1.0, 10 * 100), (1e-4, LEAST_ROWS)])
def test_rows_follow_the_last_step(seconds: float, rows: int) -> None:
    pace = Pace(mock_plan(fixed=9))
    pace.measured(KIND, range(64), 5.0)
    pace.measured(KIND, range(64), 0.064)
    assert pace.rows(KIND, seconds, beside=[], first=100, most=1 << 30) == rows
    assert pace.rows(("bf16", 2), seconds, beside=[], first=100, most=1 << 30) == LEAST_ROWS


def test_a_row_far_on_costs_what_it_reads() -> None:
    pace = Pace(mock_plan(fixed=1022, attention=1))
    pace.measured(KIND, [0] * 128, 0.125)
    # The row at 9,216 costs ten times the first one, 50 rows on a little more.
    assert pace.rows(KIND, 1.0, beside=[], first=9 * 1024, most=1) == 1
    assert pace.rows(KIND, 1.0, beside=[], first=9 * 1024, most=512) == 1024 * 1024 // (10 * 1024 + 51)
    others = [9 * 1024] * 40
    left = 1024 * 1024 - 40 * 10 * 1024
    assert pace.rows(KIND, 1.0, beside=others, first=9 * 1024, most=512) == left // (10 * 1024 + 31)
    assert pace.rows(KIND, 1.0, beside=others * 10, first=9 * 1024, most=512) == LEAST_ROWS


def test_a_step_of_few_rows_says_nothing_of_many() -> None:
    pace = Pace(mock_plan(fixed=9))
    pace.measured(KIND, range(64), 0.064)
    pace.measured(KIND, range(LEAST_ROWS - 1), 9.0)
    assert pace.rows(KIND, 1.0, beside=[], first=100, most=1 << 30) == 1000


def test_a_clock_that_stands_still_sets_no_bound() -> None:
    pace = Pace(mock_plan())
    pace.measured(KIND, range(64), 0.0)
    assert pace.rows(KIND, 0.1, beside=[], first=100, most=512) == 512
