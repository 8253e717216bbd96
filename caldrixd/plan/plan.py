"""The plan: ops with named buffers.

Every op reads buffers and writes one new buffer (single assignment), so a lane may fuse, reorder
memory or keep buffers in place as it likes. A buffer is a matrix of float32 rows: one row for each
row of the step, or, after `gather`, one for each row whose logits are wanted.

Ops (inputs -> output; weights; params):

    embed      () -> x;           (table,)        row i is the table's row of the step's token i,
                                                  or the step's embedding row i where one is given
    rmsnorm    (x,) -> y;         (gain,)         eps
    linear     (x,) -> y;         (weight[, bias]) y = x @ weight.T + bias
    rope       (x,) -> y;         ()              heads, head_dim; uses plan.rope
    attention  (q, k, v) -> y;    ()              heads, kv_heads, head_dim, scale, layer, window
                                                  writes k, v into the layer's state at the row's
                                                  position, then attends over positions 0..own
    silu_mul   (gate, up) -> y;   ()
    add        (a, b) -> y;       ()
    gather     (x,) -> y;         ()              only the rows whose logits are wanted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from caldrixd.spec import Rope

if TYPE_CHECKING:
    # The daemon reads plans too and starts sooner without it.
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Weight:
    """A tensor the plan needs, under its name in the checkpoint. `shape` is (rows, columns) or (n,)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One step of a plan."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    params: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KvState:
    """Keys and values of one attention layer: per position `kv_heads` x `head_dim` floats, twice."""

    layer: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Plan:
    """A model as ops. `widths` maps buffer name to row width; the last op's output is the logits."""

    ops: tuple[Op, ...]
    widths: Mapping[str, int]
    weights: tuple[Weight, ...]
    states: tuple[KvState, ...]
    rope: Rope
    vocab_size: int
    hidden_size: int
    max_context: int

    def kv_bytes(self, ctx: int) -> int:
        """Bytes of state for one sequence of `ctx` tokens, keys and values in float32."""
        return sum(2 * 4 * state.kv_heads * state.head_dim * ctx for state in self.states)


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: `dtype` is "BF16", "F16" or "F32", `data` its bytes (uint8, read-only view)."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
