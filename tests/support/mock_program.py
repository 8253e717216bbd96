"""A lane without arithmetic: the next token is a sum over the whole history, so a wrong history shows.

It holds its caller to the rules of a lane: where rows may stand, what may be committed, and that recurrent
state goes back only to a snapshot that is still true.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from caldrix_kernels.argmax.reference import argmax
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Logits, Rows, Snapshot, StepCancelled
from caldrixd.plan.plan import KvState, Op, Plan, RecurrentState, Weight
from caldrixd.spec import Rope

VOCAB = 64
# Of each piece of 64 positions, and of the state of a recurrent plan.
PIECE_BYTES = 64 * 2 * 4
RECURRENT_BYTES = 4 * 256


def next_token(history: Sequence[int]) -> int:
    return sum((i + 7) * (token + 1) for i, token in enumerate(history)) % VOCAB


def reply(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens that follow `prompt`."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def mock_plan(*, recurrent: bool = False, fixed: int = 0, attention: int = 0) -> Plan:
    """A plan whose rows are `fixed` multiply-adds, and `attention` more for each position up to their own."""
    ops = (
        Op("linear", (), "x", ("weight",)),
        Op("attention", (), "y", params={"heads": attention / 2, "head_dim": 1, "window": 0}),
    )
    states = (RecurrentState((256,)),) if recurrent else ()
    weights = (Weight("weight", (fixed, 1)),)
    rope = Rope("default", 1e4, 2)
    return Plan(ops, {}, weights, (KvState(0, 1, 1),), rope, VOCAB, 1, 1 << 20, states)


@dataclass
class _Slot:
    """`tokens` is what a cache of keys and values would hold, `state` what a recurrence has seen."""

    ctx: int
    tokens: list[int] = field(default_factory=list)
    state: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    length: int = 0
    snapshots: list[weakref.ref[Snapshot]] = field(default_factory=list)

    def valid(self) -> list[Snapshot]:
        """Snapshots that somebody holds and that are true, shortest first."""
        return [saved for reference in self.snapshots if (saved := reference())]


class MockProgram:
    """lanes.lane.Program. `steps` records the rows of each step that was run to its end.

    `during` is called inside each step, before the cancel word is looked at. At most `capacity`
    slots can be allocated. A token in `poison` gives NaN. `calls` counts snapshots and restores.
    """

    def __init__(self, *, max_rows: int = 64, capacity: int = 1000, plan: Plan | None = None) -> None:
        self.plan = plan or mock_plan()
        self.max_rows = max_rows
        self.block = 64
        self.settings = "mock"
        self.size = 0
        self.capacity = capacity
        self.slots: dict[int, _Slot] = {}
        self.steps: list[Rows] = []
        self.settings_of_steps: list[tuple[str, int]] = []
        self.calls = {"snapshot": 0, "restore": 0}
        self.during: Callable[[Rows], None] = lambda rows: None
        self.poison: set[int] = set()
        self.cancelled = threading.Event()
        self._next_slot = 0

    def state_bytes(self) -> int:
        """What all slots hold at their present length, with the snapshots of each."""
        return sum(
            self.plan.kv_bytes(-(-slot.length // 64) * 64)
            + 2 * self.plan.recurrent_bytes
            + sum(saved.nbytes for saved in slot.valid())
            for slot in self.slots.values()
        )

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
        for slot in set(rows.slots):
            state = self.slots[slot]
            state.running = state.state
            del state.tokens[state.length :]
        for row, (slot, position, token) in enumerate(
            zip(rows.slots, rows.positions, rows.tokens, strict=True)
        ):
            state = self.slots[slot]
            assert position == len(state.tokens) < state.ctx
            state.tokens.append(token)
            state.running = (*state.running, token)
            if row in rows.wanted:
                result = logits[rows.wanted.index(row)]
                assert self.plan.rewindable or state.tokens == [*state.running]
                result[next_token(state.tokens)] = np.nan if token in self.poison else 1.0
        self.during(rows)
        if self.cancelled.is_set():
            for slot in set(rows.slots):
                state = self.slots[slot]
                state.running = state.state
                state.tokens[state.length :] = [VOCAB] * (len(state.tokens) - state.length)
            raise StepCancelled
        self.steps.append(rows)
        self.settings_of_steps.append((dtype, threads))
        return Logits(logits, argmax(logits))

    def cancel(self) -> None:
        self.cancelled.set()

    def commit(self, slot: int, length: int) -> None:
        state = self.slots[slot]
        assert state.length < length <= len(state.tokens)
        assert VOCAB not in state.tokens[:length], "a cancelled step is committed"
        if not self.plan.rewindable:
            assert length == len(state.running), "recurrent state was written up to another length"
            state.state = state.running
        state.length = length

    def rewind(self, slot: int, length: int) -> None:
        assert self.plan.rewindable or length in (0, self.slots[slot].length)
        self._go_back(slot, length)
        if length == 0:
            self.slots[slot].state = ()

    def snapshot(self, slot: int) -> Snapshot:
        state = self.slots[slot]
        saved = Snapshot(state.length)
        if not self.plan.rewindable:
            copy = np.full(256, -1, np.float32)
            copy[: len(state.state)] = state.state
            saved = Snapshot(state.length, copy)
        state.snapshots.append(weakref.ref(saved))
        self.calls["snapshot"] += 1
        return saved

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        state = self.slots[slot]
        assert any(snapshot is saved for saved in state.valid()), "of another slot, or no longer true"
        self._go_back(slot, snapshot.length)
        if snapshot.recurrent is not None:
            state.state = tuple(int(token) for token in snapshot.recurrent[: snapshot.length])
        self.calls["restore"] += 1

    def _go_back(self, slot: int, length: int) -> None:
        state = self.slots[slot]
        assert 0 <= length <= state.length
        state.length = length
        del state.tokens[length:]
        state.snapshots = [weakref.ref(saved) for saved in state.valid() if saved.length <= length]

    def close(self) -> None:
        self.slots.clear()
