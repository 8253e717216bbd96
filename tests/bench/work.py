"""What a step has to read and to compute, counted from the plan; None where that is not fixed."""

from __future__ import annotations

from collections.abc import Mapping

from caldrixd.plan.plan import Plan, Tensor

# Ops whose work is negligible, and those that are counted. `experts` reads what its scores pick.
_COUNTED = {
    "embed",
    "rmsnorm",
    "linear",
    "slice",
    "rope",
    "attention",
    "silu_mul",
    "sigmoid_mul",
    "add",
    "gather",
}


def weight_bytes(plan: Plan, tensors: Mapping[str, Tensor]) -> int | None:
    """Bytes of the weights that one step reads whole, as stored."""
    if any(op.kind == "experts" for op in plan.ops):
        return None
    names = {name for op in plan.ops if op.kind != "embed" for name in op.weights}
    return sum(tensors[name].data.size for name in names)


def operations(plan: Plan, tokens: int) -> float | None:
    """Floating-point operations of a prompt from position 0, a multiply-add counted as two.

    Matrix products and attention; the logits of one row.
    """
    if any(op.kind not in _COUNTED for op in plan.ops):
        return None
    shapes = {weight.name: weight.shape for weight in plan.weights}
    rows, total = tokens, 0.0
    for op in plan.ops:
        if op.kind == "gather":
            rows = 1
        elif op.kind == "linear":
            height, width = shapes[op.weights[0]]
            total += 2.0 * rows * height * width
        elif op.kind == "attention":
            window = int(op.params["window"]) or tokens
            keys = sum(min(position + 1, window) for position in range(tokens))
            total += 4.0 * keys * op.params["heads"] * op.params["head_dim"]
    return total
