"""Qwen3MoeForCausalLM: Qwen3 with a mixture of experts in place of most feed-forwards.

Yang et al., "Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.config import (
    FULL,
    SLIDING,
    decoder_spec,
    qwen_window,
    refuse_attention_bias,
    uniform_layers,
)
from caldrixd.architectures.fields import MAX_INTERMEDIATE, MAX_LAYERS, Fields
from caldrixd.spec import Experts, ModelSpec

MAX_EXPERTS = 4096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 16

# "mlp.experts.gate_up_proj" [experts, 2 * width, hidden] is "mlp.experts.N.gate_proj.weight" and up_proj.
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

# What an absent field means to transformers.
ABSENT = {"num_key_value_heads": 4, "sliding_window": 4096, "norm_topk_prob": False, "decoder_sparse_step": 1}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    fields = Fields({**ABSENT, **config})
    refuse_attention_bias(fields)
    size = qwen_window(fields)
    layers = uniform_layers(fields, SLIDING if size else FULL)
    spec = decoder_spec(fields, "Qwen3MoeForCausalLM", layer_types=layers)
    return replace(spec, qk_norm=True, sliding_window=size, experts=_experts(fields, len(layers)))


def _experts(fields: Fields, layers: int) -> Experts:
    count = _count(fields, layers)
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS)
    dense = fields.items("mlp_only_layers", int, "a list of layer numbers", MAX_LAYERS) or ()
    if any(not 0 <= layer < layers for layer in dense):
        raise fields.refused("config/range", "mlp_only_layers", f"layer numbers from 0 to {layers - 1}")
    return Experts(
        count=count,
        top_k=fields.integer("num_experts_per_tok", 1, count),
        width=fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE),
        normalise=fields.flag("norm_topk_prob", False),
        layers=tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0),
    )


def _count(fields: Fields, layers: int) -> int:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.values.get(name) is not None]
    most = max(1, min(MAX_EXPERTS, MAX_EXPERTS_OF_ALL_LAYERS // layers))
    counts = {fields.integer(name, 1, most) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise Refused("config/conflict", field=names[0], other=names[1])
    return counts.pop()
