"""Root mean square norm in numpy. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rmsnorm(x: npt.NDArray[np.float32], gain: npt.NDArray[np.float32], eps: float) -> npt.NDArray[np.float32]:
    """x / sqrt(mean(x**2) + eps) * gain over the last axis. float32[rows, width], gain float32[width].

    The mean is taken in float64; the two products are rounded to float32 one by one.
    """
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    inverse = (1.0 / np.sqrt(mean + eps)).astype(np.float32)
    y: npt.NDArray[np.float32] = x * inverse * gain
    return y
