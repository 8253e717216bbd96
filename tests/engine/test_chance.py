"""Random numbers by key and counter, and the draws made with them."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest

from caldrixd.engine import weights as weights_module
from caldrixd.engine.chance import WORD, philox, uniform
from caldrixd.engine.weights import POWERS, RARE, draw, index_at, softmax, total

PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ((WORD,) * 4, (WORD,) * 2, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            PI,
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_authors_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    assert " ".join(f"{word:016x}" for word in philox(counter, key)) == words


def test_numpy_has_the_same_generator() -> None:
    state = np.random.Philox(key=np.array([12345, 0], np.uint64), counter=np.array([6, 0, 0, 0], np.uint64))
    assert list(state.random_raw(4)) == list(philox((7, 0, 0, 0), (12345, 0)))


def test_a_chance_is_strictly_between_0_and_1() -> None:
    chances = [uniform(seed, position) for seed in (0, 2**64 - 1) for position in range(2000)]
    assert len(set(chances)) == len(chances)
    assert 0 < min(chances) < 0.002
    assert 0.998 < max(chances) < 1
    assert abs(sum(chances) / len(chances) - 0.5) < 0.02


def test_powers_of_two_are_correctly_rounded() -> None:
    with localcontext(prec=40):
        assert [float(Decimal(2) ** (Decimal(i) / 2048)) for i in range(2048)] == list(POWERS)


def test_softmax_weighs_by_the_exponential() -> None:
    scores = np.concatenate([np.linspace(-69.0, 0.0, 40_001), [-70.0, -1e300]])
    exact = [math.exp(score) for score in scores[:-2]]
    weights = softmax(scores + 0.0, 1.0)
    assert np.allclose(weights[:-2], exact, rtol=1e-13, atol=2.0**-100)
    assert list(weights[-2:]) == [0.0, 0.0]
    assert weights[40_000] == 1.0
    assert list(softmax(np.array([3.0, 1.0]), 2.0)) == list(softmax(np.array([2.5, 1.5]), 1.0))


def test_softmax_has_these_bits() -> None:
    weights = softmax(np.array([0.0, -0.1, -1.0, -2.5, -13.7, -44.4, -68.0]), 0.9)
    assert [weight.hex() for weight in weights.tolist()] == BITS


BITS = [
    "0x1.0000000000000p+0",
    "0x1.ca286101c9102p-1",
    "0x1.5117f772d475fp-2",
    "0x1.fd599f2820577p-5",
    "0x1.0702a303db265p-22",
    "0x1.c627fa4586595p-72",
    "0x0.0p+0",
]


@pytest.mark.parametrize("size", [1, 2, 65, 4096, 4097, 5003])
def test_every_index_is_drawn_by_its_share(size: int) -> None:
    weights = np.random.default_rng(size).integers(0, 3, size).astype(np.float64)
    weights[size // 2] = 2.0
    whole = total(weights)
    assert whole == math.fsum(weights)
    found = [index_at(weights, mark + 0.5) for mark in range(int(whole))]
    assert list(np.bincount(found, minlength=size)) == list(weights)


@pytest.mark.parametrize("chance", [2.0**-54, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("size", [3, 64, 4096, 4097, 10_000])
def test_what_weighs_nothing_is_never_drawn(size: int, chance: float) -> None:
    for place in {0, 1, size // 2, size - 1}:
        weights = np.zeros(size)
        weights[place] = 1e-30
        assert index_at(weights, chance * 1e-30) == place


@pytest.mark.parametrize("size", [6, 6000])
def test_a_chance_on_a_boundary_is_the_next_that_weighs(size: int) -> None:
    weights = np.zeros(size)
    weights[0] = weights[size - 1] = 1.0
    assert index_at(weights, 1.0) == size - 1
    assert index_at(weights, np.nextafter(1.0, 0)) == 0


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1e-308, 1e-9, 0.3, 1.0, 4.0, 1e308])
@pytest.mark.parametrize("size", [1, 2, 5, 700, 4096])
def test_a_draw_falls_on_the_likely_first_and_then_on_the_rare(
    size: int, temperature: float, kind: type[np.floating[Any]]
) -> None:
    for seed in range(20):
        scores = np.random.default_rng(seed).normal(1e3, 8 * min(temperature, 1e30), size).astype(kind)
        weights = softmax(scores, temperature)
        rare = np.float64(scores.max()) - scores.astype(np.float64) > temperature * RARE * (1 + 1e-6)
        order = np.argsort(rare, kind="stable")
        passed = np.cumsum(weights[order])
        for chance in (2.0**-53, 0.01, 0.3, 0.7, 0.999, 1 - 1e-6, 1 - 2.0**-53):
            place = int(np.flatnonzero(order == draw(scores, temperature, chance))[0])
            before = passed[place - 1] if place else 0
            slack = 1e-12 * passed[-1]
            assert weights[order[place]] > 0
            assert before - slack <= chance * passed[-1] <= passed[place] + slack


def test_a_draw_weighs_the_rare_only_where_they_may_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(scores: Any, *how: Any) -> Any:
        sizes.append(len(scores))
        return softmax(scores, *how)

    monkeypatch.setattr(weights_module, "softmax", counted)
    scores = np.full(100_002, -17.0, np.float32)
    scores[[5, 70_000]] = 0
    rare = math.exp(-17) * 100_000
    # (chance of all weight, index, numbers of scores that are weighed)
    for share, index, weighed in (
        (0.2, 5, [2]),
        (0.9, 5, [2]),
        (0.9999, 5, [2, 100_000]),
        (1.0001, 70_000, [2, 100_000]),
        (1.5, 70_000, [2]),
        (1.9999, 70_000, [2, 100_000]),
        (2 + 0.5 * math.exp(-17), 0, [2, 100_000]),
        (2 + 1.5 * math.exp(-17), 1 + 1563, [2, 100_000]),  # the second of the first of 1,563 columns
    ):
        sizes.clear()
        assert draw(scores, 1.0, share / (2 + rare)) == index
        assert sizes == weighed
