"""The slots of finished sequences, kept for prompts that begin the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Program


@dataclass(frozen=True)
class Kept:
    """An idle slot and the tokens it holds. What its keys and values depend on is part of it."""

    slot: int
    ctx: int
    dtype: str
    tokens: tuple[int, ...]


class SlotCache:
    """Gives slots out and takes them back; keeps at most `limit` idle, dropping the least recently used."""

    def __init__(self, program: Program, limit: int) -> None:
        self._program = program
        self._limit = limit
        self._idle: list[Kept] = []

    def take(self, prompt: Sequence[int], ctx: int, dtype: str) -> tuple[int, int]:
        """(slot, tokens of `prompt` it holds): at least the prompt's last token is left to compute.

        An idle slot is reused where that keeps at least half of it, or where no further one may be
        kept anyway: two conversations with the same opening would else take each other's slots.
        Refused "run/memory" when memory lacks with no slot idle any more.
        """
        best, common = None, 0
        for kept in self._idle:
            if (kept.ctx, kept.dtype) == (ctx, dtype):
                length = common_prefix(kept.tokens, prompt[:-1])
                if length > common:
                    best, common = kept, length
        if best and (2 * common >= len(best.tokens) or len(self._idle) >= self._limit):
            self._idle.remove(best)
            self._program.rewind(best.slot, common)
            return best.slot, common
        return self._allocate(ctx), 0

    def keep(self, slot: int, ctx: int, dtype: str, tokens: Sequence[int]) -> None:
        """Take back a slot that holds `tokens`, all of them committed."""
        if not tokens:
            self._program.release(slot)
            return
        self._idle.append(Kept(slot, ctx, dtype, tuple(tokens)))
        if len(self._idle) > self._limit:
            self._evict()

    def _allocate(self, ctx: int) -> int:
        while True:
            try:
                return self._program.allocate(ctx)
            except Refused:
                if not self._idle:
                    raise
                self._evict()

    def _evict(self) -> None:
        self._program.release(self._idle.pop(0).slot)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
