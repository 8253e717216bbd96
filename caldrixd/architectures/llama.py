"""LlamaForCausalLM: pre-norm decoder, grouped-query attention with rope, gated SiLU feed-forward.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.blocks import decoder
from caldrixd.architectures.fields import Fields, decoder_spec
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields(config)
    if fields.flag("attention_bias", False):
        raise Refused("config/attention-bias")
    if fields.flag("mlp_bias", False):
        raise fields.unsupported("mlp_bias")
    if config.get("sliding_window") is not None:
        raise fields.unsupported("sliding_window")
    return decoder_spec(config, "LlamaForCausalLM", qkv_bias=False, tied_default=False)


def build(spec: ModelSpec) -> Plan:
    return decoder(spec)
