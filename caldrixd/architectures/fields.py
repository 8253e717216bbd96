"""Reads the fields of config.json: every value is typed, bounded and refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from caldrix_protocol.refusals import Refused
from caldrixd.spec import ModelSpec, Rope

MAX_VOCABULARY = 1 << 21
MAX_HIDDEN = 1 << 16
MAX_INTERMEDIATE = 1 << 18
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_EOS_IDS = 64
DEFAULT_THETA = 10000.0

_ROPE_FIELDS = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


_Value = TypeVar("_Value")


def excerpt(value: Any) -> str:
    """A JSON value as a refusal shows it: one short line of ASCII."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Fields:
    """A JSON object with typed readers. null counts as absent; `prefix` stands before names in refusals."""

    values: Mapping[str, Any]
    prefix: str = ""

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) is not int:
            raise self.refused("config/type", name, "an integer")
        if not low <= value <= high:
            raise self.refused("config/range", name, f"an integer from {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) not in (int, float):
            raise self.refused("config/type", name, "a number")
        if not low <= value <= high:  # also false for NaN
            raise self.refused("config/range", name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refused("config/type", name, "true or false")
        return value

    def word(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) is not str:
            raise self.refused("config/type", name, "text")
        return value

    def section(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.refused("config/type", name, "an object")
        return Fields(value, f"{self.prefix}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; absent is ()."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if type(value) is list else [value]
        if len(items) > MAX_EOS_IDS or any(type(item) is not int for item in items):
            raise self.refused("config/type", name, "a token id or a list of token ids")
        if not all(0 <= item < MAX_VOCABULARY for item in items):
            raise self.refused("config/range", name, f"at least 0 and below {MAX_VOCABULARY}")
        return tuple(dict.fromkeys(items))

    def unsupported(self, name: str) -> Refused:
        return Refused("config/unsupported", field=self.prefix + name, value=excerpt(self.values.get(name)))

    def _absent(self, name: str, default: _Value | None) -> _Value:
        if default is None:
            raise Refused("config/missing", field=self.prefix + name)
        return default

    def refused(self, code: str, name: str, expected: str) -> Refused:
        value = excerpt(self.values.get(name))
        return Refused(code, field=self.prefix + name, expected=expected, value=value)


def decoder_spec(
    config: Mapping[str, Any], architecture: str, *, qkv_bias: bool, tied_default: bool
) -> ModelSpec:
    """The spec of a llama-like decoder from its config.json. Refused "config/..." by field name."""
    fields = Fields(config)
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    context = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    vocabulary = fields.integer("vocab_size", 1, MAX_VOCABULARY)
    if fields.word("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act")
    _refuse_partial_layers(fields)
    head_dim = _head_dim(fields, hidden, heads)
    bos_ids = [token for token in fields.token_ids("bos_token_id") if token < vocabulary]
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        heads=heads,
        kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-12, 0.1),
        rope=_rope(fields, head_dim),
        max_context=context,
        tied=fields.flag("tie_word_embeddings", tied_default),
        qkv_bias=qkv_bias,
        eos_ids=fields.token_ids("eos_token_id"),
        bos_id=bos_ids[0] if bos_ids else None,
    )


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


def _refuse_partial_layers(fields: Fields) -> None:
    """Layers that attend over a part of the context are listed one by one in `layer_types`."""
    kinds = fields.values.get("layer_types")
    if kinds is not None and (type(kinds) is not list or any(kind != "full_attention" for kind in kinds)):
        raise fields.unsupported("layer_types")


def _rope(fields: Fields, head_dim: int) -> Rope:
    """`rope_scaling` of transformers 4 or `rope_parameters` of transformers 5; `type` or `rope_type`."""
    section = _one_of(fields.section("rope_scaling"), fields.section("rope_parameters"))
    for name, value in section.values.items():
        if name not in _ROPE_FIELDS and value is not None:
            raise section.unsupported(name[:60])
    kind = section.word("rope_type", section.word("type", "default"))
    if section.word("type", kind) != kind:
        raise Refused("config/conflict", field=f"{section.prefix}type", other=f"{section.prefix}rope_type")
    for place in (section, fields):
        if place.real("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise place.unsupported("partial_rotary_factor")
    theta = section.real("rope_theta", 1.0, 1e12, fields.real("rope_theta", 1.0, 1e12, DEFAULT_THETA))
    if kind == "default":
        return Rope(kind, theta, head_dim)
    if kind == "linear":
        return Rope(kind, theta, head_dim, section.real("factor", 1.0, 1e6))
    if kind == "llama3":
        return _llama3(section, theta, head_dim)
    raise section.unsupported("rope_type" if section.values.get("rope_type") is not None else "type")


def _one_of(scaling: Fields | None, parameters: Fields | None) -> Fields:
    if scaling is not None and parameters is not None and scaling.values != parameters.values:
        raise Refused("config/conflict", field="rope_scaling", other="rope_parameters")
    return scaling or parameters or Fields({}, "rope_scaling.")


def _llama3(section: Fields, theta: float, head_dim: int) -> Rope:
    low = section.real("low_freq_factor", 1e-6, 1e6)
    high = section.real("high_freq_factor", 1e-6, 1e6)
    if not low < high:
        raise section.refused("config/range", "high_freq_factor", f"above low_freq_factor ({low:g})")
    return Rope(
        "llama3",
        theta,
        head_dim,
        factor=section.real("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=section.integer("original_max_position_embeddings", 1, MAX_CONTEXT),
    )
