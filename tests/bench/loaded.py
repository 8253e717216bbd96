"""One model in one stored format, in every engine that is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from caldrix_kernels.intrinsics.vector import HAS_BF16
from caldrixd.lanes import cpu
from caldrixd.lanes.arena import Arena
from caldrixd.lanes.lane import Variant
from tests.bench import gguf_file, machine, work
from tests.bench.contestants import Contestant, Ours, unlike
from tests.bench.figures import Case, Figure, Measure, figure, interleaved
from tests.bench.llama_cpp import LlamaCpp
from tests.bench.targets import DOT_LIMIT, LIMITED, LLAMA_CPP, MULTIPLY_LIMIT, TRANSFORMERS, targets
from tests.bench.transformers_cpu import Transformers
from tests.support import models

MOST_CLIENTS = 8
CLIENT_CONTEXT = 256
TOKENS = 2000
CHECKED_PROMPTS = 4
DTYPES = ("f32", "bf16")
# The packages each peer needs.
REQUIREMENTS = {LLAMA_CPP: ("llama_cpp", "gguf"), TRANSFORMERS: ("torch", "transformers")}

Speed = Callable[[Contestant], float]


def say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


@dataclass(frozen=True)
class Effort:
    """Most rounds of a comparison, its seconds (asked for each), and the most threads."""

    rounds: int
    seconds: Callable[[], float]
    threads: int


class Loaded:
    """`ours` is one program in both arithmetics; `peers` are those that were found to be the same model."""

    def __init__(self, directory: Path, name: str, weights: str, gguf: Path, effort: Effort) -> None:
        self.name, self.weights, self.effort = name, weights, effort
        self.directory = directory
        self._gguf = gguf
        self._exits = ExitStack()
        self.failed = False
        self.plan, self.tensors = models.opened(directory)

    @cached_property
    def tokens(self) -> list[int]:
        """Any tokens will do: what they are does not change the work."""
        highest = min(40000, self.plan.vocab_size)
        drawn = np.random.default_rng(0).integers(min(100, highest // 4), highest, TOKENS)
        return [int(token) for token in drawn]

    @cached_property
    def program(self) -> cpu.CpuProgram:
        # "auto" would quietly take C where numba fails.
        program = self.load(Variant(kernels="numba"))
        say(f"{self.name}: {program.settings}")
        return program

    def load(self, variant: Variant) -> cpu.CpuProgram:
        """The model with some compiled code, closed with this object."""
        program = cpu.load(
            self.plan,
            self.tensors,
            threads=self.effort.threads,
            report=lambda *_: None,
            variant=variant,
            environment=os.environ,
        )
        self._exits.callback(program.close)
        return program

    @cached_property
    def ours(self) -> Mapping[str, Ours]:
        return {dtype: Ours(self.program, dtype) for dtype in DTYPES}

    @cached_property
    def peers(self) -> Mapping[str, Any]:
        """Contestants by name."""
        found = {}
        for name, requirements in REQUIREMENTS.items():
            missing = [module for module in requirements if importlib.util.find_spec(module) is None]
            if missing:
                say(f"no {name}: {' and '.join(missing)} not installed")
                continue
            peer = self._peer(name)
            if peer is None:
                continue
            self._exits.callback(peer.close)
            say(f"peer: {peer.system}")
            wrong = unlike(self.ours["f32"], peer, self._prompts())
            if wrong:
                say(f"{name} computes another model, so it is not compared with: {'; '.join(wrong)}")
                self.failed = True
                continue
            found[name] = peer
        return found

    def _peer(self, name: str) -> LlamaCpp | Transformers | None:
        if name == TRANSFORMERS:
            return Transformers(self.directory, self.weights)
        obstacle = gguf_file.obstacle(self.directory)
        if obstacle:
            say(f"no {name}: {obstacle}")
            return None
        path = gguf_file.cached(self.directory, self._gguf)
        return LlamaCpp(path, sequences=MOST_CLIENTS, client_context=CLIENT_CONTEXT)

    def _prompts(self) -> list[list[int]]:
        """Those of the tests for the demo model, else any tokens."""
        if self.name == "demo":
            recorded = models.reference("smollm2-135m-instruct")["prompts"]
            return [list(prompt["prompt_ids"]) for prompt in recorded[:CHECKED_PROMPTS]]
        return [self.tokens[length : 3 * length] for length in (4, 8, 16, 32)]

    @cached_property
    def _memory(self) -> Arena:
        return machine.filled(work.weight_bytes(self.plan, self.tensors) or 0)

    def read_limit(self, threads: int, position: int) -> Measure | None:
        """Measures decode steps a second at `position` if reading its weights and state were all."""
        size = work.weight_bytes(self.plan, self.tensors)
        if size is None:
            return None
        measure = machine.read_bandwidth(self._memory, threads)
        needed = size + self.plan.kv_bytes(position) + self.plan.recurrent_bytes
        return lambda: measure() * 1e9 / needed

    def multiply_limits(self, threads: int, tokens: int) -> dict[str, Measure]:
        """Measure prompt tokens a second if multiplying and adding were all, for each arithmetic."""
        needed = work.operations(self.plan, tokens)
        if needed is None:
            return {}
        peaks = {MULTIPLY_LIMIT: machine.multiply_peak(threads)}
        if HAS_BF16 and self.weights == "bf16":
            peaks[DOT_LIMIT] = machine.multiply_peak(threads, dot=True)
        return {name: partial(_tokens_a_second, peak, needed / tokens) for name, peak in peaks.items()}

    def case(self, arithmetic: str, threads: int) -> Case:
        return Case(self.name, self.weights, arithmetic, threads)

    def compare(
        self, name: str, speed: Speed, threads: int, limits: Mapping[str, Measure | None]
    ) -> Iterator[Figure]:
        """A figure of each arithmetic of ours beside the peers and the limits, all of them interleaved."""
        contestants = {**self.ours, **self.peers}
        measures = {label: timed(engine, threads, speed) for label, engine in contestants.items()}
        measures |= {label: measure for label, measure in limits.items() if measure is not None}
        found = interleaved(measures, self.effort.rounds, self.effort.seconds())
        others = {label: series for label, series in found.items() if label not in self.ours}
        for dtype in self.ours:
            case = self.case(dtype, threads)
            promised = targets(name, case, self.effort.threads)
            beside = {key: series for key, series in others.items() if LIMITED.get(key, dtype) == dtype}
            yield figure(name, case, found[dtype], beside, targets=promised)

    def close(self) -> None:
        self._exits.close()


def _tokens_a_second(peak: Measure, operations: float) -> float:
    """By GFLOP/s and the operations of one token."""
    return peak() * 1e9 / operations


def timed(engine: Contestant, threads: int, speed: Speed) -> Measure:
    def measure() -> float:
        engine.use(threads)
        return speed(engine)

    return measure
