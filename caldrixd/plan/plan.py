"""The plan: ops with named buffers.

Every op reads buffers and writes one new buffer (single assignment), so a lane may fuse, reorder
memory or keep buffers in place as it likes. A buffer is a matrix of float32 rows: one row for each
row of the step, or, after `gather`, one for each row whose logits are wanted.

Ops (inputs -> output; weights; params):

    embed      () -> x;           (table,)        row i is the table's row of the step's token i,
                                                  or the step's embedding row i where one is given
    rmsnorm    (x,) -> y;         (gain,)         eps, groups, offset; each of `groups` equal parts of a
                                                  row is normed alone, times gain + offset
    linear     (x,) -> y;         (weight[, bias]) y = x @ weight.T + bias
    slice      (x,) -> y;         ()              groups, first, count; `count` columns from `first`
                                                  of each of `groups` equal parts of a row
    rope       (x,) -> y;         ()              heads, head_dim; uses plan.rope
    attention  (q, k, v) -> y;    ()              heads, kv_heads, head_dim, scale, layer, window
                                                  writes k, v into the layer's state at the row's
                                                  position, then attends over positions 0..own, of
                                                  which a window over 0 leaves the last `window`
    silu_mul   (gate, up) -> y;   ()              silu(gate) * up
    sigmoid_mul (x, gate) -> y;   ()              x * sigmoid(gate)
    add        (a, b) -> y;       ()
    gather     (x,) -> y;         ()              only the rows whose logits are wanted
    experts    (x, scores) -> y;  (gate 0, up 0, down 0, gate 1, ...)
                                                  experts, top_k, normalise; chosen are the top_k
                                                  highest scores (of equals the lower id); a weight is
                                                  the softmax over all scores, divided by the sum of
                                                  the chosen where `normalise`; y = sum, lowest id
                                                  first, of weight * down(silu_mul(gate x, up x))
    causal_conv (x,) -> y;        (weight,)       taps, state; per channel, weight (channels, 1, taps):
                                                  y[t] = silu(sum_j weight[j] * x[t - taps + 1 + j])
    delta_rule (qkv, a, b) -> y;  (a_log, dt_bias) key_heads, value_heads, key_dim, value_dim, state
                                                  qkv: all query heads, then keys, then values
    gated_rmsnorm (x, z) -> y;    (gain,)         eps, groups; rmsnorm of each group times gain,
                                                  then times silu(z)

`causal_conv` and `delta_rule` have recurrent state: it can be extended but not rewound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
class RecurrentState:
    """What one recurrent op carries from row to row: float32 of this shape, zero before the first row.

    causal_conv: (taps - 1, channels), the last inputs, oldest first. delta_rule: (value_heads, key_dim,
    value_dim).
    """

    shape: tuple[int, ...]


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
    recurrent: tuple[RecurrentState, ...] = ()

    @property
    def rewindable(self) -> bool:
        """Whether a sequence can be cut back to any length; recurrent state only to one it was saved at."""
        return not self.recurrent

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of recurrent state for one sequence of any length, once."""
        return sum(4 * math.prod(state.shape) for state in self.recurrent)

    def kv_bytes(self, ctx: int) -> int:
        """Bytes of state for one sequence of `ctx` tokens, keys and values in float32."""
        return sum(2 * 4 * state.kv_heads * state.head_dim * ctx for state in self.states)


@dataclass(frozen=True)
class Tensor:
    """A tensor as stored: `dtype` is "BF16", "F16" or "F32", `data` its bytes (uint8, read-only view).

    `release` gives back the memory behind `data` where that can be read again, from a mapped file: for who
    has made a copy.
    """

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    release: Callable[[], None] = lambda: None
