"""From logits to the next token.

The knobs act in this order: the repetition penalty, top-k, top-p, min-p, the temperature, one draw. Each cut
sees the probabilities of what the one before it left, at temperature 1. Among equal scores the lower id is
the more likely. All of it is float64 arithmetic that IEEE 754 rounds alike everywhere, so the same logits and
seed give the same token on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caldrixd.engine.chance import uniform
from caldrixd.engine.weights import RARE_WEIGHT, Ids, Scores, Values, Weights, draw, likely, softmax, total

RECENT = 64  # tokens of prompt and reply that the penalty sees
# A probability of float32 logits is known to about this part of itself: less does not decide a cut.
DOUBT = 2.0**-22
FINITE = float(np.finfo(np.float64).max)
# Scores are sorted by how far they are below the highest, into DEPTHS boxes of 1 / BOXES each at most.
BOXES, DEPTHS = 16, 1024
SORTED = 1000  # a box with more scores is cut into boxes itself
COLUMN = 32
FEW = 1000  # so many tokens nearly always hold the share that top-p asks for


@dataclass(frozen=True)
class Sampling:
    """How a token is picked. The defaults, and any others at temperature 0, draw nothing.

    `temperature` is at least 0, `top_k` 0 keeps all, `top_p` is over 0 and at most 1, `min_p` from 0 to 1,
    `repetition_penalty` over 0, `seed` has 64 bits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @property
    def greedy(self) -> bool:
        """Whether it is the token with the highest logit."""
        return not self.draws and self.repetition_penalty == 1

    @property
    def cuts(self) -> bool:
        """Whether a token may be drawn from fewer than all."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)


GREEDY = Sampling()


def pick(logits: Values, tokens: Sequence[int], sampling: Sampling) -> int:
    """The token after `tokens` (prompt and reply) by float32[vocab_size], which are all finite.

    The draw depends on the seed and the number of tokens.
    """
    scores: Values | Scores = logits
    if sampling.repetition_penalty != 1:
        scores = penalised(logits.astype(np.float64), tokens[-RECENT:], sampling.repetition_penalty)
    if not sampling.draws:
        return int(np.argmax(scores))
    chance = uniform(sampling.seed, len(tokens))
    if not sampling.cuts:
        return draw(scores, sampling.temperature, chance)
    scores = scores.astype(np.float64, copy=False)
    ids = kept(scores, sampling)
    return int(ids[draw(scores[ids], sampling.temperature, chance)])


def penalised(scores: Scores, recent: Sequence[int], penalty: float) -> Scores:
    """float64[vocab_size], changed in place: each distinct token of `recent` becomes less likely.

    Positive scores are divided, others multiplied (Keskar and others, "CTRL", 2019, divide all of them, which
    makes the unlikely likelier). A penalty below 1 does the opposite.
    """
    if penalty != 1:
        ids = sorted(set(recent))
        seen = scores[ids]
        with np.errstate(over="ignore", under="ignore"):
            changed = np.where(seen > 0, seen / penalty, seen * penalty)
        scores[ids] = np.clip(changed, -FINITE, FINITE)
    return scores


def kept(scores: Scores, sampling: Sampling) -> Ids:
    """The ids of float64[vocab_size] that a token is drawn from, in ascending order; at least one."""
    ids = np.arange(len(scores))
    if 0 < sampling.top_k < len(ids):
        ids = _contenders(scores, sampling.top_k)
        ids = ids[_leading(scores[ids], np.ones(len(ids)), sampling.top_k)]
        scores = scores[ids]
    if sampling.top_p < 1:
        cut = _nucleus(scores, sampling.top_p)
        ids, scores = ids[cut], scores[cut]
    if sampling.min_p > 0:
        ids = ids[_not_below(scores, sampling.min_p)]
    return ids


def _not_below(scores: Scores, min_p: float) -> Ids:
    """Min-p of Nguyen and others, "Turning up the heat" (2024), as indices."""
    least = min_p * (1 - DOUBT)
    if least > RARE_WEIGHT:
        found = likely(scores, 1.0)
        return found.ids[found.weights >= least]
    return np.flatnonzero(softmax(scores, 1.0) >= least)


def _nucleus(scores: Scores, top_p: float) -> Ids:
    """Top-p of Holtzman and others, "The curious case of neural text degeneration" (2020), as indices.

    As for a draw, what the rare scores weigh is looked at only where it may decide.
    """
    share = top_p * (1 - DOUBT)
    found = likely(scores, 1.0)
    if share * found.most < found.sure:
        some = scores[found.ids]
        cut = _fewest(some, found.weights, share * found.sure)
        if found.most == found.sure or len(_fewest(some, found.weights, share * found.most)) == len(cut):
            return found.ids[cut]
    weights = softmax(scores, 1.0)
    return _fewest(scores, weights, share * total(weights))


def _fewest(scores: Scores, weights: Weights, needed: float) -> Ids:
    """The indices, ascending, of the fewest highest scores whose weights add up to `needed`."""
    some = _contenders(scores, FEW)
    if len(some) < len(scores) and np.cumsum(weights[some])[-1] >= needed:
        return some[_leading(scores[some], weights[some], needed)]
    return _leading(scores, weights, needed)


def _contenders(scores: Scores, count: int) -> Ids:
    """The indices, ascending, of all scores that are no lower than the `count`-th, and perhaps of some more.

    Each column of a table of the scores has one that is no lower than the column's highest: the `count`-th of
    the columns' highest is a bound.
    """
    width = len(scores) // COLUMN
    if count >= width:
        return np.arange(len(scores))
    highest = scores[: width * COLUMN].reshape(COLUMN, width).max(axis=0)
    return np.flatnonzero(scores >= np.partition(highest, width - count)[width - count])


def _leading(scores: Scores, weights: Weights, needed: float) -> Ids:
    """What `_fewest` gives, for any scores.

    The box in which the sum is reached is cut into boxes again until few scores are left to sort.
    """
    depths = _depths(scores, BOXES)
    last, before = _box(depths, weights, needed, 0.0)
    leading = depths < last
    edge = np.flatnonzero(depths == last)
    while len(edge) > SORTED and 0 < _width(scores[edge]) < np.inf:
        depths = _depths(scores[edge], 0)
        last, before = _box(depths, weights[edge], needed, before)
        leading[edge[depths < last]] = True
        edge = edge[depths == last]
    if _width(scores[edge]) > 0:
        edge = edge[np.argsort(-scores[edge], kind="stable")]
    count = int(np.searchsorted(before + np.cumsum(weights[edge]), needed)) + 1
    leading[edge[:count]] = True
    return np.flatnonzero(leading)


def _depths(scores: Scores, fewest: int) -> Ids:
    """The box of each score, 0 for the highest: DEPTHS of them, but `fewest` for each 1 at least."""
    with np.errstate(over="ignore"):
        below = scores.max() - scores
        width = below.max()
        if 0 < width * fewest < DEPTHS or fewest == 0:
            below /= width
            below *= DEPTHS - 1
        else:
            below *= fewest
    depths: Ids = np.minimum(below, DEPTHS - 1, out=below).astype(np.int64)
    return depths


def _box(depths: Ids, weights: Weights, needed: float, before: float) -> tuple[int, float]:
    """The box in which `needed` is reached, and the sum up to it; it is `before` at the first box."""
    sums = np.bincount(depths, weights)
    passed = before + np.cumsum(sums)
    last = min(int(np.searchsorted(passed, needed)), len(sums) - 1)
    return last, float(passed[last - 1]) if last else before


def _width(scores: Scores) -> float:
    with np.errstate(over="ignore"):
        return float(scores.max() - scores.min())
