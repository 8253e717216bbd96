"""What a plan costs in memory, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from caldrixd.plan.plan import Op, Plan

FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """Bytes: weights as stored, the state of one sequence, and the buffers of one step."""

    weights: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.activations


def cost(plan: Plan, weight_bytes: int, *, ctx: int, max_rows: int, wanted: int = 1) -> Cost:
    """The bytes of one sequence of `ctx` tokens in steps of `max_rows` rows, `wanted` of them with logits."""
    # Recurrent state stands there twice: a step writes it beside what is committed.
    state = plan.kv_bytes(ctx) + 2 * plan.recurrent_bytes
    return Cost(weight_bytes, state, activation_bytes(plan, max_rows, wanted))


def activation_bytes(plan: Plan, max_rows: int, wanted: int = 1) -> int:
    """The most bytes of buffers that are alive at once, each freed after its last reader."""
    shapes = {weight.name: weight.shape for weight in plan.weights}
    last_read = {name: index for index, op in enumerate(plan.ops) for name in op.inputs}
    rows = max_rows
    alive: dict[str, int] = {}
    peak = 0
    for index, op in enumerate(plan.ops):
        if op.kind == "gather":
            rows = wanted
        alive[op.output] = FLOAT * rows * plan.widths[op.output]
        peak = max(peak, sum(alive.values()) + FLOAT * rows * _inner_width(op, shapes))
        alive = {name: size for name, size in alive.items() if last_read.get(name, index) > index}
    return peak


def _inner_width(op: Op, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Floats a row that an op needs beside its inputs and output: of each chosen expert the input, the
    hidden row and the output."""
    if op.kind != "experts":
        return 0
    width, hidden = shapes[op.weights[0]]
    return int(op.params["top_k"]) * (2 * hidden + width)


def largest_ctx(plan: Plan, weight_bytes: int, *, free: int, max_rows: int, wanted: int = 1) -> int:
    """The longest context in tokens whose cost is within `free` bytes, up to the plan's own; 0 if none."""
    rest = free - cost(plan, weight_bytes, ctx=0, max_rows=max_rows, wanted=wanted).total
    if rest < 0:
        return 0
    per_token = plan.kv_bytes(1)
    return min(plan.max_context, rest // per_token) if per_token else plan.max_context
