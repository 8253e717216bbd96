"""A complete small model directory that tests change as they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from caldrixd.architectures import FAMILIES
from caldrixd.models import gate

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 16,
}


class ModelDirectory:
    """A directory with a config.json, and weights that fit it once `write_weights` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def configure(self, *, without: tuple[str, ...] = (), **changes: Any) -> None:
        config = {name: value for name, value in (CONFIG | changes).items() if name not in without}
        self.write("config.json", json.dumps(config))

    def write(self, name: str, content: str | bytes) -> None:
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Float32 tensors for every weight of the plan, each with values of its own."""
        spec = gate.read_spec(self.path)
        plan = FAMILIES[spec.architecture].build(spec)
        return {
            weight.name: np.arange(np.prod(weight.shape), dtype=np.float32).reshape(weight.shape) + index
            for index, weight in enumerate(plan.weights)
        }

    def write_weights(
        self, tensors: dict[str, np.ndarray[Any, Any]] | None = None, name: str = "model.safetensors"
    ) -> None:
        save_file(self.tensors() if tensors is None else tensors, self.path / name)


@pytest.fixture
def model(tmp_path: Path) -> ModelDirectory:
    directory = ModelDirectory(tmp_path)
    directory.configure()
    return directory
