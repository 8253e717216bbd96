"""The index of the highest in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def argmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """int64[rows] of float32[rows, width]: the lowest index of the highest, -1 where any is not finite."""
    return np.where(np.isfinite(x).all(axis=1), np.argmax(x, axis=1), -1)
