"""LlamaForCausalLM: pre-norm decoder, grouped-query attention with rope, gated SiLU feed-forward.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldrixd.architectures.config import decoder_spec, refuse_attention_bias
from caldrixd.architectures.fields import Fields
from caldrixd.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields(config)
    refuse_attention_bias(fields)
    if config.get("sliding_window") is not None:
        raise fields.unsupported("sliding_window")
    return decoder_spec(fields, "LlamaForCausalLM")
