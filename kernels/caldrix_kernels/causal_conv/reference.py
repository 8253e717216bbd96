"""Causal convolution in numpy, as the gated delta net has it before its recurrence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from caldrix_kernels.silu_mul.reference import silu

Float32 = npt.NDArray[np.float32]


def causal_conv(x: Float32, state: Float32, weight: Float32) -> tuple[Float32, Float32]:
    """silu(sum_j weight[:, 0, j] * row[t - taps + 1 + j]) for the rows t of `x`, and the next state.

    `x` is float32[rows, channels], rows of one sequence in order; `state` float32[taps - 1, channels] the
    rows before them, oldest first, zero before the first; `weight` float32[channels, 1, taps].
    """
    taps = weight.shape[2]
    seen = np.concatenate([state, x])
    total = np.zeros_like(x)
    for tap in range(taps):
        total += weight[:, 0, tap] * seen[tap : tap + len(x)]
    return silu(total), seen[len(seen) - (taps - 1) :].copy()
