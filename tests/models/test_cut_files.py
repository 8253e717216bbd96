"""A download that ended early: each file of a model, cut anywhere, is refused in one sentence of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import parse
from caldrixd.models import gate, weights
from caldrixd.text import template, tokenizer
from tests.support.models import tiny

MODEL = tiny("tiny-llama")
INDEX = "model.safetensors.index.json"
CUT = "it was cut short: download it again"
EMPTY = "it is empty: download it again"
# All that JSON has, so that a cut falls into each.
ALL = {"é\n": [1, -2.5e10, 1e-7, True, False, None, 'é"\\'], "b": {"c": []}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    return copy


def read(directory: Path) -> None:
    """What a worker reads of a model, but for its tokenizer.json."""
    gate.read_spec(directory)
    template.load(directory)
    weights.open_checkpoint(directory)


def cuts(path: Path, step: int) -> Iterator[int]:
    """Cut a file to 0, `step`, ... of its bytes."""
    data = path.read_bytes().rstrip()
    for length in range(0, len(data), step):
        path.write_bytes(data[:length])
        yield length


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_without_its_end_is_known_wherever_it_ends(ascii_only: bool, indent: int | None) -> None:
    whole = json.dumps(ALL, ensure_ascii=ascii_only, indent=indent).encode()
    assert parse(whole) == ALL
    for length in range(1, len(whole)):
        with pytest.raises(ValueError, match=f"^{CUT}$"):
            parse(whole[:length])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_a_cut_json_file(directory: Path, name: str) -> None:
    if name == INDEX:
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
        (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    for length in cuts(directory / name, 10):
        with pytest.raises(Refused) as caught:
            read(directory)
        assert caught.value.text == f"{name} cannot be read: {CUT if length else EMPTY}"


def test_a_cut_tokenizer(directory: Path) -> None:
    spec = gate.read_spec(directory)
    for _ in cuts(directory / "tokenizer.json", 2111):
        with pytest.raises(Refused) as caught:
            tokenizer.load(directory, spec)
        assert caught.value.text == f"tokenizer.json cannot be used: {CUT}"


def test_cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for length in (0, 7, 8, header, 8 + header, 9 + header, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Refused) as caught:
            weights.read_entries(directory)
        if length < 8:
            reason = CUT if length else EMPTY
            assert caught.value.text == f"model.safetensors is not a valid safetensors file: {reason}"
        else:
            assert caught.value.code == "weights/truncated"
            assert caught.value.text.endswith(f" bytes, the file has {length}; download it again")
