"""What a model costs in memory, in bytes, as a lane that will run its plan says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Bytes: the weights as they are held, the state of one sequence, and the buffers of its steps.

    `passing` is what is needed beside the weights before there is any state: files while they are read.
    """

    weights: int
    passing: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.together(1)

    def together(self, sequences: int) -> int:
        """The same with so many sequences, which share the buffers of a step."""
        return self.weights + max(self.passing, sequences * self.state + self.activations)
