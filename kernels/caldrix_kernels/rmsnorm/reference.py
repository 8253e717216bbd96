"""Root mean square norm in numpy. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def rmsnorm(x: Float32, gain: Float32, eps: float, *, groups: int = 1, offset: float = 0.0) -> Float32:
    """x / sqrt(mean(x**2) + eps) * (gain + offset), for each of `groups` equal parts of a row by itself.

    float32[rows, groups * part], gain float32[part]: the same for each part. The mean is taken in float64;
    the sum and the two products are rounded to float32 one by one.
    """
    parts = x.reshape(len(x), groups, x.shape[1] // groups)
    mean = np.mean(np.square(parts, dtype=np.float64), axis=-1, keepdims=True)
    inverse = (1.0 / np.sqrt(mean + eps)).astype(np.float32)
    y: Float32 = parts * inverse * (gain + np.float32(offset))
    return y.reshape(x.shape)
