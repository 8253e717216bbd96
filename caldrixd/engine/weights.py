"""From scores to what a draw weighs them by.

The exp of a library differs in its last bit between processors, and a draw beside a boundary would take
another token for it. Here a power of two is a table's entry times a short polynomial (Tang, "Table-driven
implementation of the exponential function in IEEE floating-point arithmetic", TOMS 15, 1989): additions and
multiplications of float64, which IEEE 754 rounds alike everywhere. The table comes of integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]
Weights = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
CUBIC, SQUARE = LN_2 * LN_2 * LN_2 / 6, LN_2 * LN_2 / 2
FINE = 11  # the table has the powers of 2 ** -FINE
LEAST = -100.0  # the power of two that counts as none
# Adding it leaves multiples of 2 ** -FINE, which then stand in the low bits.
ROUNDER = 1.5 * 2.0 ** (52 - FINE)
ROUNDER_BITS = int(np.float64(ROUNDER).view(np.int64))
BLOCK = 1 << 13  # some arrays of this many numbers stay in the second cache
ROWS, FEW = 64, 4096
# What weighs less than this beside the highest is rarely drawn, and a bound on it rarely decides a draw.
RARE = 24 * LN_2
RARE_WEIGHT = 2.0**-24 * (1 + 2.0**-10)  # at most, however the bound was rounded


def _powers() -> npt.NDArray[np.float64]:
    """2 ** (i / 2 ** FINE), correctly rounded, by square roots and products of integers of 160 bits."""
    scale = 160
    root = 2 << scale
    for _ in range(FINE):
        root = math.isqrt(root << scale)
    values, value = [], 1 << scale
    for _ in range(1 << FINE):
        values.append(value / (1 << scale))
        value = value * root >> scale
    return np.array(values)


POWERS = _powers()


@dataclass(frozen=True)
class Likely:
    """The scores of floats[n] that are not rare at a temperature: `ids`, ascending, and their `weights`.

    All weight is at least `sure` and at most `most`, which are equal where none is rare.
    """

    ids: Ids
    weights: Weights
    sure: float
    most: float


def likely(scores: Scores | Values, temperature: float) -> Likely:
    """Those of floats[n], n over 0, at a `temperature` over 0."""
    highest = np.float64(scores.max())
    ids = np.flatnonzero(scores >= _rounded_down(highest - temperature * RARE, scores.dtype))
    weights = softmax(scores[ids], temperature)
    sure = total(weights)
    return Likely(ids, weights, sure, sure + (len(scores) - len(ids)) * RARE_WEIGHT)


def draw(scores: Scores | Values, temperature: float, chance: float) -> int:
    """The index of floats[n] that `chance` (over 0, below 1) falls on when each has its softmax weight.

    The rare ones stand after all others. Most draws are decided by how many there are: where the most that
    they may weigh leads to the same index as nothing would, so does what they do weigh.
    """
    found = likely(scores, temperature)
    if chance * found.most < found.sure:
        index = index_at(found.weights, chance * found.sure)
        if found.most == found.sure or index_at(found.weights, chance * found.most) == index:
            return int(found.ids[index])
    rare = np.delete(np.arange(len(scores)), found.ids)
    weights = softmax(scores[rare], temperature, scores.max())
    target = chance * (found.sure + total(weights))
    if target < found.sure:
        return int(found.ids[index_at(found.weights, target)])
    return int(rare[index_at(weights, target - found.sure)])


def _rounded_down(bound: float, kind: np.dtype[Any]) -> np.floating[Any]:
    """As a number of the type `kind`, so that scores of it below are below `bound` too."""
    with np.errstate(over="ignore"):
        rounded: np.floating[Any] = kind.type(bound)
    return rounded if rounded <= bound else np.nextafter(rounded, kind.type(-np.inf), dtype=kind)


def softmax(scores: Scores | Values, temperature: float, highest: float | None = None) -> Weights:
    """exp((score - highest) / temperature) of floats[n], less 2 ** LEAST; `temperature` over 0.

    `highest` is that of the scores unless another, no lower one is given. It weighs 1, one below 2 ** LEAST
    nothing. The arithmetic is float64, also of float32 scores, the exponential right to one part in 10**13.
    """
    highest = np.float64(scores.max() if highest is None else highest)
    weights: Weights = np.empty(len(scores))
    with np.errstate(over="ignore"):
        for start in range(0, len(scores), BLOCK):
            bits = np.subtract(scores[start : start + BLOCK], highest, dtype=np.float64)
            bits /= temperature
            bits *= LOG2_E
            np.maximum(bits, LEAST, out=bits)
            out = weights[start : start + BLOCK]
            _power(bits, out)
            out -= 2.0**LEAST
    return weights


def _power(bits: Scores, out: Weights) -> None:
    """out = 2 ** bits, from LEAST to 0."""
    rounded = bits + ROUNDER
    steps = rounded.view(np.int64) - ROUNDER_BITS
    rounded -= ROUNDER
    rest = np.subtract(bits, rounded, out=rounded)
    np.multiply(rest, CUBIC, out=out)
    out += SQUARE
    out *= rest
    out += LN_2
    out *= rest
    out += 1.0
    out *= POWERS[steps & ((1 << FINE) - 1)]
    exponents = out.view(np.int64)
    exponents += (steps >> FINE) << 52


def total(weights: Weights) -> float:
    return float(np.cumsum(_column_sums(_columns(weights)))[-1])


def index_at(weights: Weights, target: float) -> int:
    """The index at which `target` (from 0, below the sum) is passed; what weighs nothing is never it.

    Many weights stand in ROWS rows and are passed column by column. Any order will do for a draw, and this
    one adds few long rows where a sum in order of the index adds 150,000 numbers one after the other. No
    library chooses the order of any sum.
    """
    columns = _columns(weights)
    sums = _column_sums(columns)
    passed = np.cumsum(sums)
    column = _first_over(target, passed, sums)
    if column:
        target -= passed[column - 1]
    inside = columns[:, column]
    row = _first_over(target, np.cumsum(inside), inside)
    return row * len(sums) + column


def _columns(weights: Weights) -> Weights:
    """float64[ROWS, n / ROWS] with zeros at the end; one row of few weights."""
    rows = ROWS if len(weights) > FEW else 1
    if len(weights) % rows == 0:
        return weights.reshape(rows, -1)
    columns = np.zeros((rows, -(-len(weights) // rows)))
    columns.reshape(-1)[: len(weights)] = weights
    return columns


def _column_sums(columns: Weights) -> Weights:
    sums: Weights = columns[0].copy()
    for row in columns[1:]:
        sums += row
    return sums


def _first_over(target: float, passed: Weights, weights: Weights) -> int:
    """The first index at which more than `target` is passed; the last with weight if rounding hides it."""
    index = int(np.searchsorted(passed, target, side="right"))
    return index if index < len(passed) else int(np.flatnonzero(weights)[-1])
