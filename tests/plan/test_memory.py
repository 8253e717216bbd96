"""What a plan's state takes, and what a cost adds up to, worked out by hand."""

from __future__ import annotations

from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.memory import Cost
from caldrixd.spec import Rope
from tests.support.models import opened, tiny


def test_what_passes_stands_beside_the_weights_but_not_beside_the_state() -> None:
    assert Cost(weights=100, passing=30, state=20, activations=5).total == 130
    assert Cost(weights=100, passing=24, state=20, activations=5).total == 125


def test_recurrent_state_has_one_size() -> None:
    plan = PlanBuilder(Rope("default", 1e4, 2))
    x = plan.embed("table", 10, 4)
    plan.linear(plan.causal_conv(x, "conv", taps=3), "table", 10)
    small = plan.finish(vocab_size=10, hidden_size=4, max_context=100)
    # Two rows of four floats.
    assert (small.recurrent_bytes, small.kv_bytes(100)) == (32, 0)


def test_a_whole_model() -> None:
    plan, _ = opened(tiny("tiny-llama"))
    # Keys and values of two layers with two heads of 16.
    assert plan.kv_bytes(100) == 2 * 2 * 2 * 16 * 4 * 100
    # Three delta nets: three inputs of 128 channels, and four heads of 16 x 16.
    plan, _ = opened(tiny("tiny-qwen3_5"))
    assert plan.recurrent_bytes == 3 * 4 * (3 * 128 + 4 * 16 * 16)
    assert plan.kv_bytes(100) == 2 * 2 * 32 * 4 * 100
