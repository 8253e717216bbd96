"""The slots of finished sequences, kept for prompts that begin the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Program, Snapshot

# A lane holds recurrent state twice: as it is committed, and what a step makes of it.
STATES = 2
# The newest of a sequence: the last prompt's, and those of turns that a user may go back to.
SNAPSHOTS = 4


@dataclass(eq=False)
class Slot:
    """One of the program's slots, in use or kept, with what its state depends on.

    While it is kept, it holds `tokens`, the first `asked` of them the last prompt. `snapshots` are
    states that it can go back to, shortest first. `touched` is the most tokens it ever held.
    """

    number: int
    ctx: int
    dtype: str
    tokens: tuple[int, ...] = ()
    asked: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    touched: int = 0


class SlotCache:
    """Gives slots out and takes them back; the idle ones hold at most `limit` bytes of state.

    Where it would be more, the least recently used are dropped.
    """

    def __init__(self, program: Program, limit: int) -> None:
        self._program = program
        self._limit = limit
        self._idle: list[Slot] = []

    def take(self, prompt: Sequence[int], ctx: int, dtype: str) -> tuple[Slot, int]:
        """(slot, tokens of `prompt` it holds): at least the prompt's last token is left to compute.

        Refused "run/memory" and others when the lane has no slot left with none idle any more.
        """
        best, held = None, 0
        for slot in self._idle:
            if (slot.ctx, slot.dtype) == (ctx, dtype):
                common = common_prefix(slot.tokens, prompt)
                usable = self._usable(slot, min(common, len(prompt) - 1))
                if usable > held and self._may_take(slot, usable, common, len(prompt)):
                    best, held = slot, usable
        if best is None:
            return Slot(self._allocate(ctx), ctx, dtype), 0
        self._idle.remove(best)
        self._cut(best, held)
        return best, held

    def keep(self, slot: Slot, tokens: Sequence[int], asked: int) -> None:
        """Take back a slot that holds `tokens`, all of them committed; `asked` of them were the prompt."""
        if not tokens:
            self._program.release(slot.number)
            return
        slot.tokens, slot.asked = tuple(tokens), asked
        slot.touched = max(slot.touched, len(tokens))
        self._idle.append(slot)
        while self._bytes(self._idle) > self._limit:
            self._drop_oldest()

    def snapshot(self, slot: Slot) -> None:
        """Remember a slot's state as it is now, all of it committed."""
        slot.snapshots.append(self._program.snapshot(slot.number))
        del slot.snapshots[:-SNAPSHOTS]

    def _usable(self, slot: Slot, common: int) -> int:
        """The most tokens, up to `common`, that a slot can be cut to."""
        if self._program.plan.rewindable or common == len(slot.tokens):
            return common
        return max((saved.length for saved in slot.snapshots if saved.length <= common), default=0)

    def _may_take(self, slot: Slot, usable: int, common: int, wanted: int) -> bool:
        """Whether a prompt of `wanted` tokens may cut a slot to `usable` of them.

        Two conversations with the same opening would else take each other's slots. So a slot is cut
        where that keeps at least half of it, where the very same prompt is asked again, or where it
        would be dropped anyway for want of room.
        """
        if 2 * usable >= len(slot.tokens) or common == wanted == slot.asked:
            return True
        newer = self._idle[self._idle.index(slot) :]
        return self._bytes(newer) + self._state_bytes(wanted) > self._limit

    def _cut(self, slot: Slot, length: int) -> None:
        if length == len(slot.tokens):
            return
        slot.snapshots = [saved for saved in slot.snapshots if saved.length <= length]
        if self._program.plan.rewindable:
            self._program.rewind(slot.number, length)
        else:
            self._program.restore(slot.number, slot.snapshots[-1])

    def _allocate(self, ctx: int) -> int:
        while True:
            try:
                return self._program.allocate(ctx)
            except Refused:
                if not self._idle:
                    raise
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._program.release(self._idle.pop(0).number)

    def _bytes(self, slots: Sequence[Slot]) -> int:
        return sum(
            self._state_bytes(slot.touched) + sum(saved.nbytes for saved in slot.snapshots) for slot in slots
        )

    def _state_bytes(self, tokens: int) -> int:
        plan, block = self._program.plan, self._program.block
        return plan.kv_bytes(-(-tokens // block) * block) + STATES * plan.recurrent_bytes


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
