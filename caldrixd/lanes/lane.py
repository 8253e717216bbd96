"""What every lane offers: the one step call and the state of sequences.

A `Program` is a plan with its weights on one lane. A slot is one sequence's state in it. A step
runs rows of any slots together; a row's result depends on its own slot's rows alone, whatever
else the step holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from caldrixd.plan.plan import Plan, Tensor

if TYPE_CHECKING:
    # The daemon looks at lanes too and starts sooner without it.
    import numpy as np
    import numpy.typing as npt

# Called with the code and the fields of a status row while a program loads.
Report = Callable[[str, dict[str, Any]], None]


class StepCancelled(Exception):
    """The cancel word stopped a step: nothing of it is committed, and it may be run again."""


@dataclass(frozen=True)
class Rows:
    """The rows of one step, in order. Rows of one slot stand in rising position order.

    `embeddings` replaces the token's embedding for the rows it names: row index -> float32[hidden].
    `wanted` lists the row indices whose logits are returned.
    """

    slots: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int]
    wanted: Sequence[int]
    embeddings: Mapping[int, npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class Logits:
    """What a step gives of its wanted rows, valid until the next step.

    `values`: float32[wanted, vocab_size]. `likeliest`: int64[wanted], the lowest of the tokens whose value is
    the highest; -1 where any value of the row is not finite.
    """

    values: npt.NDArray[np.float32]
    likeliest: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Snapshot:
    """A sequence's state at one length: for KV the length alone, recurrent state with a copy of it."""

    length: int
    recurrent: npt.NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.recurrent is None else self.recurrent.nbytes


class Program(Protocol):
    """A loaded plan. Calls come from one thread, but for `cancel`."""

    @property
    def plan(self) -> Plan: ...

    @property
    def max_rows(self) -> int:
        """Most rows of one step."""

    @property
    def block(self) -> int:
        """Positions whose keys and values take memory together."""

    @property
    def settings(self) -> str:
        """Stored formats and kernels, for the status line."""

    @property
    def size(self) -> int:
        """Bytes of weights held."""

    def allocate(self, ctx: int) -> int:
        """A new empty slot for up to `ctx` tokens. Refused "run/memory" when memory lacks."""

    def release(self, slot: int) -> None: ...

    def length(self, slot: int) -> int:
        """Committed tokens of a slot."""

    def step(self, rows: Rows, *, threads: int, dtype: str = "f32") -> Logits:
        """Run the plan; the logits of the wanted rows.

        State at the rows' positions is written but not committed. `threads` 0 means the lane's
        default. StepCancelled when `cancel` came first.
        """

    def cancel(self) -> None:
        """Stop the running step, from any thread. One that comes too late may stop the next instead:
        never lost, and harmless, since a cancelled step is run again."""

    def commit(self, slot: int, length: int) -> None:
        """Make positions below `length` part of the sequence.

        ValueError where recurrent state was written up to another length.
        """

    def rewind(self, slot: int, length: int) -> None:
        """Drop what stands at `length` and after. Recurrent state can only go back to 0: else ValueError."""

    def snapshot(self, slot: int) -> Snapshot:
        """The committed state of a slot, for `restore`."""

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this slot, taken since it was last at a smaller length."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Variant:
    """Which compiled code of the CPU lane.

    `isa` is "native" or an x86-64 level below that of this host; `kernels` is "auto", "numba" or "c".
    """

    isa: str = "native"
    kernels: str = "auto"


class Loader(Protocol):
    """What a lane's module offers as `load`: a plan and its tensors become a program.

    `environment` is that of the process, as the daemon made it.
    """

    def __call__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        *,
        report: Report,
        variant: Variant,
        environment: Mapping[str, str],
    ) -> Program: ...
