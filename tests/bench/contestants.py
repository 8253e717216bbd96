"""The engines that are compared, behind one interface. All hold the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from caldrixd.lanes.cpu import CpuProgram
from caldrixd.lanes.lane import Rows

CONTEXT = 2048
CHUNK = 512
# Correlation of logits below which two engines do not hold the same model. For the demo model, rounding
# all activations to bfloat16 leaves 0.9994; a rope base that is ten times too small leaves 0.998.
ALIKE = 0.9985

Logits = npt.NDArray[np.float32]


class Contestant(Protocol):
    """An engine with one sequence."""

    def use(self, threads: int) -> None:
        """Compute with so many threads from now on."""

    def feed(self, tokens: Sequence[int], start: int) -> None:
        """Evaluate tokens at positions from `start` on; what stood there and after is forgotten."""

    def logits(self) -> Logits:
        """Of the last token fed: float32[vocab_size]."""


class Ours:
    """The CPU lane in one arithmetic: chunks of 512 rows, logits of the last row alone."""

    def __init__(self, program: CpuProgram, dtype: str) -> None:
        self.program = program
        self.slot = program.allocate(CONTEXT)
        self.threads = 0
        self._dtype = dtype
        self._logits = np.zeros(program.plan.vocab_size, np.float32)

    def use(self, threads: int) -> None:
        self.threads = threads

    def feed(self, tokens: Sequence[int], start: int) -> None:
        if start < self.program.length(self.slot):
            self.program.rewind(self.slot, start)
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            positions = range(start + first, start + first + len(part))
            rows = Rows([self.slot] * len(part), positions, part, [len(part) - 1])
            self._logits = self.program.step(rows, threads=self.threads, dtype=self._dtype).values[0]
            self.program.commit(self.slot, positions.stop)

    def logits(self) -> Logits:
        return self._logits


def unlike(ours: Contestant, peer: Contestant, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The prompts after which the logits of the two are not those of one model."""
    found = []
    for number, prompt in enumerate(prompts):
        for contestant in (ours, peer):
            contestant.feed(prompt, 0)
        correlation = float(np.corrcoef(ours.logits(), peer.logits())[0, 1])
        if not correlation >= ALIKE:
            found.append(f"prompt {number}: correlation {correlation:.3f}")
    return found
