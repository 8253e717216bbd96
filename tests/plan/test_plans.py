"""The plan of each architecture, in words: a change of a forward pass shows as a diff of these files."""

from __future__ import annotations

import pytest

from caldrixd.architectures import FAMILIES
from caldrixd.models import gate
from caldrixd.plan.plan import Op, Plan
from tests.support.models import DATA, opened, tiny

RECORDED = tuple(sorted(path.stem for path in (DATA / "plans").glob("*.txt")))


def weights_of(op: Op) -> tuple[str, ...]:
    """All but what stands between the first and the last expert."""
    return (*op.weights[:3], "...", *op.weights[-3:]) if op.kind == "experts" else op.weights


def written(plan: Plan) -> str:
    lines = [
        f"{op.output} [{plan.widths[op.output]}] = {op.kind}({', '.join(op.inputs + weights_of(op))})"
        + "".join(f" {name}={value:.6g}" for name, value in op.params.items())
        for op in plan.ops
    ]
    lines += [str(state) for state in plan.recurrent]
    return "\n".join([*lines, str(plan.rope), f"context {plan.max_context}"]) + "\n"


def test_every_architecture_has_a_recorded_plan() -> None:
    assert {gate.read_spec(tiny(name)).architecture for name in RECORDED} == FAMILIES.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_the_plan_is_as_recorded(name: str) -> None:
    plan, _ = opened(tiny(name))
    assert written(plan) == (DATA / "plans" / f"{name}.txt").read_text("utf-8")


def test_the_two_spellings_of_scaled_rope_are_one_model() -> None:
    assert opened(tiny("tiny-llama-rope-scaled"))[0] == opened(tiny("tiny-llama-v5-config"))[0]


def test_stacked_experts_are_the_same_plan() -> None:
    assert opened(tiny("tiny-qwen3-moe-stacked"))[0] == opened(tiny("tiny-qwen3-moe-raw"))[0]


def residual(plan: Plan, last: int) -> tuple[str, ...]:
    """What the last layer's norm reads: the input of the norm of that layer."""
    norms = [op for op in plan.ops[:last] if op.kind == "rmsnorm" and "input_layernorm" in op.weights[0]]
    return norms[-1].inputs


@pytest.mark.parametrize("name", RECORDED)
def test_beyond_the_last_layer_of_state_only_wanted_rows_go_on(name: str) -> None:
    plan, _ = opened(tiny(name))
    last = max(i for i, op in enumerate(plan.ops) if op.kind in ("attention", "delta_rule"))
    gathers = [i for i, op in enumerate(plan.ops) if op.kind == "gather"]
    # The branch before its projection, and what that is added to.
    assert [plan.ops[i].inputs for i in gathers] == [(plan.ops[gathers[0] - 1].output,), residual(plan, last)]
    between = {op.kind for op in plan.ops[last + 1 : gathers[0]]}
    assert between <= {"sigmoid_mul", "gated_rmsnorm"}


def test_only_recurrent_plans_cannot_be_rewound() -> None:
    for name in RECORDED:
        plan, _ = opened(tiny(name))
        assert plan.rewindable == ("qwen3_5" not in name)
