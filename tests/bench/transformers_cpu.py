"""transformers on the CPU, in the dtype the weights are stored in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.bench.contestants import Logits

NAME = "transformers"


class Transformers:
    """A model directory as `AutoModelForCausalLM` loads it."""

    name = NAME

    def __init__(self, directory: Path, dtype: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        self._torch, self._library = torch, transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval()
        self._cache: Any = None
        self._logits: Any = None

    @property
    def system(self) -> str:
        """Versions, and the processor level its kernels use."""
        level = self._torch.backends.cpu.get_cpu_capability()
        return f"{NAME} {self._library.__version__} torch {self._torch.__version__} {level}"

    def use(self, threads: int) -> None:
        self._torch.set_num_threads(threads)

    def feed(self, tokens: Sequence[int], start: int) -> None:
        if start == 0 or self._cache is None:
            self._cache = self._library.DynamicCache(config=self._model.config)
        elif surplus := self._cache.get_seq_length() - start:
            # A number of tokens to remove; a length is not understood by all versions.
            self._cache.crop(-surplus)
        with self._torch.inference_mode(), warnings.catch_warnings():
            # Its own names change from version to version; the older one is understood by all.
            warnings.simplefilter("ignore", FutureWarning)
            self._logits = self._model(
                input_ids=self._torch.tensor([list(tokens)]),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[0, -1]

    def logits(self) -> Logits:
        found: Logits = self._logits.float().numpy()
        return found

    def close(self) -> None:
        self._model = self._cache = None
