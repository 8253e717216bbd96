"""A plan as the CPU interpreter runs it: the program, and what must stand behind its address table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

# Names in the address table that are not weights. NORMED stands at index 0, see step.layout.
NORMED, RESIDUAL, QUERIES, ATTENDED, HIDDEN, LOGITS, ROPE = (
    "normed",
    "residual",
    "queries",
    "attended",
    "hidden",
    "logits",
    "rope",
)
WANTED_RESIDUAL, WANTED_ATTENDED = "wanted residual", "wanted attended"
GATES = "gates"
SCORES, ROUTES, DISPATCHED, EXPERT_HIDDEN, EXPERT_OUTPUT = (
    "scores",
    "routes",
    "dispatched",
    "expert hidden",
    "expert output",
)
PROJECTED, CONVOLVED, MIXED = "projected", "convolved", "mixed"


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` rows of a packed matrix: rows of `tensor` from `first` on, or zero rows (tensor None)."""

    tensor: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Packed:
    """A matrix in panels. `columns` are stored in the checkpoint; each tensor may have a bias."""

    segments: tuple[Segment, ...]
    columns: int
    biases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return sum(segment.count for segment in self.segments)

    @cached_property
    def tensors(self) -> list[str]:
        """What it is packed of, each once."""
        return list(dict.fromkeys(segment.tensor for segment in self.segments if segment.tensor))


@dataclass(frozen=True)
class Small:
    """A small tensor held in float32: `offset` is added; (channels, 1, taps) becomes (taps, channels)."""

    tensor: str
    offset: float = 0.0


@dataclass(frozen=True)
class Attention:
    """The shape that all attention layers share. `group` query heads read one key/value head."""

    head_dim: int = 0
    group: int = 1
    kv_heads: int = 1


@dataclass(frozen=True)
class Routing:
    """The most experts there are, and the most that a row goes to; 0 without any."""

    experts: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class Lowered:
    """A program, a row of words for each op, and what it reads.

    `names` gives each address index its name. `packed`, `small` and `tables` say what the names of
    weights hold. Of each buffer `strides` has the bytes of a row, `copies` its rows for each row of a step
    where that is not one. `state_block` is the bytes of keys and values of a block of positions in all
    layers, `recurrent_bytes` those of one copy of the recurrent state.
    """

    program: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    packed: Mapping[str, Packed]
    small: Mapping[str, Small]
    tables: tuple[str, ...]
    strides: Mapping[str, int]
    copies: Mapping[str, int]
    attention: Attention
    routing: Routing
    state_block: int
    recurrent_bytes: int
