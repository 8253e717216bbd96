"""Gated delta rule in numpy, row by row. Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving
Mamba2 with Delta Rule" (2024)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from caldrix_kernels.silu_mul.reference import sigmoid

Float32 = npt.NDArray[np.float32]
NORM_EPS = 1e-6


def delta_rule(
    qkv: Float32,
    a: Float32,
    b: Float32,
    state: Float32,
    a_log: Float32,
    dt_bias: Float32,
    *,
    key_heads: int,
    key_dim: int,
) -> tuple[Float32, Float32]:
    """Rows of one sequence in order: float32[rows, value_heads * value_dim], and the next state.

    `qkv` holds all query heads, then keys (key_heads * key_dim each), then values; `a` and `b` are
    float32[rows, value_heads], `a_log` and `dt_bias` float32[value_heads]; `state` is S,
    float32[value_heads, key_dim, value_dim]. Value head h uses key head h // (value_heads / key_heads).
    For each row and value head, with q and k divided by their length:

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + outer(k, sigmoid(b) * (v - S.T @ k))
        y = S.T @ q / sqrt(key_dim)
    """
    value_heads, _, value_dim = state.shape
    keys = key_heads * key_dim
    shared = value_heads // key_heads
    rate = np.exp(a_log.astype(np.float64))
    decay = np.exp(-rate * np.logaddexp(0.0, a.astype(np.float64) + dt_bias)).astype(np.float32)
    beta = sigmoid(b).astype(np.float32)
    q = _unit(qkv[:, :keys].reshape(-1, key_heads, key_dim)) * np.float32(key_dim**-0.5)
    k = _unit(qkv[:, keys : 2 * keys].reshape(-1, key_heads, key_dim))
    v = qkv[:, 2 * keys :].reshape(-1, value_heads, value_dim)
    y = np.empty_like(v)
    for row in range(len(qkv)):
        query, key = (np.repeat(x[row], shared, axis=0)[:, :, None] for x in (q, k))
        state = decay[row][:, None, None] * state
        correction = beta[row][:, None] * (v[row] - (state * key).sum(axis=1))
        state = state + key * correction[:, None, :]
        y[row] = (state * query).sum(axis=1)
    return y.reshape(len(qkv), -1), state


def _unit(x: Float32) -> Float32:
    squares = np.square(x, dtype=np.float64).sum(axis=-1, keepdims=True)
    y: Float32 = x * (1.0 / np.sqrt(squares + NORM_EPS)).astype(np.float32)
    return y
