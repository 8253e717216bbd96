"""Serves the same prompts in every manner there is, and tells the bits: one process for each kind of kernels.

Run as a program it reads a job as JSON from standard input, {"kernels", "isa", "dtype", "models":
[{"directory", "first", "second"}], "cells": [[threads, chunk, batch, cache]]}, and prints what `serve` gives
for each model and cell.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from caldrixd.engine.engine import Engine, Request
from caldrixd.lanes.lane import Program
from caldrixd.lanes.variant import settle
from tests.support import models, recorded
from tests.support.recorded import Recorded

Prompt = Sequence[int]

REPLY = 6
CTX = 256
# Tokens of the first turn and of what the second one adds. The longest passes an attention block of 128.
LENGTHS = ((100, 30), (5, 3), (31, 40), (1, 1), (40, 2), (17, 30), (64, 7), (23, 64))


class Cell(NamedTuple):
    """One manner of serving: `chunk` prompt rows a step, `batch` requests at once, `cache` see `serve`."""

    threads: int
    chunk: int
    batch: int
    cache: str


CACHES = ("cold", "hit", "cancel")


class Answer(NamedTuple):
    """A digest of the logits behind each token, and how many tokens of the prompt the cache held."""

    digest: str
    cached: int


def engine_of(program: Recorded, chunk: int) -> Engine:
    """An engine whose steps take as many rows as they may, since for its clock none takes any time."""
    return Engine(cast(Program, program), prefill_chunk=chunk, clock=lambda: 0.0)


def turn(
    engine: Engine,
    program: Recorded,
    prompts: Sequence[Prompt],
    threads: int,
    dtype: str,
    cancelled: Sequence[int] = (),
) -> list[Answer]:
    """Answers the prompts, each submitted one step after the one before.

    The first is cancelled and submitted again in the step after each number of steps that `cancelled` has.
    """
    requests = [
        Request(id, tuple(prompt), CTX, REPLY, threads=threads, dtype=dtype)
        for id, prompt in enumerate(prompts)
    ]
    digests, cached = [hashlib.sha256() for _ in prompts], [0 for _ in prompts]
    waiting, left, steps = list(requests), list(cancelled), 0
    while waiting or engine.busy:
        if waiting:
            engine.submit(waiting.pop(0))
        breaking = bool(left) and steps == left[0]
        if breaking:
            program.break_off = lambda: engine.cancel(0)
        for event, logits in program.take(engine.step()):
            digests[event.id].update(logits.tobytes())
            cached[event.id] = event.usage.cached_tokens
        steps += 1
        if breaking:
            del left[0]
            program.break_off = None
            steps, digests[0] = 0, hashlib.sha256()
            engine.submit(requests[0])
    return [Answer(digest.hexdigest(), count) for digest, count in zip(digests, cached, strict=True)]


def serve(
    program: Recorded, first: Sequence[Prompt], second: Sequence[Prompt], cell: Cell, dtype: str = "f32"
) -> list[list[Answer]]:
    """The answers to the second prompts, for each time they are given to the end.

    `cold`: with an empty cache. `hit`: after the first prompts, which they continue, and once more.
    `cancel`: after the first of them was cancelled at every step of its prompt and at every token.
    """
    engine = engine_of(program, cell.chunk)
    first, second = first[: cell.batch], second[: cell.batch]
    if cell.cache == "hit":
        turn(engine, program, first, cell.threads, dtype)
        rounds = [turn(engine, program, second, cell.threads, dtype) for _ in range(2)]
    elif cell.cache == "cancel":
        steps = [1] * -(-len(second[0]) // cell.chunk) + list(range(1, REPLY))
        rounds = [turn(engine, program, second, cell.threads, dtype, [0, *steps])]
    else:
        rounds = [turn(engine, program, second, cell.threads, dtype)]
    program.release_all()
    return rounds


def prompts(program: Recorded) -> tuple[list[list[int]], list[list[int]]]:
    """First prompts, and second ones: a first prompt, the reply to it and some more."""
    rng = np.random.default_rng(11)
    engine = engine_of(program, 64)
    firsts, seconds = [], []
    for id, (length, more) in enumerate(LENGTHS):
        first = rng.integers(0, 512, length).tolist()
        engine.submit(Request(id, tuple(first), CTX, REPLY))
        reply = []
        while engine.busy:
            reply += [event.token for event, _ in program.take(engine.step()) if event.token is not None]
        firsts.append(first)
        seconds.append([*first, *reply, *rng.integers(0, 512, more).tolist()])
    program.release_all()
    return firsts, seconds


def main() -> None:
    job = json.load(sys.stdin)
    variant = settle(job["isa"], job["kernels"], os.environ)
    results = []
    for model in job["models"]:
        program = recorded.load(*models.opened(Path(model["directory"])), variant, os.environ)
        first, second = model["first"], model["second"]
        results.append([serve(program, first, second, Cell(*cell), job["dtype"]) for cell in job["cells"]])
        program.close()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
