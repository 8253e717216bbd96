"""The two engines that are compared, behind one interface. Both hold the same bf16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from caldrixd.lanes import cpu
from caldrixd.lanes.lane import Rows
from tests.support import models

CONTEXT = 2048
CHUNK = 512
# The peer rounds activations to bf16, which can turn margins like this; a wrong model is off by units.
DOUBTFUL = 0.05
CHECKED_STEPS = 4


class Contestant(Protocol):
    def feed(self, tokens: Sequence[int], start: int) -> None:
        """Evaluate tokens at positions from `start` on; what stood there and after is forgotten."""

    def logits(self) -> npt.NDArray[np.float32]:
        """Of the last token fed: float32[vocab_size]."""


class Ours:
    """The CPU lane, called as the engine calls it: chunks of 512 rows, logits of the last row alone."""

    def __init__(self, directory: Path, threads: int) -> None:
        plan, tensors = models.opened(directory)
        self.program = cpu.load(plan, tensors, threads=threads, report=lambda code, fields: None)
        self.slot = self.program.allocate(CONTEXT)
        self.threads = threads
        self.dtype = "f32"
        self._logits = np.zeros(plan.vocab_size, np.float32)

    def feed(self, tokens: Sequence[int], start: int) -> None:
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            positions = range(start + first, start + first + len(part))
            rows = Rows([self.slot] * len(part), positions, part, [len(part) - 1])
            self._logits = self.program.step(rows, threads=self.threads, dtype=self.dtype)[0]
            self.program.commit(self.slot, positions.stop)

    def logits(self) -> npt.NDArray[np.float32]:
        return self._logits

    def close(self) -> None:
        self.program.close()


class Peer:
    """llama.cpp with all settings of its own but threads and batch; weights in memory, not mapped."""

    def __init__(self, gguf: Path, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._llama: Any = llama_cpp.Llama(
            str(gguf),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=CHUNK,
            use_mmap=False,
            verbose=False,
        )

    @property
    def system(self) -> str:
        """Its version, and what its build uses of the processor."""
        return f"{self._api.__version__} {self._api.llama_print_system_info().decode()}"

    def feed(self, tokens: Sequence[int], start: int) -> None:
        if start == 0:
            self._llama.reset()
        self._llama.n_tokens = start
        self._llama.eval(tokens)

    def logits(self) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = np.ctypeslib.as_array(
            self._api.llama_get_logits_ith(self._llama.ctx, -1), shape=(self._llama.n_vocab(),)
        )
        return found


def disagreements(ours: Contestant, peer: Contestant, reference: dict[str, Any]) -> list[str]:
    """Where the peer's greedy next token differs on the reference prompts, if ours is not a near tie.

    Both read the reference's own tokens, so one difference does not bring others.
    """
    found = []
    for prompt in reference["prompts"]:
        start, fed = 0, list(prompt["prompt_ids"])
        for step, following in enumerate(prompt["generated_ids"][:CHECKED_STEPS]):
            for contestant in (ours, peer):
                contestant.feed(fed, start)
            second, first = np.partition(ours.logits(), -2)[-2:]
            tokens = int(ours.logits().argmax()), int(peer.logits().argmax())
            if tokens[0] != tokens[1] and first - second > DOUBTFUL:
                found.append(f"{prompt['name']}, token {step}: {tokens[0]} and {tokens[1]}")
            start, fed = start + len(fed), [following]
    return found
