"""A tokenizer's other files, and a tokenizer that is a bomb, through the real command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Home
from tests.support.models import tiny

MODEL = tiny("tiny-llama")
TABLE: dict[str, Any] = json.loads((MODEL / "tokenizer.json").read_text("utf-8"))
TOKENS = ("--raw", "--json", "--max-tokens", "8", "-p")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy without tokenizer.json."""
    return Path(shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer.json")))


def answer(home: Home, model: Path, prompt: str) -> dict[str, Any]:
    result = home.caldrix("run", str(model), *TOKENS, prompt)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def pids(home: Home) -> set[str]:
    """The worker processes."""
    return set(re.findall(r"\b\d{3,}\b", home.caldrix("ps").out))


def test_a_model_answers_alike_with_the_files_its_tokenizer_json_was_made_of(
    shared: Home, model: Path
) -> None:
    merges = [" ".join(pair) + "\n" for pair in (["#version:", "0.2"], *TABLE["model"]["merges"])]
    (model / "vocab.json").write_text(json.dumps(TABLE["model"]["vocab"]), "utf-8")
    (model / "merges.txt").write_text("".join(merges), "utf-8")
    config = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config |= {"tokenizer_class": "GPT2Tokenizer", **special}
    (model / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    prompt = "Once upon a time<|endoftext|> there was"  # the two tokenizers differ in digits alone
    ours, other = answer(shared, model, prompt), answer(shared, MODEL, prompt)
    assert ours["prompt_ids"] == other["prompt_ids"]
    assert ours["ids"] == other["ids"]


def test_a_bomb_ends_its_message_and_the_model_goes_on(shared: Home, model: Path) -> None:
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    normalizer = {"type": "Sequence", "normalizers": [grows] * 4}
    (model / "tokenizer.json").write_text(json.dumps(TABLE | {"normalizer": normalizer}), "utf-8")
    result = shared.caldrix("run", str(model), *TOKENS, "an a")
    assert result.status == 1
    assert result.err.splitlines()[-1].startswith("caldrix: the tokenizer of this model ")
    assert result.err.endswith("on this text and was stopped\n")
    before = pids(shared)
    assert answer(shared, model, "hi")["prompt_ids"]
    assert pids(shared) == before
