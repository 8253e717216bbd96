"""From logits to the next token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from caldrix_protocol.refusals import Refused


def greedy(logits: npt.NDArray[np.float32]) -> int:
    """The id of the largest of float32[vocab_size], the lowest among equals.

    Refused "run/not-finite" when any value is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise Refused("run/not-finite")
    return int(np.argmax(logits))
