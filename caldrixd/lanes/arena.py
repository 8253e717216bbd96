"""Anonymous memory for weights, buffers and state, addressed by int64."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20


class Arena:
    """One anonymous mapping of zeros. Pages cost memory when first written.

    `huge` pages are for what every token reads whole: weights and state.
    """

    def __init__(self, size: int, *, huge: bool = False) -> None:
        self.size = size
        # Private: Python's default is shared memory, which gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(size, 1) + (HUGE_PAGE if huge else 0), flags=flags)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        bytes_ = np.frombuffer(self._map, np.uint8)
        start = -bytes_.ctypes.data % HUGE_PAGE if huge else 0
        self.bytes: npt.NDArray[np.uint8] = bytes_[start : start + size]
        self.address = int(bytes_.ctypes.data) + start

    def clear(self) -> None:
        self.bytes[:] = 0
