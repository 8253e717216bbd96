"""Qwen3_5ForCausalLM and the text part of Qwen3_5ForConditionalGeneration: gated delta nets, and a gated
attention in every fourth layer.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); Qiu et al.,
"Gated Attention for Large Language Models" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.config import (
    FULL,
    LINEAR,
    decoder_spec,
    layer_count,
    listed_layers,
    refuse_attention_bias,
)
from caldrixd.architectures.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Fields
from caldrixd.spec import DeltaNet, ModelSpec

MAX_TAPS = 64
VECTOR = 16

# What an absent field means to transformers.
ABSENT = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    return _text_spec(Fields({**ABSENT, **config}), "Qwen3_5ForCausalLM")


def read_full_config(config: Mapping[str, Any]) -> ModelSpec:
    """The numbers stand under `text_config`; of `tie_word_embeddings` the outer one counts."""
    root = Fields(config)
    section = root.section("text_config")
    if section is None:
        raise Refused("config/missing", field="text_config")
    text = replace(section, values={**ABSENT, **section.values})
    spec = _text_spec(text, "Qwen3_5ForConditionalGeneration")
    return replace(
        spec,
        prefix="model.language_model",
        tied=root.flag("tie_word_embeddings", spec.tied),
        eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *root.token_ids("eos_token_id")))),
    )


def _text_spec(fields: Fields, architecture: str) -> ModelSpec:
    refuse_attention_bias(fields)
    if not fields.flag("attn_output_gate", True):
        raise fields.unsupported("attn_output_gate")
    fields.integer("head_dim", 2, MAX_HEAD_DIM)  # not to be derived
    spec = decoder_spec(fields, architecture, layer_types=_layer_types(fields), partial_rotary=True)
    return replace(spec, qk_norm=True, attention_gate=True, norm_offset=1.0, delta_net=_delta_net(fields))


def _layer_types(fields: Fields) -> tuple[str, ...]:
    layers = layer_count(fields)
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS)
    listed = listed_layers(fields, layers, (FULL, LINEAR))
    return listed or tuple(LINEAR if (n + 1) % interval else FULL for n in range(layers))


def _head_dim(fields: Fields, name: str) -> int:
    """The delta rule's kernels take whole vectors of numbers."""
    value = fields.integer(name, VECTOR, MAX_HEAD_DIM)
    if value % VECTOR:
        raise fields.refused("config/range", name, f"a multiple of {VECTOR}, from {VECTOR} to {MAX_HEAD_DIM}")
    return value


def _delta_net(fields: Fields) -> DeltaNet:
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS)
    if value_heads % key_heads:
        expected = f"a multiple of linear_num_key_heads ({key_heads})"
        raise fields.refused("config/range", "linear_num_value_heads", expected)
    return DeltaNet(
        taps=fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=_head_dim(fields, "linear_key_head_dim"),
        value_dim=_head_dim(fields, "linear_value_head_dim"),
    )
