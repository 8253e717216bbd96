"""Reads how positions are rotated: every spelling of the field, every kind that is known."""

from __future__ import annotations

from decimal import Context, Decimal

from caldrix_protocol.refusals import Refused
from caldrixd.architectures.fields import MAX_CONTEXT, MAX_HEAD_DIM, Fields
from caldrixd.spec import Rope

DEFAULT_THETA = 10000.0
THETA = (1.001, 1e12)
FACTOR = (1e-6, 1e6)

# What a section may hold: in every kind, and in each.
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
# With text alone the three axes of mrope are one, and it is plain rope.
_AXES = {"mrope_section", "mrope_interleaved"}
_KINDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope(fields: Fields, head_dim: int, max_context: int, *, partial: bool = False) -> Rope:
    """`rope_scaling` of transformers 4 or `rope_parameters` of transformers 5; `type` or `rope_type`.

    `partial` says whether the family may rotate a part of each head, and knows mrope. Refused
    "config/..." by field name.
    """
    section = _one_of(fields.section("rope_scaling"), fields.section("rope_parameters"))
    kind = section.word("rope_type", section.word("type", "default"))
    if section.word("type", kind) != kind:
        raise Refused("config/conflict", field=f"{section.prefix}type", other=f"{section.prefix}rope_type")
    if kind not in _KINDS:
        raise section.unsupported("rope_type" if section.values.get("rope_type") is not None else "type")
    known = _COMMON | _KINDS[kind] | (_AXES if partial else set())
    for name, value in section.values.items():
        if name not in known and value is not None:
            raise section.unsupported(name[:60])
    if partial:
        section.items("mrope_section", int, "a list of integers", 3)
        section.flag("mrope_interleaved", False)
    theta = section.real("rope_theta", *THETA, fields.real("rope_theta", *THETA, DEFAULT_THETA))
    rotary_dim = _rotary_dim(fields, section, head_dim, partial)
    if kind == "linear":
        return Rope(kind, theta, rotary_dim, section.real("factor", *FACTOR))
    if kind == "llama3":
        return _llama3(section, theta, rotary_dim, _original_context(fields, section))
    if kind == "yarn":
        return _yarn(section, theta, rotary_dim, _original_context(fields, section, max_context))
    return Rope(kind, theta, rotary_dim)


def _one_of(scaling: Fields | None, parameters: Fields | None) -> Fields:
    if scaling is not None and parameters is not None and scaling.values != parameters.values:
        raise Refused("config/conflict", field="rope_scaling", other="rope_parameters")
    return scaling or parameters or Fields({}, "rope_scaling.")


def _rotary_dim(fields: Fields, section: Fields, head_dim: int, partial: bool) -> int:
    place = section if section.values.get("partial_rotary_factor") is not None else fields
    factor = place.real("partial_rotary_factor", 0.0, 1.0, 1.0)
    if not partial and factor != 1.0:
        raise place.unsupported("partial_rotary_factor")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 2 <= rotary_dim <= MAX_HEAD_DIM:
        expected = f"a share of head_dim ({head_dim}) that is even and at least 2"
        raise place.refused("config/range", "partial_rotary_factor", expected)
    return rotary_dim


def _original_context(fields: Fields, section: Fields, default: int | None = None) -> int:
    """The context before scaling, in the section or beside it."""
    name = "original_max_position_embeddings"
    beside = fields.integer(name, 1, MAX_CONTEXT, 0)
    context = section.integer(name, 1, MAX_CONTEXT, beside or default)
    if beside not in (0, context):
        raise Refused("config/conflict", field=f"{section.prefix}{name}", other=f"{fields.prefix}{name}")
    return context


def _llama3(section: Fields, theta: float, rotary_dim: int, original_context: int) -> Rope:
    low = section.real("low_freq_factor", *FACTOR)
    high = section.real("high_freq_factor", *FACTOR)
    if not low < high:
        raise section.refused("config/range", "high_freq_factor", f"above low_freq_factor ({low:g})")
    return Rope(
        "llama3",
        theta,
        rotary_dim,
        factor=section.real("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=original_context,
    )


def _yarn(section: Fields, theta: float, rotary_dim: int, original_context: int) -> Rope:
    if section.values.get("truncate", True) is None:  # transformers takes null for false
        raise section.refused("config/type", "truncate", "true or false")
    fast = section.real("beta_fast", *FACTOR, 32.0)
    slow = section.real("beta_slow", *FACTOR, 1.0)
    if not slow <= fast:
        raise section.refused("config/range", "beta_fast", f"at least beta_slow ({slow:g})")
    factor = section.real("factor", 1.0, 1e6)
    return Rope(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_context=original_context,
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.flag("truncate", True),
        attention_factor=_attention_factor(section, factor),
    )


def _attention_factor(section: Fields, factor: float) -> float:
    """As in the paper, 0.1 ln(factor) + 1; with both mscales a ratio of two such terms."""
    both = [section.real(name, *FACTOR, 0.0) for name in ("mscale", "mscale_all_dim")]
    if section.values.get("attention_factor") is not None:
        return section.real("attention_factor", *FACTOR)
    if all(both):
        return _stretch(factor, both[0]) / _stretch(factor, both[1])
    return _stretch(factor, 1.0)


def _stretch(factor: float, scale: float) -> float:
    # Rounded correctly, unlike the system's logarithm: the same float everywhere.
    return 0.1 * scale * float(Context(prec=40).ln(Decimal(factor))) + 1.0
