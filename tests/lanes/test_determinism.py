"""Logits depend on prompt, model and arithmetic alone: bit by bit the same in every manner of serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from caldrixd.lanes.drivers.compiler import worker_environment
from caldrixd.lanes.drivers.cpu import cpu_flags, find_compiler, isa_level
from tests.conftest import KERNEL_CACHE
from tests.support import matrix, models, recorded
from tests.support.matrix import Answer, Cell

ROOT = models.DATA.parents[1]
SMALL = ("tiny-llama-odd", "tiny-mistral-window", "tiny-qwen3-moe", "tiny-qwen3_5")
DEMO = "smollm2-135m-instruct"
LEVELS = [level for level in ("x86-64-v4", "x86-64-v3") if level <= isa_level(cpu_flags())]
COMPILERS = ["numba", "c"] if find_compiler(os.environ) else ["numba"]
VARIANTS = list(product(COMPILERS, LEVELS))
# Its fused steps are emulated, slowly.
WITHOUT_FMA = list(product(COMPILERS, ["x86-64-v2"]))
# The fields of a Cell.
FACTORS = ((1, 2, 3, 5), (1, 7, 64), (1, 2, 8), matrix.CACHES)


def covering(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few rows in which any two values of any two factors meet: next comes who meets most new pairs."""

    def pairs(row: Iterable[Any]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    rows = list(product(*factors))
    left = {pair for row in rows for pair in pairs(row)}
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(chosen[-1])
    return chosen


def directory(name: str) -> Path:
    return models.smollm2() if name == DEMO else models.tiny(name)


@cache
def conversations(name: str) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """First prompts, second ones, and the digest of each second one that is served alone by this process."""
    program = recorded.load(*models.opened(directory(name)))
    first, second = matrix.prompts(program)
    alone = Cell(threads=1, chunk=64, batch=1, cache="cold")
    digests = [matrix.serve(program, first, [prompt], alone)[0][0].digest for prompt in second]
    program.close()
    return first, second, digests


def served(
    variant: tuple[str, str], names: Sequence[str], cells: Sequence[Sequence[Any]], dtype: str
) -> list[list[list[list[Answer]]]]:
    """What a process with the kernels of this variant answers, by model, cell, time and prompt."""
    kernels, isa = variant
    work = [
        {"directory": str(directory(name)), "first": conversations(name)[0], "second": conversations(name)[1]}
        for name in names
    ]
    paths = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.matrix"],
        input=json.dumps({"kernels": kernels, "isa": isa, "dtype": dtype, "models": work, "cells": cells}),
        env={**os.environ, **worker_environment(KERNEL_CACHE, isa), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [
        [[[Answer(*answer) for answer in answers] for answers in rounds] for rounds in by_cell]
        for by_cell in json.loads(done.stdout)
    ]


def check(
    variant: tuple[str, str], names: Sequence[str], cells: Sequence[Sequence[Any]], dtype: str = "f32"
) -> None:
    """Every cell gives the digests of this process; those of the first cell where arithmetic is not f32."""
    wrong = []
    for name, by_cell in zip(names, served(variant, names, cells, dtype), strict=True):
        expected = [answer.digest for answer in by_cell[0][0]] if dtype != "f32" else conversations(name)[2]
        for cell, rounds in zip(cells, by_cell, strict=True):
            if any([answer.digest for answer in answers] != expected[: len(answers)] for answers in rounds):
                wrong.append((name, *cell))
            if cell[3] != "cancel":  # a conversation goes on from where the cache has it
                assert (rounds[0][0].cached > 0) == (cell[3] == "hit"), (name, *cell)
    assert wrong == []


def test_any_two_values_meet() -> None:
    cells = covering(FACTORS)
    for (i, left), (j, right) in combinations(enumerate(FACTORS), 2):
        assert {(cell[i], cell[j]) for cell in cells} == set(product(left, right))
    assert len(cells) <= 14


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_any_two_ways_together_give_the_same_bits(variant: tuple[str, str]) -> None:
    check(variant, SMALL, covering(FACTORS))


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_bf16_arithmetic_gives_the_same_bits_with_the_same_kernels(variant: tuple[str, str]) -> None:
    check(variant, SMALL, [(1, 64, 8, "cold"), *covering(FACTORS)], "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_all_ways_together_give_the_same_bits(variant: tuple[str, str]) -> None:
    check(variant, models.TINY, list(product(*FACTORS)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", WITHOUT_FMA, ids=" ".join)
def test_processors_without_fma_give_the_same_bits(variant: tuple[str, str]) -> None:
    check(variant, SMALL, covering(FACTORS))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_the_real_model_gives_the_same_bits(variant: tuple[str, str]) -> None:
    check(variant, [DEMO], covering(FACTORS))
