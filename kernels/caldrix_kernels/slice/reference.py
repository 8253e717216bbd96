"""Column selection in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def slice_columns(
    x: npt.NDArray[np.float32], *, groups: int, first: int, count: int
) -> npt.NDArray[np.float32]:
    """float32[rows, groups * count]: columns first..first+count-1 of each of `groups` equal parts of a row.

    `x` is float32[rows, groups * part] with part >= first + count.
    """
    parts = x.reshape(len(x), groups, x.shape[1] // groups)
    return parts[:, :, first : first + count].reshape(len(x), groups * count)
