"""Random numbers that depend on a seed and a position alone.

Philox4x64-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It is
a function of a key and a counter, without a state that other sequences could advance, and it is computed in
Python's integers, so that its bits are those of every machine and every version of any library.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
WORD = 2**64 - 1
BITS = 53  # of a float64


def uniform(seed: int, position: int) -> float:
    """A number over 0 and below 1, in steps of 2**-53. `seed` and `position` have 64 bits."""
    word = philox((position, 0, 0, 0), (seed, 0))[0]
    return ((word >> (64 - BITS + 1)) + 0.5) / (1 << (BITS - 1))


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four words of 64 bits of a counter and a key of 64-bit words, the lowest first."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (right >> 64) ^ b ^ first, right & WORD, (left >> 64) ^ d ^ second, left & WORD
        first, second = (first + WEYL[0]) & WORD, (second + WEYL[1]) & WORD
    return a, b, c, d
