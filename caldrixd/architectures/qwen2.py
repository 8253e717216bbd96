"""Qwen2ForCausalLM: the llama decoder with a bias on q, k and v.

Yang et al., "Qwen2 Technical Report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.blocks import decoder
from caldrixd.architectures.fields import decoder_spec, optional_flag
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec

# `lm_head.weight` counts only where the plan has no use for it: a tied head wins over a stored one.
IGNORED = (".self_attn.rotary_emb.inv_freq", "lm_head.weight")


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    if optional_flag(config, "use_sliding_window", False):
        raise Refused("config/unsupported", field="use_sliding_window", value="true")
    return decoder_spec(config, "Qwen2ForCausalLM", qkv_bias=True, tied_default=False)


def build(spec: ModelSpec) -> Plan:
    return decoder(spec)
