"""Stored number formats: widening to float32 (exact) and rounding to bf16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def widen(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The little-endian bytes `data` of a "BF16", "F16" or "F32" tensor as float32[shape], exactly.

    For "F32" the result is a view of `data`. ValueError for another dtype or a size that does not fit.
    """
    if dtype == "BF16":
        return widen_bf16(data.view("<u2")).reshape(shape)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32).reshape(shape)
    if dtype == "F32":
        return data.view("<f4").reshape(shape)
    raise ValueError(f"no stored format {dtype}")


def widen_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bf16 bits as float32: they are a float32's upper half."""
    words = bits.astype(np.uint32)
    words <<= 16
    return words.view(np.float32)


def narrow_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16, ties to even; what is over the largest bf16 becomes infinite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)
