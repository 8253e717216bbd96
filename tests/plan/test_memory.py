"""What a plan costs, worked out by hand."""

from __future__ import annotations

from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.memory import activation_bytes, cost, largest_ctx
from caldrixd.plan.plan import Plan
from caldrixd.spec import Rope
from tests.support.models import opened, tiny


def small_plan() -> Plan:
    """Width 4, one attention layer with one key head of two, vocabulary 10."""
    plan = PlanBuilder(Rope("default", 1e4, 2))
    x = plan.embed("table", 10, 4)
    q, k, v = (plan.linear(x, name, width) for name, width in (("q", 4), ("k", 2), ("v", 2)))
    x = plan.add(x, plan.attention(q, k, v, heads=2, kv_heads=1, head_dim=2))
    plan.linear(plan.gather(x), "table", 10)
    return plan.finish(vocab_size=10, hidden_size=4, max_context=100)


def test_activations_are_the_most_that_is_alive_at_once() -> None:
    # At the attention: x (4), q (4), k (2), v (2), y (4) = 16 floats a row.
    assert activation_bytes(small_plan(), max_rows=3) == 4 * 16 * 3


def test_logits_count_for_the_wanted_rows_only() -> None:
    # At the head: gathered x (4) and logits (10) for each of 50 rows, against 16 for one row before.
    assert activation_bytes(small_plan(), max_rows=1, wanted=50) == 4 * 14 * 50


def test_cost_adds_weights_state_and_activations() -> None:
    got = cost(small_plan(), 1000, ctx=10, max_rows=3)
    # Keys and values: 2 floats each for 10 positions.
    assert (got.weights, got.state, got.activations) == (1000, 160, 192)
    assert got.total == 1352


def test_the_largest_context_fills_what_is_free() -> None:
    plan = small_plan()
    fixed = 1000 + 192
    assert largest_ctx(plan, 1000, free=fixed + 16 * 7 + 15, max_rows=3) == 7
    assert largest_ctx(plan, 1000, free=fixed + 15, max_rows=3) == 0
    assert largest_ctx(plan, 1000, free=0, max_rows=3) == 0
    assert largest_ctx(plan, 1000, free=1 << 40, max_rows=3) == 100


def test_recurrent_state_stands_twice_whatever_the_context() -> None:
    plan = PlanBuilder(Rope("default", 1e4, 2))
    x = plan.embed("table", 10, 4)
    plan.linear(plan.causal_conv(x, "conv", taps=3), "table", 10)
    small = plan.finish(vocab_size=10, hidden_size=4, max_context=100)
    # Two rows of four floats, once committed and once being written.
    assert small.recurrent_bytes == 32
    assert cost(small, 0, ctx=0, max_rows=1).state == cost(small, 0, ctx=100, max_rows=1).state == 64
    assert largest_ctx(small, 0, free=63, max_rows=1) == 0


def test_experts_need_room_for_each_row_they_take() -> None:
    plan = PlanBuilder(Rope("default", 1e4, 2))
    x = plan.embed("table", 10, 4)
    scores = plan.linear(x, "router", 3)
    names = [(f"gate{n}", f"up{n}", f"down{n}") for n in range(3)]
    plan.experts(x, scores, names, 5, top_k=2, normalise=True)
    small = plan.finish(vocab_size=10, hidden_size=4, max_context=100)
    # x (4), scores (3), y (4); of two experts each the row (4), its hidden row (5) and the result (4).
    assert activation_bytes(small, max_rows=3) == 4 * 3 * (11 + 2 * 13)


def test_a_whole_model() -> None:
    plan, _ = opened(tiny("tiny-llama"))
    # Keys and values of two layers with two heads of 16.
    assert plan.kv_bytes(100) == 2 * 2 * 2 * 16 * 4 * 100
    # Three delta nets: three inputs of 128 channels, and four heads of 16 x 16.
    plan, _ = opened(tiny("tiny-qwen3_5"))
    assert plan.recurrent_bytes == 3 * 4 * (3 * 128 + 4 * 16 * 16)
    assert plan.kv_bytes(100) == 2 * 2 * 32 * 4 * 100
