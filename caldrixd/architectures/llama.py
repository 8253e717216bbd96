"""LlamaForCausalLM: pre-norm decoder, grouped-query attention with rope, gated SiLU feed-forward.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.blocks import decoder
from caldrixd.architectures.fields import Fields, decoder_spec, optional_flag
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec

# `lm_head.weight` counts only where the plan has no use for it: a tied head wins over a stored one.
IGNORED = (".self_attn.rotary_emb.inv_freq", "lm_head.weight")


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    if optional_flag(config, "attention_bias", False):
        raise Refused("config/attention-bias")
    if optional_flag(config, "mlp_bias", False):
        raise Refused("config/unsupported", field="mlp_bias", value="true")
    if config.get("sliding_window") is not None:
        raise Fields(config).unsupported("sliding_window")
    return decoder_spec(config, "LlamaForCausalLM", qkv_bias=False, tied_default=False)


def build(spec: ModelSpec) -> Plan:
    return decoder(spec)
