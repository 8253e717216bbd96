"""What is looked at of a model directory before it is loaded, and of one that is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.handlers.open import inspect
from caldrixd.lanes.lane import Variant
from caldrixd.worker.process import Key
from tests.support.changed import Change, changed
from tests.support.models import tiny

MODEL = tiny("tiny-llama")


def code(directory: Path) -> str:
    with pytest.raises(Refused) as caught:
        inspect(directory, "cpu", Variant(), lambda key: None)
    return caught.value.code


@pytest.mark.parametrize(
    ("lacking", "refusal"),
    [
        (("model.safetensors",), "model/no-safetensors"),
        (("tokenizer.json", "model.safetensors"), "tokenizer/missing"),
        (("config.json", "tokenizer.json", "model.safetensors"), "model/missing-files"),
    ],
)
def test_the_first_of_several_faults_is_told(tmp_path: Path, lacking: tuple[str, ...], refusal: str) -> None:
    nothing: dict[str, Change] = dict.fromkeys(lacking)
    assert code(changed(MODEL, tmp_path / "model", nothing)) == refusal


def test_the_tokenizer_of_a_loaded_model_is_not_looked_at_again(tmp_path: Path) -> None:
    directory = changed(MODEL, tmp_path / "model", {"tokenizer.json": None})
    assert code(directory) == "tokenizer/missing"
    asked: list[Key] = []

    def find(key: Key) -> str:
        asked.append(key)
        return "a worker"

    found = inspect(directory, "cpu", Variant(), find)
    assert asked == [found.key]
