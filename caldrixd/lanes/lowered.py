"""A plan as the CPU interpreter runs it: the program, and what must stand behind its address table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from caldrix_kernels.step.layout import PANEL, round_up

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
LIKELIEST = "likeliest"
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
    """Rows of a packed matrix: `count` of each of `tensors`, from `first` on.

    They stand in turns of `turn` rows, one of each tensor after the other; zero rows fill the last turns.
    """

    tensors: tuple[str, ...]
    first: int
    count: int
    turn: int = PANEL

    @property
    def turns(self) -> int:
        return -(-self.count // self.turn)

    @property
    def rows(self) -> int:
        return self.turns * len(self.tensors) * self.turn


@dataclass(frozen=True)
class Packed:
    """A matrix in panels: segments, then zero rows up to a whole panel.

    `columns` are stored in the checkpoint; each tensor may have a bias.
    """

    segments: tuple[Segment, ...]
    columns: int
    biases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return round_up(sum(segment.rows for segment in self.segments), PANEL)

    @cached_property
    def tensors(self) -> list[str]:
        """What it is packed of, each once."""
        return list(dict.fromkeys(tensor for segment in self.segments for tensor in segment.tensors))


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
