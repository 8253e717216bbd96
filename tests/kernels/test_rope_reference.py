"""Rotary position embedding: frequencies by hand, angles against the library's cosine and sine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies, rope


def test_default_frequencies_fall_by_a_power_of_theta() -> None:
    frequencies = inverse_frequencies("default", 10000.0, 8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_frequencies_are_rounded_like_the_original_arithmetic() -> None:
    theta, dim = 500000.0, 128
    exponents = (np.arange(0, dim, 2) / np.float32(dim)).astype(np.float32)
    powers = np.array([np.float32(theta ** float(e)) for e in exponents])
    expected = np.float32(1) / powers
    assert inverse_frequencies("default", theta, dim).tobytes() == expected.tobytes()


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies("default", 10000.0, 4)
    assert inverse_frequencies("linear", 10000.0, 4, 4.0).tolist() == (plain / 4).tolist()


@pytest.mark.parametrize(
    ("context", "second"),
    [
        # The wavelengths are 6.28 and 628.3. 628.3 is over 100 / 1: divided by 8.
        (100, 0.00125),
        # Between 1000 / 4 and 1000 / 1: s = (1000 / 628.3 - 1) / 3 = 0.19718 of it is kept whole.
        (1000, 0.80281693 * 0.00125 + 0.19718307 * 0.01),
        # Below 10000 / 4: kept.
        (10000, 0.01),
    ],
)
def test_llama3_scaling_depends_on_the_wavelength(context: int, second: float) -> None:
    frequencies = inverse_frequencies("llama3", 10000.0, 4, 8.0, 1.0, 4.0, context)
    np.testing.assert_allclose(frequencies, [1.0, second], rtol=1e-6)


# The arguments, and what transformers 5.24 gives.
YARN = [
    (
        10000.0,
        16,
        4.0,
        64,
        32.0,
        1.0,
        True,
        [
            1.0,
            0.23717082,
            0.049999997,
            0.0079056947,
            0.0024999999,
            0.00079056947,
            0.00025000001,
            7.9056947e-05,
        ],
    ),
    (
        1000000.0,
        16,
        4.0,
        32768,
        32.0,
        1.0,
        True,
        [
            1.0,
            0.17782794,
            0.031622779,
            0.0042175599,
            0.00050000002,
            4.4456985e-05,
            7.9056936e-06,
            1.4058534e-06,
        ],
    ),
    (
        10000.0,
        12,
        8.0,
        2048,
        16.0,
        2.0,
        False,
        [1.0, 0.21544345, 0.045322917, 0.0033052226, 0.00026930429, 5.8019868e-05],
    ),
    (10000.0, 8, 2.0, 8, 32.0, 1.0, True, [1.0, 0.050000001, 0.0049999999, 0.00050000002]),
    (10000.0, 8, 4.0, 32768, 32.0, 1e-06, True, [1.0, 0.1, 0.0099999998, 0.00085000001]),
    (10000.0, 8, 2.0, 4, 32.0, 1.0, True, [1.0, 0.050000001, 0.0049999999, 0.00050000002]),
]


@pytest.mark.parametrize(("theta", "dim", "factor", "context", "fast", "slow", "truncate", "expected"), YARN)
def test_yarn_keeps_fast_pairs_and_scales_slow_ones(
    theta: float,
    dim: int,
    factor: float,
    context: int,
    fast: float,
    slow: float,
    truncate: bool,
    expected: list[float],
) -> None:
    frequencies = inverse_frequencies("yarn", theta, dim, factor, 1.0, 1.0, context, fast, slow, truncate)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


# Pairs 0, 20, 33, 40 and 63 at these positions: cosines and sines that transformers 5.24 has for Llama 3.1.
LLAMA_3_1 = [
    (0, [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]),
    (
        1000,
        [0.5623791, -0.6581203, 0.9515084, 0.9994125, 0.9999999],
        [0.8268796, -0.7529128, 0.3076228, 0.0342743, 0.0003069],
    ),
    (
        8192,
        [0.2928018, -0.8393839, -0.8364592, 0.9608257, 0.9999968],
        [-0.9561732, -0.543539, 0.5480292, 0.2771534, 0.0025141],
    ),
    (
        20000,
        [0.8131997, -0.2271919, 0.9995704, 0.7740263, 0.9999812],
        [0.5819848, -0.97385, -0.0293082, 0.6331534, 0.0061378],
    ),
]


@pytest.mark.parametrize(("position", "cosines", "sines"), LLAMA_3_1)
def test_llama3_angles_are_those_of_transformers(
    position: int, cosines: list[float], sines: list[float]
) -> None:
    frequencies = inverse_frequencies("llama3", 500000.0, 128, 8.0, 1.0, 4.0, 8192)
    got = cos_sin(frequencies, [position])
    for table, expected in zip(got, (cosines, sines), strict=True):
        np.testing.assert_allclose(table[0, [0, 20, 33, 40, 63]], expected, atol=1e-6)


def test_a_scale_multiplies_cosines_and_sines() -> None:
    frequencies = inverse_frequencies("default", 10000.0, 8)
    plain, scaled = cos_sin(frequencies, [0, 3]), cos_sin(frequencies, [0, 3], 1.2)
    for a, b in zip(plain, scaled, strict=True):
        assert (a * np.float32(1.2)).tobytes() == b.tobytes()


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies("dynamic", 10000.0, 4)


def test_cosine_and_sine_are_the_nearest_float32() -> None:
    random = np.random.default_rng(2)
    angles = np.concatenate(
        [
            random.uniform(0, 2**21, 40000),
            random.uniform(0, 8, 40000),
            np.arange(0, 2000) * (math.pi / 4),
            [0.0, 1e-30, 2.0**21],
        ]
    ).astype(np.float32)
    cosines, sines = cos_sin(angles, [1])
    exact = angles.astype(np.float64)
    assert np.array_equal(cosines[0], np.cos(exact).astype(np.float32))
    assert np.array_equal(sines[0], np.sin(exact).astype(np.float32))


def test_angles_are_float32_products() -> None:
    frequency = np.array([0.1], np.float32)
    cosines, _ = cos_sin(frequency, [3, 70001])
    product = np.array([[np.float32(3) * frequency[0]], [np.float32(70001) * frequency[0]]])
    assert np.array_equal(cosines, np.cos(product.astype(np.float64)).astype(np.float32))


def test_the_bits_are_the_same_on_every_machine() -> None:
    frequencies = inverse_frequencies("llama3", 500000.0, 64, 8.0, 1.0, 4.0, 8192)
    cosines, sines = cos_sin(frequencies, np.arange(0, 131072, 37))
    digest = hashlib.sha256(frequencies.tobytes() + cosines.tobytes() + sines.tobytes()).hexdigest()
    assert digest == "b375170b841838b97f2146149ed5546724879e2951c9b9473b51e98a52912e20"


def test_rope_turns_pairs_half_a_head_apart() -> None:
    # One head of four: the pairs are (0, 2) and (1, 3); a quarter turn, and none.
    x = np.array([[1, 2, 3, 4]], np.float32)
    cosines, sines = np.array([[0, 1]], np.float32), np.array([[1, 0]], np.float32)
    assert rope(x, cosines, sines, heads=1, head_dim=4).tolist() == [[-3, 2, 1, 4]]


def test_rope_turns_each_head_and_leaves_the_rest_of_it() -> None:
    x = np.array([[1, 2, 9, 3, 4, 8]], np.float32)
    cosines, sines = np.array([[0]], np.float32), np.array([[1]], np.float32)
    assert rope(x, cosines, sines, heads=2, head_dim=3).tolist() == [[-2, 1, 9, -4, 3, 8]]
    assert x.tolist() == [[1, 2, 9, 3, 4, 8]]
