"""Rotary position embedding in numpy. Su et al., "RoFormer: Enhanced Transformer with Rotary Position
Embedding" (2021); the scaled kinds as in "Extending Context Window of Large Language Models via
Positional Interpolation" (2023, linear), "The Llama 3 Herd of Models" (2024, llama3) and "YaRN: Efficient
Context Window Extension of Large Language Models" (2023, yarn).

Frequencies, cosines and sines are made of correctly rounded operations alone, so that every machine
gets the same bits: numpy's own power, cosine and sine differ between processors in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# pi / 2 in three parts. The first two have 32 bits, so that their products with a quadrant number
# below 2**21 are exact in float64.
_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_TWO_OVER_PI = 0.6366197723675814
_SINE = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(9))
_COSINE = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(10))


def inverse_frequencies(
    kind: str,
    theta: float,
    rotary_dim: int,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 1.0,
    original_context: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Float32:
    """float32[rotary_dim / 2]: radians per position of each pair, pair i being theta**(-2i/rotary_dim).

    `kind` "linear" divides all by `factor`. "llama3" divides those whose wavelength is over
    original_context / low_freq_factor positions, keeps those below original_context /
    high_freq_factor, and blends in between. "yarn" keeps the pairs that turn over `beta_fast` times
    in original_context positions, divides those that turn under `beta_slow` times, and blends between
    the two pairs, which `truncate` widens to whole numbers. ValueError for another kind.
    """
    one = np.float32(1.0)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = np.array([_power(theta, float(e)) for e in exponents], np.float32)
    frequencies = one / powers
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / np.float32(factor)
    if kind == "llama3":
        return _llama3(frequencies, factor, low_freq_factor, high_freq_factor, original_context)
    if kind == "yarn":
        bounds = [
            rotary_dim * _log(original_context / (turns * 2 * math.pi)) / (2 * _log(theta))
            for turns in (beta_fast, beta_slow)
        ]
        return _yarn(powers, factor, *(_whole(*bounds) if truncate else bounds))
    raise ValueError(f"no rope of the kind {kind}")


def _llama3(
    frequencies: Float32,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> Float32:
    one = np.float32(1.0)
    low, high = np.float32(low_freq_factor), np.float32(high_freq_factor)
    wavelengths = one / frequencies * np.float32(2 * math.pi)
    scaled = np.where(
        wavelengths > np.float32(original_context / low_freq_factor),
        frequencies / np.float32(factor),
        frequencies,
    )
    blend = (one / wavelengths * np.float32(original_context) - low) / (high - low)
    blended = (one - blend) * scaled / np.float32(factor) + blend * scaled
    between = (wavelengths >= np.float32(original_context / high_freq_factor)) & (
        wavelengths <= np.float32(original_context / low_freq_factor)
    )
    return np.where(between, blended, scaled)


def _whole(low: float, high: float) -> tuple[int, int]:
    return math.floor(low), math.ceil(high)


def _yarn(powers: Float32, factor: float, low: float, high: float) -> Float32:
    """`powers` are theta**(2i/rotary_dim); between the pairs `low` and `high` the scaling sets in."""
    one = np.float32(1.0)
    first, last = max(low, 0), min(high, 2 * len(powers) - 1)
    if first == last:
        last += 0.001
    ramp = (np.arange(len(powers), dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = one - np.clip(ramp, np.float32(0), one)
    blended: Float32 = one / (np.float32(factor) * powers) * (one - kept) + one / powers * kept
    return blended


def _power(base: float, exponent: float) -> float:
    return float(Context(prec=40).power(Decimal(base), Decimal(exponent)))


def _log(x: float) -> float:
    return float(Context(prec=40).ln(Decimal(x)))


def cos_sin(
    frequencies: Float32, positions: Sequence[int] | npt.NDArray[np.integer], scale: float = 1.0
) -> tuple[Float32, Float32]:
    """Cosines and sines, each float32[positions, pairs], of the float32 angles position * frequency.

    Exact to 1e-12 before the rounding to float32, for angles from 0 to 2**21; then times `scale`, which is
    yarn's attention factor.
    """
    angles = np.asarray(positions, np.float32)[:, None] * frequencies[None, :]
    x = angles.astype(np.float64)
    turns = np.rint(x * _TWO_OVER_PI)
    for part in _HALF_PI:
        x = x - turns * part
    square = x * x
    sine = x * _polynomial(_SINE, square)
    cosine = _polynomial(_COSINE, square)
    quadrant = turns.astype(np.int64) & 3
    swapped = (quadrant & 1).astype(np.bool_)
    cosines = np.where(swapped, sine, cosine) * np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    sines = np.where(swapped, cosine, sine) * np.where(quadrant >= 2, -1.0, 1.0)
    factor = np.float32(scale)
    return cosines.astype(np.float32) * factor, sines.astype(np.float32) * factor


def _polynomial(coefficients: Sequence[float], x: Float64) -> Float64:
    """Horner's rule, lowest coefficient first."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def rope(x: Float32, cosines: Float32, sines: Float32, *, heads: int, head_dim: int) -> Float32:
    """Turn the pairs (i, i + rotary_dim/2) of each head. float32[rows, heads * head_dim].

    `cosines` and `sines` are float32[rows, rotary_dim / 2]. Dimensions past rotary_dim stay.
    """
    y = x.reshape(len(x), heads, head_dim).copy()
    half = cosines.shape[1]
    first, second = y[..., :half].copy(), y[..., half : 2 * half].copy()
    cosine, sine = cosines[:, None, :], sines[:, None, :]
    y[..., :half] = first * cosine - second * sine
    y[..., half : 2 * half] = second * cosine + first * sine
    return y.reshape(x.shape)
