"""Reads what the config.json of every decoder holds; families add what is their own."""

from __future__ import annotations

from collections.abc import Sequence

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.fields import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCABULARY,
    Fields,
)
from caldrixd.architectures.rope import read_rope
from caldrixd.spec import ModelSpec

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def decoder_spec(
    fields: Fields,
    architecture: str,
    *,
    layer_types: Sequence[str] | None = None,
    partial_rotary: bool = False,
) -> ModelSpec:
    """The spec of a llama-like decoder, without a bias and with full attention in every layer.

    `layer_types` is for families with other layers. Refused "config/..." by field name.
    """
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    vocabulary = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    if fields.word("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act")
    if fields.flag("mlp_bias", False):
        raise fields.unsupported("mlp_bias")
    head_dim = _head_dim(fields, hidden, heads)
    if layer_types is None:
        layer_types = uniform_layers(fields, FULL)
    bos_ids = [token for token in fields.token_ids("bos_token_id") if token < vocabulary]
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        layer_types=tuple(layer_types),
        heads=heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-12, 0.1),
        rope=read_rope(fields, head_dim, context, partial=partial_rotary),
        max_context=context,
        tied=fields.flag("tie_word_embeddings", False),
        eos_ids=fields.token_ids("eos_token_id"),
        bos_id=bos_ids[0] if bos_ids else None,
    )


def refuse_attention_bias(fields: Fields) -> None:
    """For families whose projections have no bias here, whatever else the field could ask for."""
    if fields.flag("attention_bias", False):
        raise Refused("config/attention-bias")


def uniform_layers(fields: Fields, kind: str) -> tuple[str, ...]:
    """The same for every layer; a `layer_types` that says otherwise is refused."""
    expected = (kind,) * layer_count(fields)
    listed = listed_layers(fields, len(expected), (FULL, SLIDING, LINEAR))
    if listed not in (None, expected):
        raise fields.unsupported("layer_types")
    return expected


def listed_layers(fields: Fields, layers: int, known: Sequence[str]) -> tuple[str, ...] | None:
    """`layer_types`, one of the `known` for each layer; None where it is absent."""
    listed = fields.items("layer_types", str, f"a list of {layers} names", MAX_LAYERS)
    if listed is None:
        return None
    if any(kind not in known for kind in listed):
        raise fields.unsupported("layer_types")
    if len(listed) != layers:
        raise fields.refused("config/range", "layer_types", f"a list of {layers} names")
    return listed


def window(fields: Fields) -> int:
    """`sliding_window` in tokens; null is 0, no window."""
    if fields.values.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", 1, MAX_CONTEXT)


def qwen_window(fields: Fields) -> int:
    """`sliding_window` where `use_sliding_window` says so, else 0."""
    size = window(fields)
    return size if fields.flag("use_sliding_window", False) else 0


def windowed_layers(fields: Fields, size: int) -> tuple[str, ...]:
    """Qwen's windows: `layer_types`, or from layer `max_window_layers` on."""
    layers = layer_count(fields)
    first = fields.integer("max_window_layers", 0, MAX_LAYERS)
    listed = listed_layers(fields, layers, (FULL, SLIDING))
    if listed is None:
        return tuple(SLIDING if size and layer >= first else FULL for layer in range(layers))
    if SLIDING in listed and not size:
        raise fields.unsupported("layer_types")
    return listed


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.values.get("head_dim") is None and hidden % heads:
        raise fields.refused("config/range", "hidden_size", f"a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden // heads)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        expected = f"even and from 2 to {MAX_HEAD_DIM} (now {head_dim})"
        raise fields.refused("config/range", "head_dim", expected)
    return head_dim


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise fields.refused(
            "config/range", "num_key_value_heads", f"a divisor of num_attention_heads ({heads})"
        )
    return kv_heads
