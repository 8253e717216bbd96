"""A CPU program that keeps the logits it gave, so that a test sees them through the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from caldrixd.engine.engine import TokenEvent
from caldrixd.lanes import cpu
from caldrixd.lanes.cpu import CpuProgram
from caldrixd.lanes.lane import Logits, Rows, Variant
from caldrixd.plan.plan import Plan, Tensor

Float32 = npt.NDArray[np.float32]


class Recorded:
    """A program in an engine's hands: it keeps the logits it gave, and a step of it can be broken off.

    `break_off` is called in the middle of a step, until it is taken away, and the step is stopped there.
    """

    def __init__(self, program: CpuProgram) -> None:
        self._program = program
        self._slots: set[int] = set()
        self._stage = 0
        self.break_off: Callable[[], None] | None = None
        self.logits: list[Float32] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def allocate(self, ctx: int) -> int:
        slot = self._program.allocate(ctx)
        self._slots.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._slots.discard(slot)
        self._program.release(slot)

    def release_all(self) -> None:
        for slot in sorted(self._slots):
            self.release(slot)

    def step(self, rows: Rows, *, threads: int, dtype: str = "f32") -> Logits:
        if self.break_off:
            # Some stages are run, another number each time; the cancel word stops the step that follows.
            self._stage = (self._stage + 1) % len(self._program._program)
            self._program.step(rows, threads=threads, dtype=dtype, ops=(0, self._stage))
            self.break_off()
            self._program.cancel()
        logits = self._program.step(rows, threads=threads, dtype=dtype)
        self.logits += [row.copy() for row in logits.values]
        return logits

    def take(self, events: Sequence[TokenEvent]) -> list[tuple[TokenEvent, Float32]]:
        """The events with a token of one step of the engine, and what each was picked from."""
        taken, self.logits = self.logits, []
        return list(zip((event for event in events if event.token is not None), taken, strict=True))


def load(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    variant: Variant = cpu.NATIVE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Recorded:
    return Recorded(
        cpu.load(
            plan,
            tensors,
            threads=2,
            report=lambda code, fields: None,
            variant=variant,
            environment=environment,
        )
    )
