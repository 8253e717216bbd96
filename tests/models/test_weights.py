"""Which files are the weights, and whether their tensors are the plan's."""

from __future__ import annotations

import errno
import json
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.numpy import save_file

from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES
from caldrixd.models import files, gate, header, weights
from tests.models.conftest import CONFIG, ModelDirectory
from tests.support.hostile import HOSTILE_NAMES, TWINS
from tests.support.models import TINY, tiny

INDEX = "model.safetensors.index.json"


def check(model: ModelDirectory) -> weights.Checkpoint:
    spec = gate.read_spec(model.path)
    family = FAMILIES[spec.architecture]
    checkpoint = weights.open_checkpoint(model.path, family.stacked)
    checkpoint.check(family.build(spec), family.ignored, architecture=spec.architecture)
    return checkpoint


def refused(model: ModelDirectory) -> Refused:
    with pytest.raises(Refused) as caught:
        check(model)
    return caught.value


def write_index(model: ModelDirectory, files: dict[str, str]) -> None:
    model.write(INDEX, json.dumps({"metadata": {}, "weight_map": files}))


def split(model: ModelDirectory, *names: str) -> dict[str, str]:
    """Spread the weights over files; the weight map of an index for them."""
    tensors = model.tensors()
    files = {tensor: names[index % len(names)] for index, tensor in enumerate(tensors)}
    for name in names:
        model.write_weights({key: value for key, value in tensors.items() if files[key] == name}, name)
    return files


def test_one_file_is_read_with_its_values(model: ModelDirectory) -> None:
    model.write_weights()
    checkpoint = check(model)
    written = model.tensors()
    assert checkpoint.size == sum(array.nbytes for array in written.values())
    for name, array in written.items():
        tensor = checkpoint.tensors[name]
        assert tensor.dtype == "F32"
        assert tensor.data.view(np.float32).reshape(array.shape).tolist() == array.tolist()


@pytest.mark.parametrize("name", TINY)
def test_the_tiny_models_fit_their_plans(name: str) -> None:
    check(ModelDirectory(tiny(name)))


def test_a_file_that_is_cut_once_its_header_is_read(
    model: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.write_weights()

    def cutting(file: BinaryIO, name: str, size: int) -> tuple[int, dict[str, header.Entry]]:
        found = header.read_header(file, name, size)
        os.truncate(model.path / name, 100)
        return found

    monkeypatch.setattr(weights, "read_header", cutting)
    assert refused(model).text == "model.safetensors was changed while it was read; run the command again"


def test_the_single_file_wins_over_index_and_strays(model: ModelDirectory) -> None:
    model.write_weights()
    model.write("stray.safetensors", b"garbage")
    write_index(model, {"x": "missing.safetensors"})
    assert files.weight_files(model.path) == ("model.safetensors",)
    check(model)


def test_the_index_wins_over_strays(model: ModelDirectory) -> None:
    files = split(model, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    model.write("stray.safetensors", b"garbage")
    write_index(model, files)
    assert set(check(model).tensors) == set(model.tensors())


def test_without_an_index_every_file_is_read(model: ModelDirectory) -> None:
    split(model, "a.safetensors", "b.safetensors", "c.safetensors")
    assert set(check(model).tensors) == set(model.tensors())


def test_a_missing_shard_is_named(model: ModelDirectory) -> None:
    files = split(model, "model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
    write_index(model, files)
    for name in ("model-1.safetensors", "model-3.safetensors"):
        (model.path / name).unlink()
    text = refused(model).text
    assert (
        text == f"{INDEX} names weight file(s) that are not present: model-1.safetensors, model-3.safetensors"
    )


def test_an_index_key_without_its_tensor_matters_only_if_needed(model: ModelDirectory) -> None:
    files = split(model, "model-1.safetensors")
    write_index(model, {**files, "more": "model-1.safetensors"})
    check(model)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_an_index_names_bare_file_names_only(model: ModelDirectory, name: str) -> None:
    write_index(model, {"a": name})
    caught = refused(model)
    assert caught.code == "weights/index-name"
    assert caught.text.startswith(INDEX)
    assert "which is not a bare file name" in caught.text
    assert caught.text.isprintable()


def test_an_index_of_names_that_are_one_file_on_some_disks(model: ModelDirectory) -> None:
    write_index(model, dict(zip("ab", TWINS, strict=True)))
    caught = refused(model)
    assert caught.code == "weights/index-invalid"
    assert all(name in caught.text for name in TWINS)


def test_a_link_that_leads_out_says_nothing_of_what_it_leads_to(model: ModelDirectory) -> None:
    secret = model.path / "secret"
    secret.write_text('{"password": "hunter2"}' * 9)
    model.path.joinpath("x.safetensors").symlink_to(secret)
    write_index(model, {"a": "x.safetensors"})
    caught = refused(model)
    assert caught.code == "weights/header"
    assert "hunter2" not in caught.text


def test_without_an_index_only_bare_names_count(tmp_path: Path) -> None:
    names = ("b.safetensors", "a.safetensors", "sub/x.safetensors", ".x.safetensors", "x.bin", "safetensors")
    assert files.choose(tmp_path, names) == ("a.safetensors", "b.safetensors")
    for name in ("ｘ.safetensors", "C:\\x.safetensors", "x\0.safetensors", "x" * 300 + ".safetensors"):
        with pytest.raises(Refused) as caught:
            files.choose(tmp_path, ("a.safetensors", name))
        assert caught.value.text.endswith("its name is not a bare file name")


def test_an_index_that_a_link_has_lost_is_named(model: ModelDirectory) -> None:
    split(model, "a.safetensors", "b.safetensors")
    (model.path / INDEX).symlink_to("nowhere")
    caught = refused(model)
    assert (caught.code, caught.fields["path"]) == ("model/not-readable", str(model.path / INDEX))


def test_a_listing_is_enough_to_choose_from(model: ModelDirectory) -> None:
    write_index(model, {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    listed = (INDEX, "1.safetensors", "2.safetensors", "stray.safetensors")
    assert files.choose(model.path, listed) == ("1.safetensors", "2.safetensors")
    assert files.choose(model.path, (*listed, "model.safetensors")) == ("model.safetensors",)
    with pytest.raises(Refused) as caught:
        files.choose(model.path, (INDEX, "2.safetensors"))
    assert caught.value.text == f"{INDEX} names weight file(s) that are not present: 1.safetensors"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ('{"weight_map": {}}', "weights/index-names-none"),
        ("{}", "weights/index-invalid"),
        ('{"weight_map": []}', "weights/index-invalid"),
        ('{"weight_map": {"a": 1}}', "weights/index-invalid"),
        ("[]", "config/not-an-object"),
        ("{", "config/unreadable"),
        (
            json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(4097)}}),
            "weights/index-invalid",
        ),
        (" " * ((16 << 20) + 1), "config/too-big"),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_index_is_refused_by_its_name(model: ModelDirectory, content: str, code: str) -> None:
    model.write(INDEX, content)
    caught = refused(model)
    assert caught.code == code
    assert caught.text.startswith(INDEX)


def test_a_directory_without_safetensors(model: ModelDirectory) -> None:
    text = refused(model).text
    assert text.endswith("has no *.safetensors; inferno reads safetensors only")
    model.write("pytorch_model.bin", b"x")
    assert refused(model).text == f"{text}, and pytorch_model.bin is a pickled file of PyTorch"


def test_one_tensor_in_two_files_is_refused(model: ModelDirectory) -> None:
    model.write_weights(name="a.safetensors")
    model.write_weights(name="b.safetensors")
    caught = refused(model)
    assert caught.code == "weights/duplicate-tensor"
    assert "a.safetensors" in caught.text
    assert "b.safetensors" in caught.text


@pytest.mark.parametrize("tie", [True, False, None])
@pytest.mark.parametrize("head", [True, False])
def test_the_head_is_tied_as_the_config_says(model: ModelDirectory, tie: bool | None, head: bool) -> None:
    model.configure(tie_word_embeddings=tie)
    tensors = model.tensors()
    tensors.pop("lm_head.weight", None)
    if head:
        tensors["lm_head.weight"] = np.zeros((16, 8), np.float32)
    model.write_weights(tensors)
    if tie or head:
        check(model)
    else:
        assert refused(model).text == "the checkpoint lacks the tensor lm_head.weight"


def test_every_tensor_is_used_or_refused_by_name(model: ModelDirectory) -> None:
    for extra in ("model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.up_proj.weight_scale_inv"):
        model.write_weights({**model.tensors(), extra: np.zeros(8, np.float32)})
        assert (
            refused(model).text
            == f"the checkpoint has the tensor {extra}, which LlamaForCausalLM does not use"
        )
    ignored = "model.layers.0.self_attn.rotary_emb.inv_freq"
    model.write_weights({**model.tensors(), ignored: np.zeros(2, np.float32)})
    check(model)


def test_every_missing_tensor_is_named(model: ModelDirectory) -> None:
    whole = model.tensors()
    for name in whole:
        model.write_weights({key: value for key, value in whole.items() if key != name})
        caught = refused(model)
        assert (caught.code, caught.fields["name"]) == ("weights/missing-tensor", name)


def test_every_shape_is_checked(model: ModelDirectory) -> None:
    whole = model.tensors()
    for name, array in whole.items():
        model.write_weights({**whole, name: np.zeros((*array.shape[:-1], array.shape[-1] + 1), np.float32)})
        caught = refused(model)
        assert (caught.code, caught.fields["name"]) == ("weights/shape", name)
    model.write_weights({**whole, "model.norm.weight": np.zeros((1, 8), np.float32)})
    assert refused(model).text == "tensor model.norm.weight has shape [1, 8]; config.json says [8]"


@pytest.mark.parametrize(("kind", "accepted"), [("f2", True), ("f4", True), ("f8", False), ("i1", False)])
def test_every_dtype_is_checked(model: ModelDirectory, kind: str, accepted: bool) -> None:
    model.write_weights({name: array.astype(kind) for name, array in model.tensors().items()})
    if accepted:
        check(model)
    else:
        assert refused(model).code == "weights/dtype"


MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


def stacked(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The experts of layer 0 as transformers holds them: gates over ups of each, and downs."""
    whole = {name: array for name, array in tensors.items() if ".experts." not in name}
    each = [f"model.layers.0.mlp.experts.{expert}" for expert in range(4)]
    whole["model.layers.0.mlp.experts.gate_up_proj"] = np.stack(
        [np.concatenate([tensors[f"{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in each]
    )
    whole["model.layers.0.mlp.experts.down_proj"] = np.stack([tensors[f"{e}.down_proj.weight"] for e in each])
    return whole


def test_stacked_experts_are_offered_one_by_one(model: ModelDirectory) -> None:
    model.configure(**MOE)
    apart = model.tensors()
    whole = stacked(apart)
    model.write_weights(whole)
    checkpoint = check(model)
    assert set(checkpoint.tensors) == set(apart)
    for name, array in apart.items():
        tensor = checkpoint.tensors[name]
        assert tensor.shape == array.shape
        assert tensor.data.view(np.float32).reshape(array.shape).tolist() == array.tolist()
    assert checkpoint.size == sum(array.nbytes for array in whole.values())


@pytest.mark.parametrize(
    ("shape", "code", "name"),
    [
        ((4, 12, 9), "weights/shape", "experts.0.gate_proj.weight"),
        ((4, 14, 8), "weights/shape", "experts.0.gate_proj.weight"),
        ((4, 11, 8), "weights/unknown-tensor", "experts.gate_up_proj"),
        ((4, 96), "weights/unknown-tensor", "experts.gate_up_proj"),
        ((0, 12, 8), "weights/unknown-tensor", "experts.gate_up_proj"),
        ((4, 0, 8), "weights/unknown-tensor", "experts.gate_up_proj"),
        ((5000, 2, 1), "weights/unknown-tensor", "experts.gate_up_proj"),
        ((5, 12, 8), "weights/unknown-tensor", "experts.4.gate_proj.weight"),
        ((3, 12, 8), "weights/missing-tensor", "experts.3.gate_proj.weight"),
    ],
)
def test_stacked_experts_of_another_shape_are_refused(
    model: ModelDirectory, shape: tuple[int, ...], code: str, name: str
) -> None:
    model.configure(**MOE)
    tensors = stacked(model.tensors())
    model.write_weights({**tensors, "model.layers.0.mlp.experts.gate_up_proj": np.zeros(shape, np.float32)})
    caught = refused(model)
    assert (caught.code, caught.fields["name"]) == (code, f"model.layers.0.mlp.{name}")


def test_an_expert_that_stands_there_twice_is_refused(model: ModelDirectory) -> None:
    model.configure(**MOE)
    apart = model.tensors()
    model.write_weights(apart, "a.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    model.write_weights({name: stacked(apart)[name]}, "b.safetensors")
    assert refused(model).code == "weights/duplicate-tensor"


def test_only_a_family_with_experts_has_stacked_ones(model: ModelDirectory) -> None:
    name = "model.layers.0.mlp.down_proj"
    model.write_weights({**model.tensors(), name: np.zeros((4, 8, 6), np.float32)})
    assert refused(model).fields["name"] == name


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        # One byte an item with a scale beside it, and eight four-bit items in an int32.
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", "model.layers.0.mlp.up_proj.weight_scale_inv"),
        ("model.layers.0.mlp.up_proj.qweight", "I32", "model.layers.0.mlp.up_proj.qweight"),
        ("model.layers.0.mlp.up_proj.weight", "I8", "model.layers.0.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "F4", "model.embed_tokens.weight"),
    ],
)
def test_quantised_tensors_are_refused_by_name(
    model: ModelDirectory, name: str, dtype: str, expected: str
) -> None:
    tensors = model.tensors()
    if name.endswith("qweight"):
        del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors[name] = tensors.get(name, np.zeros((12, 8), np.float32))
    write_as(model, tensors, {name: dtype})
    caught = refused(model)
    assert caught.fields["name"] == expected
    assert caught.code == ("weights/unknown-tensor" if dtype == "F32" else "weights/dtype")


def write_as(model: ModelDirectory, tensors: dict[str, np.ndarray[Any, Any]], dtypes: dict[str, str]) -> None:
    """Weights of zeros whose header gives some tensors another dtype."""
    sizes = {"F8_E4M3": 1, "I8": 1}
    header, at = {}, 0
    for name, array in tensors.items():
        dtype = dtypes.get(name, "F32")
        end = at + array.size * sizes.get(dtype, 4)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    model.write("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(at))


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_what_is_not_text_is_left_out_by_name(model: ModelDirectory, architecture: str) -> None:
    small = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    small |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 16)
    text = {**CONFIG, **small}
    model.configure(**{**text, "architectures": [architecture], "text_config": text})
    tensors = model.tensors()
    extra = np.zeros(3, np.float32)
    model.write_weights({**tensors, "mtp.fc.weight": extra, "model.visual.blocks.0.norm1.bias": extra})
    check(model)
    for name in ("model.mtp.fc.weight", "visual.blocks.0.norm1.bias", "model.layers.0.mlp.gate.weight"):
        model.write_weights({**tensors, name: extra})
        assert refused(model).fields["name"] == name


def test_tensors_are_aligned_wherever_the_file_has_them(tmp_path: Path) -> None:
    save_file({"a": np.arange(6, dtype=np.float32)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    header += b" " * (-(len(header) + 8) % 4 + 1)
    moved = len(header).to_bytes(8, "little") + header + content[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(moved)
    data = weights.open_checkpoint(tmp_path).tensors["a"].data
    assert data.ctypes.data % 4 == 0
    assert data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert not data.flags.writeable


def test_a_map_that_finds_no_memory_is_no_fault_of_the_file(
    model: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    model.write_weights(model.tensors())
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(MemoryError):
        check(model)


def test_weights_that_are_no_regular_file(model: ModelDirectory) -> None:
    (model.path / "model.safetensors").mkdir()
    caught: Any = refused(model)
    assert caught.code == "weights/header"
