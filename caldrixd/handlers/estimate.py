"""What a model will need, from its plan and the bytes of its weight files, of which none is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from caldrixd.lanes import holding
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.models.fit import Needs
from caldrixd.plan.memory import Cost
from caldrixd.plan.plan import Plan

# Bytes of a weight, on average, from which a checkpoint is one of float32: the others have two.
FLOAT32_BYTES = 3


class Costs(Protocol):
    """What a lane offers: the cost of one sequence by its tokens."""

    def __call__(
        self, plan: Plan, dtypes: Mapping[str, str], *, threads: int, arithmetic: str
    ) -> Callable[[int], Cost]: ...


LANES: Mapping[str, Costs] = {"cpu": holding.costs}


def needs(plan: Plan, weight_bytes: int, lane: str, *, threads: int, arithmetic: str) -> Needs:
    """`weight_bytes` are those of all weight files; `threads` 0 is the lane's default."""
    count = sum(math.prod(weight.shape) for weight in plan.weights)
    dtype = "F32" if weight_bytes >= FLOAT32_BYTES * count else "BF16"
    cost = LANES[lane](
        plan,
        {weight.name: dtype for weight in plan.weights},
        threads=threads or default_threads(),
        arithmetic=arithmetic,
    )
    return Needs(plan.vocab_size, plan.max_context, cost)
