"""Qwen2ForCausalLM: the llama decoder with a bias on q, k and v.

Yang et al., "Qwen2 Technical Report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldrixd.architectures.blocks import decoder
from caldrixd.architectures.fields import Fields, decoder_spec
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields(config)
    if fields.flag("use_sliding_window", False):
        raise fields.unsupported("use_sliding_window")
    return decoder_spec(config, "Qwen2ForCausalLM", qkv_bias=True, tied_default=False)


def build(spec: ModelSpec) -> Plan:
    return decoder(spec)
