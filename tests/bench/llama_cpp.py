"""llama.cpp by its C interface, so that no Python of its binding is measured with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.contestants import CHUNK, CONTEXT, Logits

NAME = "llama.cpp"


class LlamaCpp:
    """A GGUF file in memory, not mapped. All settings but threads, batch and sequences are its own defaults.

    `sequences` is how many `feed_rows` may be given, each of up to `client_context` tokens.
    """

    name = NAME

    def __init__(self, gguf: Path, *, sequences: int, client_context: int) -> None:
        import llama_cpp
        import llama_cpp._logger

        self._api: Any = llama_cpp
        llama_cpp._logger.set_verbose(False)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {gguf}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._threads = 1
        self._sequences, self._client_context = sequences, client_context
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self._alone = self._context(CONTEXT, 1)

    @cached_property
    def _together(self) -> Any:
        return self._context(self._sequences * self._client_context, self._sequences)

    def _context(self, tokens: int, sequences: int) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = tokens, CHUNK, sequences
        context = self._api.llama_init_from_model(self._model, settings)
        if not context:
            raise RuntimeError("llama.cpp makes no context")
        return context

    @property
    def system(self) -> str:
        """Its version, and what its build uses of the processor."""
        return f"{NAME} {self._api.__version__} {self._api.llama_print_system_info().decode()}"

    def use(self, threads: int) -> None:
        self._threads = threads

    def feed(self, tokens: Sequence[int], start: int) -> None:
        self._forget(self._alone, 0, start)
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            positions = range(start + first, start + first + len(part))
            self._decode(self._alone, [0] * len(part), positions, part, [len(part) - 1])

    def feed_rows(self, sequences: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """One token for each of some sequences, with logits for each."""
        for sequence, position in zip(sequences, positions, strict=True):
            self._forget(self._together, sequence, position)
        self._decode(self._together, sequences, positions, tokens, range(len(tokens)))

    def _forget(self, context: Any, sequence: int, position: int) -> None:
        memory = self._api.llama_get_memory(context)
        self._api.llama_memory_seq_rm(memory, sequence, position, -1)

    def _decode(
        self,
        context: Any,
        sequences: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, positions[row]
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequences[row]
            batch.logits[row] = 0
        for row in wanted:
            batch.logits[row] = 1
        self._api.llama_set_n_threads(context, self._threads, self._threads)
        status = self._api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")

    def logits(self) -> Logits:
        address = self._api.llama_get_logits_ith(self._alone, -1)
        found: Logits = np.ctypeslib.as_array(address, shape=(self._vocab_size,))
        return found

    def close(self) -> None:
        self._api.llama_free(self._alone)
        if "_together" in self.__dict__:
            self._api.llama_free(self._together)
        self._api.llama_batch_free(self._batch)
        self._api.llama_model_free(self._model)
