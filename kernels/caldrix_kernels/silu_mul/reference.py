"""Gated SiLU in numpy. Shazeer, "GLU Variants Improve Transformer" (2020)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def silu_mul(gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """gate / (1 + exp(-gate)) * up, all float32[rows, width]. The first factor is taken in float64."""
    wide = gate.astype(np.float64)
    # exp(-|g|) never overflows; for g < 0, 1 / (1 + exp(-g)) is exp(g) / (1 + exp(g)).
    decay = np.exp(-np.abs(wide))
    sigmoid = np.where(wide >= 0, 1.0, decay) / (1.0 + decay)
    y: npt.NDArray[np.float32] = (wide * sigmoid).astype(np.float32) * up
    return y
