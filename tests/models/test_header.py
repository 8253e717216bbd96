"""safetensors headers: what the format forbids is refused by name, what the library writes is read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from caldrix_protocol.refusals import Refused
from caldrixd.models import weights
from caldrixd.models.header import MAX_HEADER

EIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_bytes(header: Any, data: bytes = b"", *, claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if claimed is None else claimed
    return length.to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": EIGHT | changes}


BAD = {
    "empty file": (b"", "it is empty"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "it was cut short"),
    "no header": (file_bytes(b""), "does not start with {"),
    "header of 2^60 bytes": (file_bytes(b"{}", claimed=2**60), "claims 1152921504606846976 bytes"),
    "header of 2^64-1 bytes": (file_bytes(b"{}", claimed=2**64 - 1), "claims 18446744073709551615 bytes"),
    "header over the cap": (file_bytes(b"{}", claimed=MAX_HEADER + 1), "claims 8388609 bytes"),
    "header past the end": (file_bytes(b"{}", claimed=100), "is truncated"),
    "not JSON": (file_bytes(b"{]"), "cannot be read: it is not JSON: line 1, column 2"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "cannot be read: it is not UTF-8 text"),
    "not an object": (file_bytes(b"[]"), "does not start with {"),
    "leading space": (file_bytes(b" {}"), "does not start with {"),
    "duplicate name": (file_bytes(b'{"a": 1, "a": 2}'), "stands in it twice"),
    "deep": (file_bytes(b'{"a":' * 100_000), "nested too deeply"),
    "metadata of numbers": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata a list": (file_bytes({"__metadata__": []}), "__metadata__"),
    "entry a number": (file_bytes({"a": 1}), "'a' has not exactly"),
    "entry lacks shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "'a' has not exactly"),
    "entry has more": (file_bytes(entry(more=1), bytes(8)), "'a' has not exactly"),
    "empty name": (file_bytes({"": EIGHT}, bytes(8)), "not printable"),
    "escape in a name": (
        file_bytes({"\x1b]52;c;QQ==\x07": EIGHT}, bytes(8)),
        "'\\x1b]52;c;QQ==\\x07' is empty",
    ),
    "long name": (file_bytes({"a" * 513: EIGHT}, bytes(8)), "too long"),
    "dtype a number": (file_bytes(entry(dtype=1), bytes(8)), "the dtype of 'a'"),
    "dtype long": (file_bytes(entry(dtype="F" * 99), bytes(8)), "the dtype of 'a'"),
    "shape a number": (file_bytes(entry(shape=2), bytes(8)), "the shape of 'a'"),
    "negative size": (file_bytes(entry(shape=[-2]), bytes(8)), "the shape of 'a'"),
    "size a flag": (file_bytes(entry(shape=[True]), bytes(8)), "the shape of 'a'"),
    "size a fraction": (file_bytes(entry(shape=[2.0]), bytes(8)), "the shape of 'a'"),
    "nine dimensions": (file_bytes(entry(shape=[1] * 9), bytes(8)), "the shape of 'a'"),
    "product overflows": (file_bytes(entry(shape=[2**40] * 8), bytes(8)), "the shape of 'a' takes"),
    "shape and size differ": (
        file_bytes(entry(shape=[3]), bytes(8)),
        "the shape of 'a' takes 12 bytes, not 8",
    ),
    "one offset": (file_bytes(entry(data_offsets=[0]), bytes(8)), "data_offsets of 'a'"),
    "falling offsets": (file_bytes(entry(data_offsets=[8, 0]), bytes(8)), "data_offsets of 'a'"),
    "negative offset": (file_bytes(entry(data_offsets=[-8, 0]), bytes(8)), "data_offsets of 'a'"),
    "offset of 2^63": (file_bytes(entry(data_offsets=[0, 2**63]), bytes(8)), "data_offsets of 'a'"),
    "overlap": (
        file_bytes({"a": EIGHT, "b": EIGHT | {"data_offsets": [4, 12]}}, bytes(12)),
        "'b' overlaps another",
    ),
    "same place twice": (file_bytes({"a": EIGHT, "b": EIGHT}, bytes(8)), "overlaps another"),
    "hole": (
        file_bytes({"a": EIGHT, "b": EIGHT | {"data_offsets": [12, 20]}}, bytes(20)),
        "'b' leaves a hole",
    ),
    "hole at the start": (file_bytes(entry(data_offsets=[4, 12]), bytes(12)), "'a' leaves a hole"),
    "data past the end": (file_bytes({"a": EIGHT}, bytes(7)), "is truncated"),
    "a pointer to it": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "run git lfs pull"),
    "a web page": (b"\n<!DOCTYPE html><html>log in</html>", "it is a web page"),
    "bytes behind the data": (file_bytes({"a": EIGHT}, bytes(9)), "1 bytes follow"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_header_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(Refused) as caught:
        weights.open_checkpoint(tmp_path)
    expected = "weights/truncated" if words == "is truncated" else "weights/header"
    assert caught.value.code == expected
    assert caught.value.text.startswith("model.safetensors ")
    assert words in caught.value.text
    assert len(caught.value.text) < 400


def test_a_truncated_file_says_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, path)
    whole = path.stat().st_size
    for size in range(8, whole, 37):
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(Refused) as caught:
            weights.open_checkpoint(tmp_path)
        assert caught.value.code == "weights/truncated"
        assert caught.value.fields["size"] == size
        save_file({"a": np.zeros(100, np.float32)}, path)
    assert caught.value.fields["expected"] == whole


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        save_file({f"{name}{index}": np.zeros(1) for index in range(3)}, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(weights, "MAX_TENSORS", 6)
    weights.open_checkpoint(tmp_path)
    monkeypatch.setattr(weights, "MAX_TENSORS", 5)
    with pytest.raises(Refused) as caught:
        weights.open_checkpoint(tmp_path)
    assert caught.value.text == "b.safetensors is not a valid safetensors file: there are over 5 tensors"


names = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=20)
arrays = st.tuples(
    st.sampled_from([np.float32, np.float16, np.int64, np.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
)


@settings(max_examples=60)
@given(table=st.dictionaries(names.filter(lambda name: name != "__metadata__"), arrays, max_size=6))
def test_what_the_library_writes_is_read_alike(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, tuple[type, list[int]]]
) -> None:
    directory = tmp_path_factory.mktemp("twin")
    made: dict[str, Any] = {
        name: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
        for name, (kind, shape) in table.items()
    }
    save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = weights.open_checkpoint(directory)
    twin = load_file(directory / "model.safetensors")
    assert set(checkpoint.tensors) == set(twin)
    for name, array in twin.items():
        tensor = checkpoint.tensors[name]
        assert tensor.shape == array.shape
        assert tensor.data.tobytes() == array.tobytes()
        assert not tensor.data.flags.writeable


@settings(max_examples=300)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 8))
def test_a_changed_byte_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    directory = tmp_path_factory.mktemp("mutated")
    path = directory / "model.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b.c": np.ones(5, np.float16)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
    try:
        checkpoint = weights.open_checkpoint(directory)
    except Refused:
        return
    if any(checkpoint.tensors[name].dtype not in ("F32", "F16") for name in checkpoint.tensors):
        return  # a dtype of no plan: the plan's check refuses it
    with safetensors.safe_open(path, "numpy") as twin:
        assert set(checkpoint.tensors) == set(twin.keys())
        for name in twin.keys():  # noqa: SIM118
            assert list(checkpoint.tensors[name].shape) == twin.get_slice(name).get_shape()
