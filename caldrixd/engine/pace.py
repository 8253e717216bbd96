"""How many rows a step can hold within some seconds, by what steps before it took.

A row's cost grows with its position, so seconds are measured against counted work: the multiply-adds
of its products with weights, and of its attention over the positions before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from caldrixd.plan.plan import Plan

# A step with fewer rows says little about one with many, and none is planned smaller.
LEAST_ROWS = 16
# So that the rate of a clock too coarse to see a step is still a number.
TICK = 1e-9


@dataclass(frozen=True)
class Work:
    """Multiply-adds of one row: `fixed`, and `spans[n]` for each of its last n positions."""

    fixed: int
    spans: Mapping[float, int]

    def row(self, position: int) -> int:
        """Of the row at `position`."""
        return self.fixed + sum(each * int(min(position + 1, span)) for span, each in self.spans.items())


def count(plan: Plan) -> Work:
    """The work of a row whose logits are not wanted."""
    shapes = {weight.name: weight.shape for weight in plan.weights}
    fixed, spans = 1, dict[float, int]()
    for op in plan.ops:
        params = op.params
        if op.kind == "gather":
            break
        if op.kind == "linear":
            fixed += math.prod(shapes[op.weights[0]])
        elif op.kind == "experts":
            weights = sum(math.prod(shapes[name]) for name in op.weights)
            fixed += int(weights * params["top_k"] / params["experts"])
        elif op.kind == "delta_rule":
            # Decay, read, correction and read again of a state of this shape.
            fixed += int(4 * params["value_heads"] * params["key_dim"] * params["value_dim"])
        elif op.kind == "attention":
            span = params["window"] or math.inf
            spans[span] = spans.get(span, 0) + int(2 * params["heads"] * params["head_dim"])
    return Work(fixed, spans)


class Pace:
    """Seconds a unit of work took in the last step of each kind (dtype and threads)."""

    def __init__(self, plan: Plan) -> None:
        self._work = count(plan)
        self._seconds: dict[tuple[str, int], float] = {}

    def measured(self, kind: tuple[str, int], positions: Sequence[int], seconds: float) -> None:
        """A step with rows at `positions` took `seconds`."""
        if len(positions) >= LEAST_ROWS:
            self._seconds[kind] = max(seconds, TICK) / sum(map(self._work.row, positions))

    def rows(
        self, kind: tuple[str, int], seconds: float, *, beside: Iterable[int], first: int, most: int
    ) -> int:
        """How many rows, `most` at most, from position `first` on fit into `seconds` beside others.

        `beside` are the positions of the others. LEAST_ROWS at least, and as long as nothing is measured.
        """
        if kind not in self._seconds:
            return min(LEAST_ROWS, most)
        work = seconds / self._seconds[kind] - sum(map(self._work.row, beside))
        # Of rows that many, the one in the middle costs the average.
        many = min(most, max(0, int(work / self._work.row(first))))
        return min(most, max(LEAST_ROWS, int(work / self._work.row(first + many // 2))))
