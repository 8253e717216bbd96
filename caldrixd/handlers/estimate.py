"""What a model will need, from its plan and how its weights are stored, of which none is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from caldrixd.architectures import FAMILIES
from caldrixd.lanes import holding
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.models.fit import Needs
from caldrixd.models.weights import ITEM_BYTES, read_entries
from caldrixd.plan.memory import Cost
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec

# Bytes of a weight, on average, from which a checkpoint is one of float32: the others have two.
FLOAT32_BYTES = 3


class Costs(Protocol):
    """What a lane offers: the cost of one sequence by its tokens."""

    def __call__(
        self, plan: Plan, dtypes: Mapping[str, str], *, threads: int, arithmetic: str
    ) -> Callable[[int], Cost]: ...


LANES: Mapping[str, Costs] = {"cpu": holding.costs}


def needs(plan: Plan, formats: Mapping[str, str], lane: str, *, threads: int, arithmetic: str) -> Needs:
    """`formats` are the stored dtypes of the plan's weights; `threads` 0 is the lane's default."""
    cost = LANES[lane](plan, formats, threads=threads or default_threads(), arithmetic=arithmetic)
    return Needs(plan.vocab_size, plan.max_context, cost)


def stored(spec: ModelSpec, plan: Plan, directory: Path) -> dict[str, str]:
    """The formats of a checkpoint on disk. Refused "weights/..." for headers that cannot be read.

    A tensor that is not there, or no weights, is refused when it is loaded.
    """
    entries = read_entries(directory, FAMILIES[spec.architecture].stacked)
    found = {name: entry.dtype for name, entry in entries.items() if entry.dtype in ITEM_BYTES}
    return {weight.name: found.get(weight.name, "BF16") for weight in plan.weights}


def guessed(plan: Plan, weight_bytes: int) -> dict[str, str]:
    """The formats of one of which only the size in bytes is known, all its files together."""
    count = sum(math.prod(weight.shape) for weight in plan.weights)
    dtype = "F32" if weight_bytes >= FLOAT32_BYTES * count else "BF16"
    return {weight.name: dtype for weight in plan.weights}
