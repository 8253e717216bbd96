"""The state of sequences on the CPU lane: keys and values by position, and recurrent state twice.

A step reads the committed copy of the recurrent state and writes the other; `commit` swaps them, so a step
that is cancelled or not committed leaves the sequence as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caldrix_kernels.step import layout as at
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.lane import Snapshot

MAX_SLOTS = 256


@dataclass
class Slot:
    """Copy `current` of the recurrent state holds `length` tokens, the other one `written`."""

    ctx: int
    state: Arena
    recurrent: Arena
    current: int = 0
    length: int = 0
    written: int = 0


class Slots:
    """Slots of one program. The three tables of addresses by slot are what compiled code reads."""

    def __init__(self, state_block: int, recurrent_bytes: int) -> None:
        self._state_block = state_block
        self._recurrent_bytes = recurrent_bytes
        self._slots: dict[int, Slot] = {}
        self.states, self.recurrent, self.recurrent_next = np.zeros((3, MAX_SLOTS), np.int64)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def allocate(self, ctx: int) -> int:
        """A new empty slot. Refused "run/slots" or "run/state-memory"."""
        number = next((number for number in range(MAX_SLOTS) if number not in self._slots), None)
        if number is None:
            raise Refused("run/slots", count=MAX_SLOTS)
        size = self._state_block * at.round_up(ctx, at.BLOCK) // at.BLOCK
        try:
            slot = Slot(ctx, Arena(size, huge=True), Arena(2 * self._recurrent_bytes, huge=True))
        except (OSError, MemoryError, OverflowError):
            needed = size + 2 * self._recurrent_bytes
            raise Refused("run/state-memory", needed=-(-needed // 10**6), ctx=ctx) from None
        self._slots[number] = slot
        self.states[number] = slot.state.address
        self._point(number)
        return number

    def release(self, number: int) -> None:
        del self._slots[number]

    def clear(self) -> None:
        self._slots.clear()

    def check(self, number: int, first: int, last: int) -> None:
        """ValueError unless rows at positions first..last may be run now."""
        slot = self._slots[number]
        if not 0 <= first <= last < slot.ctx:
            raise ValueError(f"positions {first} to {last} are outside the context of slot {number}")
        if self._recurrent_bytes and first != slot.length:
            raise ValueError(f"position {first} does not follow the {slot.length} tokens of slot {number}")

    def wrote(self, number: int, length: int) -> None:
        """A step has left the slot's state at this length, not committed."""
        self._slots[number].written = length

    def commit(self, number: int, length: int) -> None:
        slot = self._slots[number]
        if not 0 <= length <= slot.ctx:
            raise ValueError(f"length {length} is outside the context")
        if self._recurrent_bytes and length != slot.length:
            if length != slot.written:
                raise ValueError(f"{slot.written} tokens were written, not {length}")
            slot.current ^= 1
        slot.length = length
        self._point(number)

    def rewind(self, number: int, length: int) -> None:
        slot = self._slots[number]
        if not 0 <= length <= slot.length:
            raise ValueError(f"cannot rewind from {slot.length} to {length}")
        if self._recurrent_bytes and length not in (0, slot.length):
            raise ValueError(f"recurrent state of {slot.length} tokens cannot go back to {length}")
        slot.length = slot.written = length
        self._point(number)

    def snapshot(self, number: int) -> Snapshot:
        slot = self._slots[number]
        if not self._recurrent_bytes:
            return Snapshot(slot.length)
        return Snapshot(slot.length, self._copy(slot, slot.current).copy())

    def restore(self, number: int, snapshot: Snapshot) -> None:
        slot = self._slots[number]
        if snapshot.recurrent is not None:
            self._copy(slot, slot.current)[:] = snapshot.recurrent
        elif self._recurrent_bytes or snapshot.length > slot.length:
            raise ValueError(f"a snapshot of {snapshot.length} tokens is not one of slot {number}")
        slot.length = slot.written = snapshot.length
        self._point(number)

    def _copy(self, slot: Slot, which: int) -> npt.NDArray[np.float32]:
        start = which * self._recurrent_bytes
        return slot.recurrent.bytes[start : start + self._recurrent_bytes].view(np.float32)

    def _point(self, number: int) -> None:
        """Tell compiled code which copy is which; address 0 stands for the zeros before the first token."""
        slot = self._slots[number]
        address = slot.recurrent.address
        committed = address + slot.current * self._recurrent_bytes
        self.recurrent[number] = committed if slot.length else 0
        self.recurrent_next[number] = address + (1 - slot.current) * self._recurrent_bytes
