"""config.json and generation_config.json: every trap is a refusal that names its field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.refusals import RUN, Refused
from caldrixd import json_file
from caldrixd.architectures import FAMILIES
from caldrixd.models import gate
from caldrixd.spec import ModelSpec, Rope
from tests.models.bad_values import (
    ABSENT,
    BAD_FLAG,
    BAD_IDS,
    BAD_INTEGER,
    BAD_REAL,
    MISSING,
    refusal,
    show,
)
from tests.models.conftest import CONFIG, ModelDirectory
from tests.support.models import tiny

REQUIRED_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def refusals() -> list[tuple[str, Any, str]]:
    table: list[tuple[str, Any, str]] = []
    for field in REQUIRED_INTEGERS:
        table += [(field, value, "config/missing") for value in ABSENT]
        table += [(field, *row) for row in BAD_INTEGER.items()]
    for field in ("num_key_value_heads", "head_dim"):
        table += [(field, *row) for row in BAD_INTEGER.items()]
    table += [("rms_norm_eps", value, "config/missing") for value in ABSENT]
    for field in ("rms_norm_eps", "rope_theta"):
        table += [(field, *row) for row in BAD_REAL.items()]
    for field in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        table += [(field, *row) for row in BAD_FLAG.items()]
    for field in ("eos_token_id", "bos_token_id"):
        table += [(field, *row) for row in BAD_IDS.items()]
    table += [
        ("eos_token_id", [2, "3"], "config/type"),
        ("eos_token_id", [2, -3], "config/range"),
        ("eos_token_id", list(range(1000)), "config/type"),
        ("hidden_act", "gelu", "config/unsupported"),
        ("hidden_act", 1, "config/type"),
        ("attention_bias", True, "config/attention-bias"),
        ("mlp_bias", True, "config/unsupported"),
        ("sliding_window", 4, "config/unsupported"),
        ("layer_types", ["sliding_attention"], "config/unsupported"),
        ("layer_types", "full_attention", "config/type"),
        ("layer_types", [1], "config/type"),
        ("layer_types", ["full_attention"] * 2, "config/range"),
        ("head_dim", 3, "config/range"),
        ("hidden_size", 9, "config/range"),
        ("partial_rotary_factor", 0.5, "config/unsupported"),
        ("rope_scaling", "linear", "config/type"),
        ("rope_scaling", [], "config/type"),
        ("rope_parameters", 1, "config/type"),
        ("auto_map", {"AutoModel": "modeling.Model"}, "config/runs-code"),
        ("model_file", "model.py", "config/runs-code"),
        ("quantization_config", {"quant_method": "fp8"}, "config/quantised"),
        ("quantization_config", {}, "config/quantised"),
        ("transformers_weights", "other.safetensors", "config/weights-file"),
    ]
    return table


@pytest.mark.parametrize(("field", "value", "code"), refusals(), ids=show)
def test_a_bad_field_is_refused_by_name(model: ModelDirectory, field: str, value: Any, code: str) -> None:
    refused = refusal(model, field, value)
    assert refused.code == code
    assert refused.kind == RUN
    assert field in refused.text
    assert len(refused.text) < 300


def rope_refusals() -> list[tuple[dict[str, Any], str, str]]:
    table: list[tuple[dict[str, Any], str, str]] = []
    for field in ("factor", "low_freq_factor", "high_freq_factor"):
        table += [({**LLAMA3, field: value}, field, code) for value, code in BAD_REAL.items()]
    field = "original_max_position_embeddings"
    table += [({**LLAMA3, field: value}, field, code) for value, code in BAD_INTEGER.items()]
    for field in sorted(LLAMA3.keys() - {"rope_type"}):
        table += [({**LLAMA3, field: None}, field, "config/missing")]
        table += [({name: value for name, value in LLAMA3.items() if name != field}, field, "config/missing")]
    for kind in ("dynamic", "longrope", "mrope", "su", "proportional", ""):
        table += [({"rope_type": kind, "factor": 2.0}, "rope_type", "config/unsupported")]
        table += [({"type": kind, "factor": 2.0}, "rope_scaling.type", "config/unsupported")]
    table += [
        ({"rope_type": 1}, "rope_type", "config/type"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "rope_type", "config/conflict"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor", "config/range"),
        ({"type": "linear"}, "factor", "config/missing"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast", "config/unsupported"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention", "config/unsupported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary", "config/unsupported"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta", "config/range"),
    ]
    return table


@pytest.mark.parametrize(("scaling", "field", "code"), rope_refusals(), ids=show)
def test_a_bad_rope_field_is_refused_by_name(
    model: ModelDirectory, scaling: dict[str, Any], field: str, code: str
) -> None:
    model.configure(rope_scaling=scaling)
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    assert caught.value.code == code
    assert field in caught.value.text


def rope_of(model: ModelDirectory, **changes: Any) -> Rope:
    model.configure(**changes)
    return gate.read_spec(model.path).rope


def test_rope_is_read_in_every_spelling(model: ModelDirectory) -> None:
    assert rope_of(model) == Rope("default", 10000.0, 4)
    assert rope_of(model, rope_theta=None) == Rope("default", 10000.0, 4)
    assert rope_of(model, rope_scaling={}) == Rope("default", 10000.0, 4)
    linear = Rope("linear", 500.0, 4, factor=2.0)
    assert rope_of(model, rope_theta=500, rope_scaling={"type": "linear", "factor": 2}) == linear
    assert rope_of(model, rope_theta=500, rope_scaling={"rope_type": "linear", "factor": 2.0}) == linear
    v5 = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert rope_of(model, rope_parameters=v5) == linear
    assert rope_of(model, rope_parameters=v5, rope_scaling=v5) == linear
    llama3 = Rope("llama3", 10000.0, 4, 8.0, 1.0, 4.0, 32)
    assert rope_of(model, rope_scaling=LLAMA3) == llama3
    assert rope_of(model, rope_scaling={**LLAMA3, "type": "llama3"}) == llama3


def test_two_rope_tables_that_disagree_are_refused(model: ModelDirectory) -> None:
    model.configure(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=LLAMA3)
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    assert caught.value.code == "config/conflict"


@pytest.mark.parametrize(
    ("architectures", "code", "words"),
    [
        (None, "config/architectures-count", "exactly one is required"),
        ([], "config/architectures-count", "exactly one is required"),
        (["LlamaForCausalLM"] * 2, "config/architectures-count", "exactly one is required"),
        ("LlamaForCausalLM", "config/type", "architectures"),
        ([1], "config/type", "architectures"),
        (["GPT2LMHeadModel"], "config/architecture", "unsupported architectures entry GPT2LMHeadModel"),
        (["x" * 10**5], "config/architecture", "unsupported architectures entry xxx"),
        (["\x1b]52;c;QQ==\x07"], "config/architecture", "\\u001b]52"),
    ],
    ids=show,
)
def test_architectures_entry(model: ModelDirectory, architectures: Any, code: str, words: str) -> None:
    model.configure(architectures=architectures)
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    assert caught.value.code == code
    assert words in caught.value.text
    assert caught.value.text.isprintable()


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "config/unreadable", "it is empty"),
        (b" \n", "config/unreadable", "it is empty"),
        (b"{", "config/unreadable", "it was cut short: download it again"),
        (b"{]", "config/unreadable", "it is not JSON: line 1, column 2"),
        (b'{"a": tr}', "config/unreadable", "it is not JSON: line 1, column 7"),
        (b'{"a": 1,\n "b": "\\uZZ"}', "config/unreadable", "it is not JSON: line 2, column 9"),
        (b"yes", "config/unreadable", "it is not JSON: line 1, column 1"),
        (b"version https://git-lfs.github.com/spec/v1", "config/unreadable", "run git lfs pull"),
        (b"<!DOCTYPE html>", "config/unreadable", "it is a web page"),
        (b"\xff\xfe{\0}\0", "config/unreadable", "it is not UTF-8 text"),
        (b"[]", "config/not-an-object", "config.json"),
        (b"null", "config/not-an-object", "config.json"),
        (b'{"a": ' + b"[" * 100_000, "config/unreadable", "nested too deeply"),
        (b'{"a":' * 100_000, "config/unreadable", "nested too deeply"),
        (b"\xef\xbb\xbf{}", "config/unreadable", "it begins with a byte order mark"),
        (b'{"a": 1, "a": 2}', "config/unreadable", "a stands in it twice"),
        (b'{"a": {"b": 1, "b": 1}}', "config/unreadable", "b stands in it twice"),
        (b'{"a": "\\ud800"}', "config/unreadable", "surrogate"),
        (b'{"\\udc00": 1}', "config/unreadable", "surrogate"),
        (b'{"a": ["\\udc00"]}', "config/unreadable", "surrogate"),
        (b'{"a": Infinity}', "config/unreadable", "a is not a finite number"),
        (b'{"a": [-Infinity]}', "config/unreadable", "a is not a finite number"),
        (b'{"a": 1e999}', "config/unreadable", "a is not a finite number"),
        (b'{"a": "\xff"}', "config/unreadable", "it is not UTF-8 text"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config/unreadable", "a number in it has 5000 digits"),
        (b'{"a": 1}x', "config/unreadable", "it is not JSON: line 1, column 9"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "config/too-big", "1048576"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_traps_of_json_itself(model: ModelDirectory, content: bytes, code: str, words: str) -> None:
    model.write("config.json", content)
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    assert caught.value.code == code
    assert words in caught.value.text


def test_bytes_that_would_have_to_be_waited_for_are_an_error() -> None:
    """As a read of some files of /proc, which are regular files by their type."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with open(reader, "rb") as file, open(writer, "wb", buffering=0) as other:
        with pytest.raises(OSError, match="temporarily unavailable"):
            json_file.read(file, 4)
        other.write(b"text")
        assert json_file.read(file, 4) == b"text"


def test_a_config_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    for make in (Path.mkdir, os.mkfifo):
        make(tmp_path / "config.json")
        with pytest.raises(Refused) as caught:
            gate.read_spec(tmp_path)
        assert caught.value.code == "config/unreadable"
        (tmp_path / "config.json").rename(tmp_path / make.__name__)
    with pytest.raises(Refused) as caught:
        gate.read_spec(tmp_path)
    assert caught.value.text == "config.json cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, MISSING, (2,)),
        (2, None, (2,)),
        (2, 2, (2,)),
        (2, [3, 2, 4], (2, 3, 4)),
        ([5, 6], 7, (5, 6, 7)),
        (None, [3], (3,)),
        (None, MISSING, ()),
        (0, MISSING, (0,)),
    ],
)
def test_eos_ids_are_the_union_of_both_files(
    model: ModelDirectory, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    model.configure(eos_token_id=config)
    if generation is not MISSING:
        model.write("generation_config.json", json.dumps({"eos_token_id": generation}))
    assert gate.read_spec(model.path).eos_ids == expected


@pytest.mark.parametrize("content", ['{"eos_token_id": "2"}', '{"eos_token_id": [-1]}', "{", "[]"])
def test_a_bad_generation_config_is_refused_by_its_name(model: ModelDirectory, content: str) -> None:
    model.write("generation_config.json", content)
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    assert caught.value.code.startswith("config/")
    assert caught.value.text.startswith("generation_config.json")


def test_defaults_of_what_is_absent(model: ModelDirectory) -> None:
    model.configure(without=("num_key_value_heads", "hidden_act", "bos_token_id", "eos_token_id"))
    spec = gate.read_spec(model.path)
    assert (spec.kv_heads, spec.head_dim, spec.tied, spec.bos_id, spec.eos_ids) == (2, 4, False, None, ())


@pytest.mark.parametrize("bos", [16, 10**6])
def test_a_bos_id_outside_the_vocabulary_is_none(model: ModelDirectory, bos: int) -> None:
    model.configure(bos_token_id=bos)
    assert gate.read_spec(model.path).bos_id is None


def test_an_explicit_head_dim_wins(model: ModelDirectory) -> None:
    model.configure(head_dim=6)
    spec = gate.read_spec(model.path)
    shapes = {weight.name: weight.shape for weight in FAMILIES[spec.architecture].build(spec).weights}
    assert spec.head_dim == 6
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (12, 8)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (6, 8)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (8, 12)


def test_qwen2_has_biases_on_q_k_and_v_whatever_the_field_says(model: ModelDirectory) -> None:
    for bias in (None, False, True):
        model.configure(architectures=["Qwen2ForCausalLM"], sliding_window=4, attention_bias=bias)
        spec = gate.read_spec(model.path)
        biases = [
            weight.name for weight in FAMILIES[spec.architecture].build(spec).weights if "bias" in weight.name
        ]
        assert biases == [f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkv"]
        assert spec.sliding_window == 0


def test_the_tiny_models_are_read_as_they_are() -> None:
    assert gate.read_spec(tiny("tiny-llama-v5-config")) == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        layer_types=("full_attention",) * 2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope=Rope("llama3", 500000.0, 32, 8.0, 1.0, 4.0, 256),
        max_context=2048,
        tied=False,
        eos_ids=(2,),
        bos_id=1,
    )
    assert gate.read_spec(tiny("tiny-llama-rope-scaled")) == gate.read_spec(tiny("tiny-llama-v5-config"))
    assert gate.read_spec(tiny("tiny-llama")).tied
    assert gate.read_spec(tiny("tiny-qwen2")).qkv_bias


def test_the_base_config_of_these_tests_is_accepted(model: ModelDirectory) -> None:
    assert gate.read_spec(model.path).hidden_size == CONFIG["hidden_size"]
