"""What each family adds to config.json: its fields, their defaults, and the traps in them."""

from __future__ import annotations

from typing import Any

import pytest

from caldrix_protocol.refusals import RUN
from caldrixd.architectures import FAMILIES
from caldrixd.models import gate
from caldrixd.spec import DeltaNet, Experts, ModelSpec, Rope
from tests.models.bad_values import ABSENT, BAD_FLAG, BAD_INTEGER, BAD_REAL, MISSING, refusal, show
from tests.models.conftest import CONFIG, ModelDirectory

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3, "head_dim": 6}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WITHOUT_BIAS = (MISTRAL, QWEN3, MOE, QWEN3_5)
WINDOWED = (MISTRAL, QWEN2, QWEN3, MOE)


def spec_of(model: ModelDirectory, family: dict[str, Any], **changes: Any) -> ModelSpec:
    values = {**family, **changes}
    without = tuple(name for name, value in values.items() if value is MISSING)
    model.configure(without=without, **{name: v for name, v in values.items() if v is not MISSING})
    return gate.read_spec(model.path)


def full(**text: Any) -> dict[str, Any]:
    """Changes that make a Qwen3_5ForConditionalGeneration of the base config: numbers under text_config."""
    inner = {**CONFIG, **QWEN3_5, **text}
    del inner["architectures"]
    inner = {name: value for name, value in inner.items() if value is not MISSING}
    return {
        **dict.fromkeys(CONFIG),
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"hidden_size": "whatever"},
    }


Bad = tuple[dict[str, Any], str, Any, str]  # family, field, value and the refusal's code


def bad(family: dict[str, Any], field: str, table: dict[Any, str]) -> list[Bad]:
    return [(family, field, value, code) for value, code in table.items()]


def dense_refusals() -> list[Bad]:
    rows: list[Bad] = []
    for family in WINDOWED:
        rows += bad(family, "sliding_window", BAD_INTEGER)
    for family in (QWEN2, QWEN3, MOE):
        rows += bad(family, "use_sliding_window", BAD_FLAG)
    for family in (QWEN2, QWEN3):
        rows += bad(family, "max_window_layers", {k: v for k, v in BAD_INTEGER.items() if k != 0})
        rows += [
            (family, "max_window_layers", None, "config/missing"),
            (family, "layer_types", [FULL, SLIDING, FULL], "config/unsupported"),
            (family, "layer_types", [FULL, LINEAR, FULL], "config/unsupported"),
            (family, "layer_types", [FULL, FULL], "config/range"),
            (family, "layer_types", [], "config/range"),
            (family, "layer_types", "x", "config/type"),
            (family, "layer_types", [0, 1, 2], "config/type"),
        ]
    for family in WITHOUT_BIAS:
        rows += [
            *bad(family, "attention_bias", BAD_FLAG),
            (family, "attention_bias", True, "config/attention-bias"),
        ]
    rows += [(family, "head_dim", None, "config/missing") for family in (QWEN3, QWEN3_5)]
    for family in (MISTRAL, QWEN2, QWEN3, MOE, QWEN3_5):
        rows += [*bad(family, "head_dim", BAD_INTEGER), (family, "head_dim", 3, "config/range")]
        rows += [(family, "mlp_bias", True, "config/unsupported")]
    rows += [
        (MISTRAL, "layer_types", [FULL] * 3, "config/unsupported"),
        (MOE, "layer_types", [SLIDING] * 3, "config/unsupported"),
    ]
    return rows


def expert_refusals() -> list[Bad]:
    rows: list[Bad] = []
    for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        rows += [*bad(MOE, field, BAD_INTEGER), *((MOE, field, value, "config/missing") for value in ABSENT)]
    rows += [*bad(MOE, "decoder_sparse_step", BAD_INTEGER), *bad(MOE, "norm_topk_prob", BAD_FLAG)]
    rows += [
        (MOE, "num_experts_per_tok", 5, "config/range"),
        (MOE, "num_experts", 4097, "config/range"),
        ({**MOE, "num_hidden_layers": 1024}, "num_experts", 65, "config/range"),
        (MOE, "num_local_experts", 8, "config/conflict"),
        (MOE, "num_local_experts", "8", "config/type"),
        (MOE, "mlp_only_layers", 1, "config/type"),
        (MOE, "mlp_only_layers", ["1"], "config/type"),
        (MOE, "mlp_only_layers", [True], "config/type"),
        (MOE, "mlp_only_layers", [1.0], "config/type"),
        (MOE, "mlp_only_layers", [0] * 1025, "config/type"),
        (MOE, "mlp_only_layers", [-1], "config/range"),
        (MOE, "mlp_only_layers", [3], "config/range"),
        (MOE, "mlp_only_layers", [2**63], "config/range"),
        (MOE, "mlp_only_layers", [float("nan")], "config/unreadable"),
    ]
    return rows


def delta_net_refusals() -> list[Bad]:
    rows: list[Bad] = []
    for field in (
        "full_attention_interval",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ):
        rows += [*bad(QWEN3_5, field, BAD_INTEGER), (QWEN3_5, field, None, "config/missing")]
    rows += bad(QWEN3_5, "partial_rotary_factor", BAD_REAL)
    rows += bad(QWEN3_5, "attn_output_gate", BAD_FLAG)
    rows += [
        (QWEN3_5, "attn_output_gate", False, "config/unsupported"),
        (QWEN3_5, "linear_num_value_heads", 3, "config/range"),
        (QWEN3_5, "linear_conv_kernel_dim", 1, "config/range"),
        (QWEN3_5, "partial_rotary_factor", 0.4, "config/range"),  # three of eight columns
        (QWEN3_5, "layer_types", [LINEAR, SLIDING, FULL], "config/unsupported"),
        (QWEN3_5, "layer_types", [LINEAR, FULL], "config/range"),
        (QWEN3_5, "rope_parameters", {"mrope_section": "x"}, "config/type"),
        (QWEN3_5, "rope_parameters", {"mrope_section": [1, 1, 1, 1]}, "config/type"),
        (QWEN3_5, "rope_parameters", {"mrope_interleaved": 1}, "config/type"),
        (MISTRAL, "rope_parameters", {"mrope_section": [1, 1, 1]}, "config/unsupported"),
        (QWEN2, "partial_rotary_factor", 0.5, "config/unsupported"),
        (full(), "text_config", MISSING, "config/missing"),
        (full(), "text_config", None, "config/missing"),
        (full(), "text_config", [], "config/type"),
        (full(), "text_config", "x", "config/type"),
    ]
    return rows


def show_family(value: Any) -> str:
    return (
        str(value["architectures"][0])
        if isinstance(value, dict) and "architectures" in value
        else show(value)
    )


@pytest.mark.parametrize(
    ("family", "field", "value", "code"),
    dense_refusals() + expert_refusals() + delta_net_refusals(),
    ids=show_family,
)
def test_a_bad_field_is_refused_by_name(
    model: ModelDirectory, family: dict[str, Any], field: str, value: Any, code: str
) -> None:
    refused = refusal(model, field, value, **family)
    assert (refused.code, refused.kind) == (code, RUN)
    names = value if isinstance(value, dict) and code != "config/unreadable" else (field,)
    assert all(name in refused.text for name in names)
    assert len(refused.text) < 300


YARN_BAD: dict[str, dict[Any, str]] = {
    "factor": BAD_REAL,
    "attention_factor": BAD_REAL,
    "beta_fast": BAD_REAL,
    "beta_slow": BAD_REAL,
    "mscale": BAD_REAL,
    "mscale_all_dim": BAD_REAL,
    "original_max_position_embeddings": BAD_INTEGER,
    "truncate": BAD_FLAG,
    "rope_theta": BAD_REAL,
}


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        *((field, value, code) for field, table in YARN_BAD.items() for value, code in table.items()),
        ("factor", None, "config/missing"),
        ("truncate", None, "config/type"),  # transformers takes null for false
        ("beta_fast", 0.5, "config/range"),  # below beta_slow
        ("long_factor", [1.0], "config/unsupported"),
        ("finetuned", True, "config/unsupported"),
    ],
    ids=show,
)
def test_a_bad_yarn_field_is_refused_by_name(
    model: ModelDirectory, field: str, value: Any, code: str
) -> None:
    refused = refusal(model, "rope_scaling", {**YARN, field: value})
    assert refused.code == code
    assert field in refused.text


def test_dynamic_scaling_is_refused_before_its_fields(model: ModelDirectory) -> None:
    for kind in ("dynamic", "longrope"):
        refused = refusal(model, "rope_scaling", {"long_factor": [1.0], "rope_type": kind})
        assert refused.text == f'config.json: rope_scaling.rope_type "{kind}" is not supported'


def test_numbers_of_the_text_part_are_refused_with_their_section(model: ModelDirectory) -> None:
    model.configure(**full())
    assert gate.read_spec(model.path).hidden_size == 8
    for field, value, code in (
        ("hidden_size", 0, "config/range"),
        ("linear_key_head_dim", -1, "config/range"),
        ("linear_key_head_dim", 24, "config/range"),
        ("linear_value_head_dim", 5, "config/range"),
        ("attention_bias", "x", "config/type"),
        ("quantization_config", {"quant_method": "fp8"}, "config/quantised"),
        ("auto_map", {"AutoModel": "modeling.Model"}, "config/runs-code"),
    ):
        refused = refusal(model, "rope_theta", None, **full(**{field: value}))
        assert refused.code == code
        assert f"text_config.{field}" in refused.text


@pytest.mark.parametrize(
    ("family", "changes", "window", "kinds"),
    [
        (MISTRAL, {}, 4096, [SLIDING] * 3),
        (MISTRAL, {"sliding_window": None}, 0, [FULL] * 3),
        (MISTRAL, {"sliding_window": 1}, 1, [SLIDING] * 3),
        (MISTRAL, {"sliding_window": 3, "layer_types": [SLIDING] * 3}, 3, [SLIDING] * 3),
        (QWEN2, {"sliding_window": 3}, 0, [FULL] * 3),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}, 0, [FULL] * 3),
        (QWEN2, {"use_sliding_window": True}, 4096, [FULL] * 3),
        (QWEN2, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 0, [FULL] * 3),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, 3, [SLIDING] * 3),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
            3,
            [FULL, SLIDING, SLIDING],
        ),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 70}, 3, [FULL] * 3),
        (
            QWEN3,
            {
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 1,
                "layer_types": [SLIDING, FULL, FULL],
            },
            3,
            [SLIDING, FULL, FULL],
        ),
        (MOE, {"sliding_window": 3}, 0, [FULL] * 3),
        (MOE, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}, 3, [SLIDING] * 3),
        (QWEN3_5, {}, 0, [LINEAR] * 3),
        (QWEN3_5, {"num_hidden_layers": 5}, 0, [LINEAR, LINEAR, LINEAR, FULL, LINEAR]),
        (QWEN3_5, {"full_attention_interval": 2}, 0, [LINEAR, FULL, LINEAR]),
        (QWEN3_5, {"layer_types": [FULL, LINEAR, FULL]}, 0, [FULL, LINEAR, FULL]),
    ],
    ids=show_family,
)
def test_layers_are_of_the_kind_that_transformers_takes(
    model: ModelDirectory, family: dict[str, Any], changes: dict[str, Any], window: int, kinds: list[str]
) -> None:
    spec = spec_of(model, family, **changes)
    assert list(spec.layer_types) == kinds
    assert spec.sliding_window == window
    plan = FAMILIES[spec.architecture].build(spec)
    windows = [op.params["window"] for op in plan.ops if op.kind == "attention"]
    assert windows == [window if kind == SLIDING else 0 for kind in kinds if kind != LINEAR]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Experts(4, 2, 6, False, (0, 1, 2))),
        ({"norm_topk_prob": False}, Experts(4, 2, 6, False, (0, 1, 2))),
        ({"norm_topk_prob": True}, Experts(4, 2, 6, True, (0, 1, 2))),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, Experts(4, 2, 6, False, (1,))),
        ({"mlp_only_layers": [0, 0, 2]}, Experts(4, 2, 6, False, (1,))),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, Experts(4, 2, 6, False, ())),
        ({"num_experts": MISSING, "num_local_experts": 4}, Experts(4, 2, 6, False, (0, 1, 2))),
        ({"num_local_experts": 4}, Experts(4, 2, 6, False, (0, 1, 2))),
    ],
    ids=show,
)
def test_experts_stand_in_the_layers_that_transformers_takes(
    model: ModelDirectory, changes: dict[str, Any], expected: Experts
) -> None:
    spec = spec_of(model, MOE, **changes)
    assert spec.experts == expected
    plan = FAMILIES[spec.architecture].build(spec)
    ops = [op for op in plan.ops if op.kind == "experts"]
    assert [op.weights[0].split(".")[2] for op in ops] == [str(layer) for layer in expected.layers]
    assert {bool(op.params["normalise"]) for op in ops} <= {expected.normalise}


def test_defaults_are_those_of_transformers(model: ModelDirectory) -> None:
    spec = spec_of(
        model, QWEN3_5, head_dim=MISSING, **dict.fromkeys((f for f in QWEN3_5 if "linear" in f), MISSING)
    )
    assert spec.delta_net == DeltaNet(4, 16, 32, 128, 128)
    assert spec.head_dim == 256
    assert spec.rope == Rope("default", 10000.0, 64)
    assert spec_of(model, QWEN3, head_dim=MISSING).head_dim == 128
    heads = {"num_attention_heads": 32, "hidden_size": 64, "num_key_value_heads": MISSING}
    for family, kv_heads in ((MISTRAL, 8), (QWEN2, 32), (QWEN3, 32), (MOE, 4), (QWEN3_5, 4)):
        assert spec_of(model, family, **heads).kv_heads == kv_heads
    heads["num_key_value_heads"] = None
    assert spec_of(model, MISTRAL, **heads).kv_heads == 32


def test_rope_of_a_part_of_each_head(model: ModelDirectory) -> None:
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    assert spec_of(model, QWEN3_5, rope_parameters=parameters).rope == Rope("default", 1e7, 2)
    half = {**parameters, "partial_rotary_factor": 0.5}
    assert spec_of(model, QWEN3_5, rope_parameters=half).rope == Rope("default", 1e7, 4)
    assert spec_of(model, QWEN3_5, partial_rotary_factor=1.0).rope == Rope("default", 1e4, 8)
    assert spec_of(model, QWEN3_5, partial_rotary_factor=None).rope == Rope("default", 1e4, 8)


@pytest.mark.parametrize(
    ("changes", "attention_factor"),
    [
        # 0.1 ln 4 + 1
        ({}, 1.138629436111989),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.707}, 1.138629436111989),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.138629436111989 / 1.0693147180559945),
        ({"factor": 1.0}, 1.0),
    ],
    ids=show,
)
def test_the_attention_factor_of_yarn(
    model: ModelDirectory, changes: dict[str, Any], attention_factor: float
) -> None:
    rope = spec_of(model, MISTRAL, rope_scaling={**YARN, **changes}).rope
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_yarn_is_read_in_every_spelling(model: ModelDirectory) -> None:
    expected = Rope("yarn", 1e4, 4, 4.0, original_context=64, attention_factor=1.138629436111989)
    old = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert spec_of(model, MISTRAL, rope_scaling=YARN).rope == expected
    assert spec_of(model, MISTRAL, rope_scaling=old).rope == expected
    assert spec_of(model, MISTRAL, rope_parameters={**YARN, "rope_theta": 1e4}).rope == expected
    # Absent: what stands beside the section, or the context itself.
    short = {"type": "yarn", "factor": 4}
    assert spec_of(model, MISTRAL, rope_scaling=short).rope == expected
    beside = spec_of(model, MISTRAL, rope_scaling=short, original_max_position_embeddings=32).rope
    assert beside.original_context == 32
    refused = refusal(model, "original_max_position_embeddings", 32, rope_scaling=YARN)
    assert refused.code == "config/conflict"
    fast = {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    rope = spec_of(model, MISTRAL, rope_scaling=fast).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)


@pytest.mark.parametrize("family", [MISTRAL, QWEN2, QWEN3, MOE, QWEN3_5], ids=show_family)
@pytest.mark.parametrize("tie", [True, False, None, MISSING], ids=show)
def test_the_head_is_tied_as_the_config_says(model: ModelDirectory, family: dict[str, Any], tie: Any) -> None:
    spec = spec_of(model, family, tie_word_embeddings=tie)
    assert spec.tied is (tie is True)
    head = FAMILIES[spec.architecture].build(spec).ops[-1].weights
    assert head == (("model.embed_tokens.weight",) if spec.tied else ("lm_head.weight",))


@pytest.mark.parametrize("outer", [True, False, MISSING], ids=show)
@pytest.mark.parametrize("inner", [True, False, MISSING], ids=show)
def test_the_outer_word_on_the_head_counts(model: ModelDirectory, outer: Any, inner: Any) -> None:
    changes = full(tie_word_embeddings=inner)
    spec = spec_of(model, changes, tie_word_embeddings=outer)
    assert spec.tied is ((inner is True) if outer is MISSING else outer)
    head = FAMILIES[spec.architecture].build(spec).ops[-1].weights
    assert head == (("model.language_model.embed_tokens.weight",) if spec.tied else ("lm_head.weight",))


@pytest.mark.parametrize(
    ("family", "hidden", "heads", "head_dim"),
    [
        (QWEN3, 2560, 32, 128),  # Qwen3-4B
        (MISTRAL, 5120, 32, 128),  # Mistral Nemo
        (MOE, 2048, 32, 128),  # Qwen3-30B-A3B
    ],
    ids=show_family,
)
def test_an_explicit_head_dim_wins(
    model: ModelDirectory, family: dict[str, Any], hidden: int, heads: int, head_dim: int
) -> None:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "num_key_value_heads": 4,
    }
    spec = spec_of(model, family, **sizes)
    shapes = {weight.name: weight.shape for weight in FAMILIES[spec.architecture].build(spec).weights}
    attention = "model.layers.0.self_attn"
    assert shapes[f"{attention}.q_proj.weight"] == (heads * head_dim, hidden)
    assert shapes[f"{attention}.k_proj.weight"] == (4 * head_dim, hidden)
    assert shapes[f"{attention}.o_proj.weight"] == (hidden, heads * head_dim)


def test_the_shapes_of_a_gated_delta_net(model: ModelDirectory) -> None:
    spec = spec_of(model, QWEN3_5, full_attention_interval=2)
    shapes = {weight.name: weight.shape for weight in FAMILIES[spec.architecture].build(spec).weights}
    expected = {
        "linear_attn.A_log": (4,),
        "linear_attn.conv1d.weight": (256, 1, 4),
        "linear_attn.dt_bias": (4,),
        "linear_attn.in_proj_a.weight": (4, 8),
        "linear_attn.in_proj_b.weight": (4, 8),
        "linear_attn.in_proj_qkv.weight": (2 * 2 * 16 + 4 * 48, 8),
        "linear_attn.in_proj_z.weight": (192, 8),
        "linear_attn.norm.weight": (48,),
        "linear_attn.out_proj.weight": (8, 192),
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    own = {name: shape for name, shape in shapes.items() if ".layers.0." in name}
    assert own == {f"model.layers.0.{name}": shape for name, shape in expected.items()}
    # Of each head of q_proj the second half is its gate.
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (2 * 2 * 8, 8)


def test_a_delta_net_as_the_last_layer_gathers_before_its_projection(model: ModelDirectory) -> None:
    spec = spec_of(model, QWEN3_5)
    ops = FAMILIES[spec.architecture].build(spec).ops
    last = max(i for i, op in enumerate(ops) if op.kind == "gated_rmsnorm")
    assert [op.kind for op in ops[last : last + 5]] == ["gated_rmsnorm", "gather", "linear", "gather", "add"]


def test_end_tokens_of_both_parts_count(model: ModelDirectory) -> None:
    assert spec_of(model, full(eos_token_id=[2, 3]), eos_token_id=4).eos_ids == (2, 3, 4)
