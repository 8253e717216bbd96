"""Which files are a tokenizer is told from names, and from no more files than it takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.text import files
from tests.text.test_byte_level import COUNT, MERGES, VOCABULARY


class Repo:
    """Files by name, and which of them were asked for."""

    def __init__(self, **contents: object) -> None:
        self.contents = {name.replace("__", "."): content for name, content in contents.items()}
        self.read_names: list[str] = []

    def read(self, name: str, limit: int) -> bytes:
        self.read_names.append(name)
        content = self.contents[name]
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        assert len(data) <= limit
        return data

    def check(self) -> str:
        with pytest.raises(Refused) as caught:
            files.check(self.contents, self.read, "repo")
        return caught.value.text


CLASS = {"tokenizer_class": "Qwen2Tokenizer"}


def test_a_tokenizer_json_is_enough_and_is_not_read() -> None:
    repo = Repo(tokenizer__json="{", vocab__json="{", tokenizer__model="x")
    files.check(repo.contents, repo.read, "repo")
    assert repo.read_names == []


def test_what_can_be_converted_passes_with_the_small_files_read() -> None:
    repo = Repo(
        config__json={"model_type": "qwen2"},
        tokenizer_config__json=CLASS,
        vocab__json=VOCABULARY,
        merges__txt=MERGES,
        added_tokens__json={"<a>": COUNT},
        model__safetensors="weights",
    )
    files.check(repo.contents, repo.read, "repo")
    assert set(repo.read_names) == repo.contents.keys() - {"model.safetensors"}
    assert set(files.needed(repo.contents)) == set(repo.read_names) - {"config.json"}


def test_a_config_alone_can_refuse() -> None:
    repo = Repo(tokenizer_config__json={"tokenizer_class": "CLIPTokenizer"}, vocab__json="", merges__txt="")
    assert repo.check() == (
        "the repo has no tokenizer.json, and its tokenizer_config.json names 'CLIPTokenizer', "
        "whose vocab.json and merges.txt inferno does not convert"
    )
    assert repo.read_names == ["tokenizer_config.json"]


@pytest.mark.parametrize(("name", "kind"), files.OTHER_KINDS.items())
def test_other_kinds_are_refused_by_name_unread(name: str, kind: str) -> None:
    repo = Repo(**{name: "", "config.json": "{}", "tokenizer_config.json": "{}"})
    words = f"the repo has no tokenizer.json, and its {name} is {kind}, which inferno does not convert"
    assert repo.check() == words
    assert repo.read_names == []


def test_no_tokenizer_at_all() -> None:
    assert Repo(config__json="{}").check() == (
        "the repo has no tokenizer.json; inferno needs config.json, a supported tokenizer and *.safetensors"
    )


def test_the_files_of_a_tokenizer_json() -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "config.json", "x.bin")
    assert files.needed(names) == ("tokenizer.json", "tokenizer_config.json")
    assert files.needed(("config.json", "tokenizer.model")) == ()


def test_what_stands_in_place_of_a_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    cases = {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0": "run git lfs pull",
        b"<html>log in</html>": "it is a web page",
        b" " * (files.MAX_TOKENIZER + 1): f"at most {files.MAX_TOKENIZER} are read",
    }
    for content, words in cases.items():
        path.write_bytes(content)
        with pytest.raises(Refused) as caught:
            files.check_directory(tmp_path)
        assert caught.value.text.startswith("tokenizer.json ")
        assert words in caught.value.text
    path.write_bytes(b"{}")
    files.check_directory(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Refused) as caught:
        files.check_directory(tmp_path)
    assert caught.value.text == "tokenizer.json cannot be read: it is not a regular file"
