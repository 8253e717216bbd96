"""What the lane says it will hold is what it takes: sizes of the arena, and how they grow."""

from __future__ import annotations

import pytest

from caldrix_kernels.step import layout as at
from caldrixd.lanes import cpu, holding
from caldrixd.lanes.lowering import lower
from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.memory import Cost
from caldrixd.plan.plan import Plan
from caldrixd.spec import Rope
from tests.support.models import TINY, opened, tiny

HALF_PAGE = holding.HUGE_PAGE // 2


def cost(name: str, ctx: int, *, threads: int = 1, arithmetic: str = "f32") -> Cost:
    plan, tensors = opened(tiny(name))
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    return holding.costs(plan, dtypes, threads=threads, arithmetic=arithmetic)(ctx)


@pytest.mark.parametrize("name", TINY)
def test_the_weights_are_the_arena(name: str) -> None:
    plan, tensors = opened(tiny(name))
    program = cpu.load(plan, tensors, report=lambda *_: None, threads=1)
    assert cost(name, 256).weights == program.size + HALF_PAGE
    program.close()


def test_state_is_what_a_slot_allocates() -> None:
    plan, _ = opened(tiny("tiny-llama"))
    lowered = lower(plan)
    # Two layers with two heads: keys of 16 and values of 16 padded to a panel, in blocks of 128.
    assert lowered.state_block == 2 * 2 * 128 * (16 + 32) * 4
    assert cost("tiny-llama", 128).state == lowered.state_block + HALF_PAGE
    assert cost("tiny-llama", 129).state == 2 * lowered.state_block + HALF_PAGE


def test_recurrent_state_stands_three_times_whatever_the_context() -> None:
    lowered = lower(opened(tiny("tiny-qwen3_5"))[0])
    assert lowered.recurrent_bytes
    without = lowered.state_block + HALF_PAGE
    assert cost("tiny-qwen3_5", 1).state - without == 3 * lowered.recurrent_bytes + HALF_PAGE


def test_buffers_grow_with_the_rows_of_a_step_up_to_the_most() -> None:
    few, some, most, more = (cost("tiny-llama", ctx).activations for ctx in (64, 128, 512, 576))
    stride = sum(lower(opened(tiny("tiny-llama"))[0]).strides.values())
    assert some - few > 64 * stride // 2
    assert most - some > some - few
    assert more - most < stride * 8
    assert cost("tiny-llama", 64, arithmetic="bf16").activations > most
    assert cost("tiny-llama", 64, threads=3).activations > few


def small_plan() -> Plan:
    """Width 4, a gated branch of 8, vocabulary 320, another table for the head."""
    plan = PlanBuilder(Rope("default", 1e4, 2))
    x = plan.embed("table", 320, 4)
    normed = plan.rmsnorm(x, "gain", eps=1e-5)
    gated = plan.silu_mul(plan.linear(normed, "gate", 8), plan.linear(normed, "up", 8))
    x = plan.add(x, plan.linear(gated, "down", 4))
    plan.linear(plan.rmsnorm(plan.gather(x), "last", eps=1e-5), "head", 320)
    return plan.finish(vocab_size=320, hidden_size=4, max_context=100)


def test_matrices_are_padded_to_panels_and_tables_are_not() -> None:
    plan = small_plan()
    lowered = lower(plan)
    shapes = {weight.name: weight.shape for weight in plan.weights}
    dtypes = dict.fromkeys(shapes, "BF16")
    sizes = holding.weight_sizes(lowered, dtypes, shapes)
    # Gate and up: half a panel each of 16 rows that meet, in columns padded to 32.
    assert sizes["gate and up of gate"] == 32 * 32 * 2
    assert sizes["down"] == 32 * 32 * 2
    assert sizes["head"] == 320 * 32 * 2
    assert sizes["table"] == 320 * 4 * 2
    assert sizes["gain"] == sizes["last"] == at.PANEL * 4


def test_formats_that_meet_are_held_as_float32_and_copied_on_the_way() -> None:
    plan = small_plan()
    lowered = lower(plan)
    shapes = {weight.name: weight.shape for weight in plan.weights}
    dtypes = dict.fromkeys(shapes, "F16") | {"up": "F32"}
    sizes = holding.weight_sizes(lowered, dtypes, shapes)
    assert sizes["gate and up of gate"] == 32 * 32 * 4
    assert sizes["down"] == 32 * 32 * 2


def test_the_last_matrix_is_read_while_all_others_are_held() -> None:
    plan = small_plan()
    found = holding.costs(
        plan, {weight.name: "BF16" for weight in plan.weights}, threads=1, arithmetic="f32"
    )(1)
    # The head's 320 rows of 4 in its file, and what stood before it.
    assert found.passing == 2 * (320 * 4 + 4 * 8)
