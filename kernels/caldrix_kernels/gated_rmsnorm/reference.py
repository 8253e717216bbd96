"""Gated root mean square norm in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from caldrix_kernels.rmsnorm.reference import rmsnorm
from caldrix_kernels.silu_mul.reference import silu_mul

Float32 = npt.NDArray[np.float32]


def gated_rmsnorm(x: Float32, z: Float32, gain: Float32, eps: float, *, groups: int) -> Float32:
    """rmsnorm of each of `groups` equal parts of a row, times silu(z).

    `x` and `z` are float32[rows, groups * part], gain float32[part]: the same for each part.
    """
    return silu_mul(z, rmsnorm(x, gain, eps, groups=groups))
