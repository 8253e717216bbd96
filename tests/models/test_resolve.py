"""The model argument."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models.resolve import ResolvedModel, check_files, resolve
from tests.models.conftest import ModelDirectory


def code_of(name: str) -> str:
    with pytest.raises(Refused) as caught:
        resolve(name)
    return caught.value.code


def test_an_absolute_directory_and_an_alias(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == ResolvedModel(str(tmp_path), tmp_path)
    assert not resolve(str(tmp_path)).demo
    assert resolve("demo") == ResolvedModel("demo", None)
    assert resolve("demo").demo


def test_what_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in (f"{tmp_path}/none", f"{tmp_path}/file", f"{tmp_path}/file/x", "./x", "../x", "~/x", "/\0"):
        assert code_of(name) == "model/no-such-directory"
    with pytest.raises(Refused) as caught:
        resolve("llama")
    assert caught.value.text == "llama is not a directory, an alias (demo) or a Hugging Face repo id"
    for name in ("", "a b/c", "a/b/c", "a/", "Demo", "x" * 5000, "é/x", "a/b@"):
        assert code_of(name) == "model/not-a-model"


def test_repo_ids_are_refused_for_now() -> None:
    for name in ("owner/name", "owner/name@main", "a.b-c/d_e.f@refs/pr/1"):
        assert code_of(name) == "model/hub-not-yet"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    assert code_of(str(tmp_path)) == "model/not-readable"
    tmp_path.chmod(0o700)


def test_the_files_of_a_model(model: ModelDirectory, tmp_path: Path) -> None:
    def code() -> str:
        with pytest.raises(Refused) as caught:
            check_files(tmp_path)
        return caught.value.code

    assert code() == "tokenizer/missing"
    model.write("tokenizer.json", "{}")
    assert code() == "model/no-safetensors"
    model.write_weights()
    assert check_files(tmp_path) == ("model.safetensors",)
    (tmp_path / "config.json").unlink()
    assert code() == "model/missing-files"
