"""A lane without arithmetic: the next token is a sum over the whole history, so a wrong history shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Logits, Rows, Snapshot, StepCancelled
from caldrixd.plan.plan import Plan
from caldrixd.spec import Rope

VOCAB = 64


def next_token(history: Sequence[int]) -> int:
    return sum((i + 7) * (token + 1) for i, token in enumerate(history)) % VOCAB


def reply(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that follow `prompt`."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


@dataclass
class _Slot:
    ctx: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0


class MockProgram:
    """lanes.lane.Program. `steps` records the rows of each step that was run to its end.

    `during` is called inside each step, before the cancel word is looked at. At most `capacity`
    slots can be allocated. A token in `poison` gives NaN.
    """

    def __init__(self, *, max_rows: int = 64, capacity: int = 1000) -> None:
        self.plan = Plan((), {}, (), (), Rope("default", 1e4, 2), VOCAB, 1, 1 << 20)
        self.max_rows = max_rows
        self.settings = "mock"
        self.size = 0
        self.capacity = capacity
        self.slots: dict[int, _Slot] = {}
        self.steps: list[Rows] = []
        self.settings_of_steps: list[tuple[str, int]] = []
        self.during: Callable[[Rows], None] = lambda rows: None
        self.poison: set[int] = set()
        self.cancelled = threading.Event()
        self._next_slot = 0

    def allocate(self, ctx: int) -> int:
        if len(self.slots) >= self.capacity:
            raise Refused("run/memory", model="mock", needed=2, free=1, ctx=0)
        self._next_slot += 1
        self.slots[self._next_slot] = _Slot(ctx)
        return self._next_slot

    def release(self, slot: int) -> None:
        del self.slots[slot]

    def length(self, slot: int) -> int:
        return self.slots[slot].length

    def step(self, rows: Rows, *, threads: int, dtype: str = "f32") -> Logits:
        assert 0 < len(rows.tokens) <= self.max_rows
        self.cancelled.clear()
        logits = np.zeros((len(rows.wanted), VOCAB), np.float32)
        for row, (slot, position, token) in enumerate(
            zip(rows.slots, rows.positions, rows.tokens, strict=True)
        ):
            state = self.slots[slot]
            assert position <= len(state.tokens)
            assert position < state.ctx
            state.tokens[position:] = [token]
            if row in rows.wanted:
                result = logits[rows.wanted.index(row)]
                result[next_token(state.tokens)] = np.nan if token in self.poison else 1.0
        self.during(rows)
        if self.cancelled.is_set():
            raise StepCancelled
        self.steps.append(rows)
        self.settings_of_steps.append((dtype, threads))
        return logits

    def cancel(self) -> None:
        self.cancelled.set()

    def commit(self, slot: int, length: int) -> None:
        state = self.slots[slot]
        assert state.length <= length <= len(state.tokens)
        state.length = length

    def rewind(self, slot: int, length: int) -> None:
        state = self.slots[slot]
        assert 0 <= length <= state.length
        state.length = length
        del state.tokens[length:]

    def snapshot(self, slot: int) -> Snapshot:
        return Snapshot(self.slots[slot].length)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self.rewind(slot, snapshot.length)

    def close(self) -> None:
        self.slots.clear()
