"""What a plan costs in memory, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from caldrixd.plan.plan import Plan

FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """Bytes: weights as stored, keys and values of one sequence, and the buffers of one step."""

    weights: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.activations


def cost(plan: Plan, weight_bytes: int, *, ctx: int, max_rows: int, wanted: int = 1) -> Cost:
    """The bytes of one sequence of `ctx` tokens in steps of `max_rows` rows, `wanted` of them with logits."""
    return Cost(weight_bytes, plan.kv_bytes(ctx), activation_bytes(plan, max_rows, wanted))


def activation_bytes(plan: Plan, max_rows: int, wanted: int = 1) -> int:
    """The most bytes of buffers that are alive at once, each freed after its last reader."""
    last_read = {name: index for index, op in enumerate(plan.ops) for name in op.inputs}
    rows = max_rows
    alive: dict[str, int] = {}
    peak = 0
    for index, op in enumerate(plan.ops):
        if op.kind == "gather":
            rows = wanted
        alive[op.output] = FLOAT * rows * plan.widths[op.output]
        peak = max(peak, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last_read.get(name, index) > index}
    return peak


def largest_ctx(plan: Plan, weight_bytes: int, *, free: int, max_rows: int, wanted: int = 1) -> int:
    """The longest context in tokens whose cost is within `free` bytes, up to the plan's own; 0 if none."""
    rest = free - cost(plan, weight_bytes, ctx=0, max_rows=max_rows, wanted=wanted).total
    per_token = plan.kv_bytes(1)
    return max(0, min(plan.max_context, rest // per_token if per_token else plan.max_context))
