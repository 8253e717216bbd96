"""Qwen2ForCausalLM: the llama decoder with a bias on q, k and v, and windows in its upper layers.

Yang et al., "Qwen2 Technical Report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caldrixd.architectures.config import decoder_spec, qwen_window, windowed_layers
from caldrixd.architectures.fields import Fields
from caldrixd.spec import ModelSpec

# What an absent field means to transformers.
ABSENT = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields({**ABSENT, **config})
    size = qwen_window(fields)
    layers = windowed_layers(fields, size)
    spec = decoder_spec(fields, "Qwen2ForCausalLM", layer_types=layers)
    return replace(spec, qkv_bias=True, sliding_window=size)
