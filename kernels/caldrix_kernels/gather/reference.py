"""Row selection in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def gather(x: npt.NDArray[np.float32], wanted: Sequence[int]) -> npt.NDArray[np.float32]:
    """float32[len(wanted), width]: row i is x[wanted[i]]."""
    return x[np.asarray(wanted, np.int64)]
