"""Mixture of experts in numpy. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
Mixture-of-Experts Layer" (2017), with the softmax taken before the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from caldrix_kernels.linear.reference import linear
from caldrix_kernels.silu_mul.reference import silu_mul

Float32 = npt.NDArray[np.float32]


def route(scores: Float32, *, top_k: int, normalise: bool) -> tuple[npt.NDArray[np.int64], Float32]:
    """The experts of each row and their weights: int64[rows, top_k], ids rising, and float32[rows, top_k].

    Chosen are the `top_k` highest scores of float32[rows, experts], of equal ones that of the lower id.
    A weight is the softmax over all scores, and where `normalise` it is divided by the sum of the chosen.
    """
    chosen = np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :top_k], axis=-1)
    wide = scores.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=-1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    weights = np.take_along_axis(weights, chosen, axis=-1)
    if normalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return chosen, weights.astype(np.float32)


def experts(
    x: Float32,
    scores: Float32,
    weights: Sequence[Float32],
    *,
    top_k: int,
    normalise: bool,
    rounded: Callable[[Float32], Float32] = lambda x: x,
) -> Float32:
    """float32[rows, hidden]: the weighted sum of what each row's experts make of it, lowest id first.

    `weights` holds gate, up [width, hidden] and down [hidden, width] of each expert in turn. An expert is
    down @ silu_mul(gate @ x, up @ x). `rounded` is applied to the inputs of the matrix products.
    """
    chosen, shares = route(scores, top_k=top_k, normalise=normalise)
    y = np.zeros_like(x)
    for row in range(len(x)):
        own = rounded(x[row : row + 1])
        for expert, share in zip(chosen[row], shares[row], strict=True):
            gate, up, down = weights[3 * expert : 3 * expert + 3]
            hidden = rounded(silu_mul(linear(own, gate), linear(own, up)))
            y[row] += share * linear(hidden, down)[0]
    return y
