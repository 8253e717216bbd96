"""Causal attention in numpy. Vaswani et al., "Attention Is All You Need" (2017); shared key heads:
Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models" (2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def attention(
    q: Float32,
    keys: Float32,
    values: Float32,
    own: Sequence[int],
    *,
    scale: float,
    window: int = 0,
    rounded: Callable[[Float32], Float32] = lambda x: x,
) -> Float32:
    """softmax(scale * q @ keys.T) @ values for rows of one sequence; float32[rows, heads * head_dim].

    `keys` and `values` are float32[positions, kv_heads, head_dim] and already hold the rows' own.
    Row i stands at position own[i] and sees the positions 0..own[i], of which a `window` over 0
    leaves the last `window`. Query head h uses key head h // (heads / kv_heads). `rounded` is applied to
    the inputs of the matrix products.
    """
    y = np.empty_like(q)
    for row, position in enumerate(own):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        scaled = q[row] * np.float32(scale)
        y[row] = _attend(rounded(scaled), rounded(keys[seen]), rounded(values[seen]), rounded)
    return y


def _attend(q: Float32, keys: Float32, values: Float32, rounded: Callable[[Float32], Float32]) -> Float32:
    _, kv_heads, head_dim = keys.shape
    grouped = q.reshape(kv_heads, -1, head_dim)
    scores = np.einsum("hgd,phd->hgp", grouped, keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True)
    y: Float32 = (np.einsum("hgp,phd->hgd", rounded(weights), values) / sums).reshape(q.shape)
    return y
