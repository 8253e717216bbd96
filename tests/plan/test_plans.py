"""The plan of each architecture, in words: a change of a forward pass shows as a diff of these files."""

from __future__ import annotations

import pytest

from caldrixd.architectures import FAMILIES
from caldrixd.models import gate
from caldrixd.plan.plan import Plan
from tests.support.models import DATA, TINY, opened, tiny


def written(plan: Plan) -> str:
    lines = [
        f"{op.output} [{plan.widths[op.output]}] = {op.kind}({', '.join(op.inputs + op.weights)})"
        + "".join(f" {name}={value:.6g}" for name, value in op.params.items())
        for op in plan.ops
    ]
    return "\n".join([*lines, str(plan.rope), f"context {plan.max_context}"]) + "\n"


def test_every_architecture_has_a_tiny_model() -> None:
    assert {gate.read_spec(tiny(name)).architecture for name in TINY} == FAMILIES.keys()


@pytest.mark.parametrize("name", TINY)
def test_the_plan_is_as_recorded(name: str) -> None:
    plan, _ = opened(tiny(name))
    assert written(plan) == (DATA / "plans" / f"{name}.txt").read_text("utf-8")


def test_the_two_spellings_of_scaled_rope_are_one_model() -> None:
    assert opened(tiny("tiny-llama-rope-scaled"))[0] == opened(tiny("tiny-llama-v5-config"))[0]


@pytest.mark.parametrize("name", TINY)
def test_the_plan_uses_every_tensor_of_its_checkpoint_in_its_shape(name: str) -> None:
    plan, tensors = opened(tiny(name))
    assert {w.name: w.shape for w in plan.weights} == {n: t.shape for n, t in tensors.items()}
