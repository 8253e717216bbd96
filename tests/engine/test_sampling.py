"""From logits to a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldrixd.engine.chance import uniform
from caldrixd.engine.sampling import DOUBT, SORTED, Sampling, kept, penalised, pick
from caldrixd.engine.weights import draw, softmax, total

Floats = npt.NDArray[np.float32]
HOT = Sampling(temperature=1.0)


def logits(*probabilities: float) -> Floats:
    return np.array([math.log(probability) for probability in probabilities], np.float32)


def left(sampling: Sampling, *probabilities: float) -> list[int]:
    return [int(id) for id in kept(logits(*probabilities).astype(np.float64), sampling)]


def test_without_a_knob_the_largest_is_taken() -> None:
    assert pick(np.array([-3, 2, 1], np.float32), [0], Sampling()) == 1


def test_the_lowest_id_of_equals_is_taken() -> None:
    assert pick(np.array([1, 7, 7, 0, 7], np.float32), [0], Sampling()) == 1


@pytest.mark.parametrize(
    ("top_p", "count"), [(1e-300, 1), (0.5, 1), (0.500001, 2), (0.8, 2), (0.800001, 3), (0.81, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, count: int) -> None:
    assert left(Sampling(top_p=top_p), 0.5, 0.3, 0.1, 0.1) == list(range(count))
    assert left(Sampling(top_p=top_p), 0.1, 0.3, 0.1, 0.5) == sorted([3, 1, 0, 2][:count])


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_among_equals_top_p_keeps_the_lower_ids(top_p: float, count: int) -> None:
    assert left(Sampling(top_p=top_p), *[0.25] * 4) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 2**31 - 1])
def test_top_k_keeps_so_many_and_of_equals_the_lower_ids(count: int) -> None:
    assert left(Sampling(top_k=count), 0.1, 0.4, 0.1, 0.4) == sorted([1, 3, 0, 2][:count])


@pytest.mark.parametrize(
    ("min_p", "ids"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 2, 3]), (0.21, [0, 1]), (0.6, [0, 1]), (1.0, [0])]
)
def test_min_p_is_a_share_of_the_most_likely(min_p: float, ids: list[int]) -> None:
    assert left(Sampling(min_p=min_p), 0.5, 0.3, 0.1, 0.1) == ids


def test_a_cut_sees_what_the_one_before_it_left() -> None:
    assert left(Sampling(top_k=2, top_p=0.6), 0.4, 0.3, 0.2, 0.1) == [0, 1]
    assert left(Sampling(top_k=2, top_p=0.57), 0.4, 0.3, 0.2, 0.1) == [0]
    assert left(Sampling(top_p=0.9, min_p=0.5), 0.4, 0.3, 0.2, 0.1) == [0, 1, 2]
    assert left(Sampling(temperature=9.0, top_p=0.6), 0.5, 0.3, 0.1, 0.1) == [0, 1]


@pytest.mark.parametrize("spread", [0.0, 1e-3, 4.0, 1e6])
@pytest.mark.parametrize("size", [31, 5_000, 60_000])
def test_cuts_of_large_vocabularies_are_those_of_a_sort(size: int, spread: float) -> None:
    scores = np.random.default_rng(size).normal(0, spread, size).astype(np.float32).astype(np.float64)
    order = np.lexsort((np.arange(size), -scores))
    for count in (1, 40, 500, 20_000, size - 1):
        assert list(kept(scores, Sampling(top_k=count))) == sorted(order[:count])
    weights = np.exp(scores[order] - scores[order[0]])
    reached = np.cumsum(weights) / math.fsum(weights)
    for share in (0.05, 0.5, 0.9, 0.999):
        ids = kept(scores, Sampling(top_p=share))
        assert list(ids) == sorted(order[: len(ids)])
        assert reached[len(ids) - 1] >= share * (1 - 1e-6)
        assert len(ids) == 1 or reached[len(ids) - 2] < share


def clustered(size: int, spread: float) -> npt.NDArray[np.float64]:
    """Half of the scores far below the rest, and many of both equal."""
    scores = np.random.default_rng(size).normal(0, spread, size)
    scores[::2] -= 1e4
    return np.round(scores, 2)


def halved(size: int, spread: float) -> npt.NDArray[np.float64]:
    """Each score half as far below the highest as the one before it, some of them equal."""
    return np.ldexp(-spread, -(np.arange(size) // 50 % 1000))


def normal(size: int, spread: float) -> npt.NDArray[np.float64]:
    return np.random.default_rng(size).normal(0, spread, size).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("shape", [normal, clustered, halved])
@pytest.mark.parametrize("spread", [1e-300, 1e-3, 0.3, 3.0, 1e30])
def test_top_p_of_a_flat_distribution_is_by_the_definition(
    shape: Callable[[int, float], npt.NDArray[np.float64]], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few scores are sorted for it, however alike they are."""
    scores = shape(152_000, spread)
    order = np.lexsort((np.arange(len(scores)), -scores))
    weights = softmax(scores[order], 1.0)
    sums = np.cumsum(weights)
    sort = np.argsort
    sizes: list[int] = []

    def counted(values: npt.NDArray[np.float64], **how: Any) -> npt.NDArray[np.int64]:
        sizes.append(len(values))
        return sort(values, **how)

    monkeypatch.setattr(np, "argsort", counted)
    for top_p in (1e-9, 0.1, 0.6, 0.95, 0.9999):
        count = int(np.searchsorted(sums, top_p * (1 - DOUBT) * total(weights))) + 1
        assert list(kept(scores, Sampling(top_p=top_p))) == sorted(order[:count])
    assert max(sizes, default=0) <= SORTED


@pytest.mark.parametrize(("score", "penalty", "result"), [(-1, 1.5, -1.5), (1, 1.5, 2 / 3), (0, 1.5, 0)])
def test_the_penalty_lowers_seen_scores_on_both_sides_of_zero(
    score: float, penalty: float, result: float
) -> None:
    scores = np.array([score, -1.5, score], np.float64)
    assert list(penalised(scores.copy(), [0, 0], penalty)) == [result, -1.5, score]
    raised = penalised(scores.copy(), [0], 0.5)[0]
    assert raised == (score * 2 if score > 0 else score / 2)


@pytest.mark.parametrize(
    ("tokens", "token"),
    [
        ([0], 1),
        ([0] * 2, 1),
        ([1], 0),
        ([0, *[2] * 62], 1),
        ([0, *[2] * 63], 1),
        ([0, *[2] * 64], 0),
        ([*[2] * 100, 0], 1),
    ],
)
def test_the_penalty_is_for_the_last_64_tokens_once_each(tokens: list[int], token: int) -> None:
    scores = np.array([3.0, 2.1, -1.0], np.float32)
    assert pick(scores, tokens, Sampling(repetition_penalty=1.5)) == token
    assert pick(scores, tokens, Sampling()) == 0
    assert pick(scores, tokens, Sampling(repetition_penalty=1.4)) == 0


def draws(probabilities: Sequence[float], sampling: Sampling, count: int) -> npt.NDArray[np.int64]:
    """How often each id is drawn at the positions 1 to `count`."""
    scores = logits(*probabilities)
    ids = kept(scores.astype(np.float64), sampling)
    chances = [uniform(sampling.seed, position) for position in range(1, count + 1)]
    found = ids[[draw(scores[ids].astype(np.float64), sampling.temperature, chance) for chance in chances]]
    assert list(found[:100]) == [pick(scores, range(position), sampling) for position in range(1, 101)]
    return np.bincount(found, minlength=len(probabilities))


# The 0.9999 quantile of chi-square with 1, 2, ... degrees of freedom.
CHI_SQUARE = (15.14, 18.42, 21.11, 23.51, 25.74)


@pytest.mark.parametrize("seed", [1, 2**63])
@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(1.0), (0.4, 0.3, 0.15, 0.1, 0.05)),
        (Sampling(1.0, top_k=3), (8 / 17, 6 / 17, 3 / 17, 0, 0)),
        (Sampling(1.0, top_p=0.7), (4 / 7, 3 / 7, 0, 0, 0)),
        (Sampling(1.0, min_p=0.25), (8 / 19, 6 / 19, 3 / 19, 2 / 19, 0)),
        (Sampling(0.5, top_p=0.9), (64 / 113, 36 / 113, 9 / 113, 4 / 113, 0)),
        (Sampling(2.0, top_k=2, min_p=0.1), (2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0, 0, 0)),
    ],
)
def test_fifty_thousand_draws_have_the_exact_probabilities(
    sampling: Sampling, exact: Sequence[float], seed: int
) -> None:
    given = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, 1.0, seed)
    found = draws((0.4, 0.3, 0.15, 0.1, 0.05), given, 50_000)
    expected = 50_000 * np.array(exact)
    possible = expected > 0
    assert not found[~possible].any()
    square = float(np.sum((found - expected)[possible] ** 2 / expected[possible]))
    assert square < CHI_SQUARE[possible.sum() - 2]


def reply(sampling: Sampling, scores: Floats) -> list[int]:
    return [pick(scores, range(position), sampling) for position in range(1, 40)]


def test_a_seed_decides_the_draws_and_nothing_else() -> None:
    scores = np.zeros(1000, np.float32)
    replies = {seed: reply(Sampling(1.0, seed=seed), scores) for seed in (0, 1, 2**63, 2**64 - 1)}
    assert len(set(map(tuple, replies.values()))) == 4
    for seed, tokens in replies.items():
        assert reply(Sampling(1.0, seed=seed), scores) == tokens
        assert set(reply(Sampling(0.0, seed=seed), scores)) == {0}


@pytest.mark.parametrize("penalty", [5e-324, 1.0, 1.7976931348623157e308])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 0.01])
def test_nearly_no_temperature_takes_the_most_likely(temperature: float, penalty: float) -> None:
    scores = np.array([-30.0, 3e38, -3e38, 5.0, 2.0], np.float32)
    sampling = Sampling(temperature, repetition_penalty=penalty)
    assert {pick(scores, [0, 2] * length, sampling) for length in range(1, 30)} == {1}


@pytest.mark.parametrize("temperature", [1e300, 1.7976931348623157e308])
def test_at_a_vast_temperature_all_are_alike(temperature: float) -> None:
    scores = np.array([-30.0, 3e38, -3e38, 5.0, 2.0], np.float32)
    tokens = {pick(scores, [9] * length, Sampling(temperature)) for length in range(1, 100)}
    assert tokens == {0, 1, 2, 3, 4}


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=80),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 1e308),
        top_k=st.integers(0, 90),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, 1e308, exclude_min=True),
        seed=st.integers(0, 2**64 - 1),
    ),
)
def test_whatever_the_knobs_a_token_that_is_kept_is_picked(scores: list[float], sampling: Sampling) -> None:
    array = np.array(scores, np.float32)
    tokens = [0, len(scores) - 1]
    changed = penalised(array.astype(np.float64), tokens, sampling.repetition_penalty)
    ids = kept(changed, sampling)
    assert np.isfinite(changed).all()
    assert int(np.argmax(changed)) in ids
    assert pick(array, tokens, sampling) in ids
