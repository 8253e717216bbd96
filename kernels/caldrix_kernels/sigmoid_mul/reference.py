"""Sigmoid gate in numpy. Qiu et al., "Gated Attention for Large Language Models" (2025)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from caldrix_kernels.silu_mul.reference import sigmoid


def sigmoid_mul(x: npt.NDArray[np.float32], gate: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x / (1 + exp(-gate)), all float32[rows, width]. The sigmoid is rounded to float32 first."""
    return x * sigmoid(gate).astype(np.float32)
