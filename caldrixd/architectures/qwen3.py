"""Qwen3ForCausalLM: the llama decoder with a norm of each head of q and k, and a head size of its own.

Yang et al., "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caldrixd.architectures.config import decoder_spec, qwen_window, refuse_attention_bias, windowed_layers
from caldrixd.architectures.fields import MAX_HEAD_DIM, Fields
from caldrixd.spec import ModelSpec

# What an absent field means to transformers.
ABSENT = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields({**ABSENT, **config})
    refuse_attention_bias(fields)
    fields.integer("head_dim", 2, MAX_HEAD_DIM)  # not to be derived
    size = qwen_window(fields)
    layers = windowed_layers(fields, size)
    spec = decoder_spec(fields, "Qwen3ForCausalLM", layer_types=layers)
    return replace(spec, qk_norm=True, sliding_window=size)
