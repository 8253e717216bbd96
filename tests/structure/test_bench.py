"""What a bench cannot be run with is told in one sentence, before anything is measured."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.support.models import tiny

TINY = tiny("tiny-llama")


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    try:
        status: object = bench.main()
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("bench: ").rstrip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("decoding", "no bench is named decoding; there are limits, decode, "),
        ("--rounds 0", "--rounds must be over 0, got 0"),
        ("--rounds many", "argument --rounds: invalid int value: 'many'"),
        ("--seconds nan", "--seconds must be over 0, got nan"),
        ("--minutes -1", "--minutes must be over 0, got -1.0"),
        ("--threads 257", "--threads must be over 0 and at most 256, got 257"),
        ("--fast", "unrecognized arguments: --fast"),
        ("--model nothere", "nothere: no such directory"),
        ("--model ./nothere", "./nothere: no such directory"),
        ("--model smollm2", "smollm2: no such directory"),
        (f"--model {TINY} --model nothere", "nothere: no such directory"),
        (f"--model {TINY}/config.json", f"{TINY}/config.json: no such directory; it is a file of a model: "),
        ("--model /dev/null", "/dev/null: no such directory"),
        (f"--model {TINY.parent}", f"{TINY.parent}: inferno needs config.json, a supported tokenizer and "),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    assert told(capsys, monkeypatch, *arguments.split()).startswith(said)


def test_a_model_that_cannot_be_run_is_refused_as_a_run_of_it_would_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((model / "config.json").read_text("utf-8"))
    for changes, said in (
        ({"architectures": ["OtherForCausalLM"]}, "config.json: unsupported architectures entry Other"),
        ({"vocab_size": 7}, "tensor model.embed_tokens.weight has shape [512, 64]; config.json says [7, 64]"),
    ):
        (model / "config.json").write_text(json.dumps(config | changes), "utf-8")
        assert told(capsys, monkeypatch, "--model", str(model)).startswith(said)
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    (model / "tokenizer.json").write_text("{}", "utf-8")
    assert told(capsys, monkeypatch, "--model", str(model)).startswith("tokenizer.json cannot be used: ")
