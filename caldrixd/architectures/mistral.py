"""MistralForCausalLM: the llama decoder with attention over a sliding window, or over everything.

Jiang et al., "Mistral 7B" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caldrixd.architectures.config import (
    FULL,
    SLIDING,
    decoder_spec,
    refuse_attention_bias,
    uniform_layers,
    window,
)
from caldrixd.architectures.fields import Fields
from caldrixd.spec import ModelSpec

# What an absent field means to transformers; null is no window.
ABSENT = {"num_key_value_heads": 8, "sliding_window": 4096}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields({**ABSENT, **config})
    refuse_attention_bias(fields)
    size = window(fields)
    layers = uniform_layers(fields, SLIDING if size else FULL)
    return replace(decoder_spec(fields, "MistralForCausalLM", layer_types=layers), sliding_window=size)
