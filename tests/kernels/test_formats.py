"""Stored formats: exact widening, rounding to even."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caldrix_kernels.formats import narrow_bf16, widen, widen_bf16


def stored(*bits: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(struct.pack(f"<{len(bits)}H", *bits), np.uint8)


def test_bf16_is_the_upper_half_of_a_float32() -> None:
    assert widen(stored(0x3F80, 0xC000, 0x0000, 0x3EAB), "BF16", (2, 2)).tolist() == [
        [1.0, -2.0],
        [0.0, 0.333984375],
    ]


def test_f16_widens_exactly_with_subnormals() -> None:
    assert widen(stored(0x3C00, 0x0001, 0x7BFF), "F16", (3,)).tolist() == [1.0, 2.0**-24, 65504.0]


def test_f32_is_taken_as_it_is() -> None:
    data = np.frombuffer(struct.pack("<2f", 1.5, -0.1), np.uint8)
    assert widen(data, "F32", (2, 1)).tobytes() == data.tobytes()


def test_bytes_need_no_alignment() -> None:
    data = np.frombuffer(b"\0" + struct.pack("<2H", 0x3F80, 0x4000), np.uint8)[1:]
    assert widen(data, "BF16", (2,)).tolist() == [1.0, 2.0]


def test_another_format_or_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="I8"):
        widen(stored(0), "I8", (2,))
    with pytest.raises(ValueError, match="reshape"):
        widen(stored(0, 0), "BF16", (3,))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # a tie goes to the even one, below
        (0x3F818000, 0x3F82),  # and above
        (0x3F808001, 0x3F81),
        (0xBF808001, 0xBF81),
        (0x7F7FFFFF, 0x7F80),  # over the largest: infinite
        (0xFF800000, 0xFF80),
        (0x80000000, 0x8000),
        (0x7F800001, 0x7FC0),  # a NaN stays one
        (0xFFFFFFFF, 0xFFFF),
    ],
)
def test_rounding_to_bf16(bits: int, rounded: int) -> None:
    x = np.array([bits], np.uint32).view(np.float32)
    assert narrow_bf16(x).tolist() == [rounded]


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_no_bf16_is_nearer(x: float) -> None:
    bits = int(narrow_bf16(np.array([x], np.float32))[0])
    neighbours = [(bits + step) & 0xFFFF for step in (-1, 0, 1)]
    around = widen_bf16(np.array(neighbours, np.uint16)).astype(np.float64)
    distances = [abs(v - x) for v in around.tolist() if math.isfinite(v)]
    assert abs(float(around[1]) - x) == min(distances)


def test_every_bf16_survives_widening() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[np.isfinite(widen_bf16(bits))]
    assert np.array_equal(narrow_bf16(widen_bf16(finite)), finite)
