"""Matrix product in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def linear(
    x: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """x @ weight.T + bias. float32[rows, inputs], [outputs, inputs] and [outputs] -> [rows, outputs].

    Row by row: the library's sums then have one order, however many rows there are.
    """
    y = np.empty((len(x), len(weight)), np.float32)
    for row, result in zip(x, y, strict=True):
        np.matmul(weight, row, out=result)
    if bias is not None:
        y += bias
    return y
