"""Token embedding in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


def embed(
    table: npt.NDArray[np.float32],
    tokens: Sequence[int],
    embeddings: Mapping[int, npt.NDArray[np.float32]] | None = None,
) -> npt.NDArray[np.float32]:
    """float32[rows, width]: row i is table[tokens[i]], or embeddings[i] where that is given.

    `table` is float32[vocabulary, width].
    """
    x = table[np.asarray(tokens, np.int64)]
    for row, embedding in (embeddings or {}).items():
        x[row] = embedding
    return x
