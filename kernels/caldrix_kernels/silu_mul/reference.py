"""Gated SiLU in numpy. Shazeer, "GLU Variants Improve Transformer" (2020)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def sigmoid(x: Float32) -> npt.NDArray[np.float64]:
    """1 / (1 + exp(-x)) in float64, without overflow at either end."""
    wide = x.astype(np.float64)
    # exp(-|x|) never overflows; for x < 0, 1 / (1 + exp(-x)) is exp(x) / (1 + exp(x)).
    decay = np.exp(-np.abs(wide))
    y: npt.NDArray[np.float64] = np.where(wide >= 0, 1.0, decay) / (1.0 + decay)
    return y


def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)) in float32; the product is taken in float64."""
    return (x.astype(np.float64) * sigmoid(x)).astype(np.float32)


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """silu(gate) * up, all float32[rows, width]."""
    return silu(gate) * up
