"""The model argument."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models import aliases
from caldrixd.models.hub import Repo
from caldrixd.models.resolve import ResolvedModel, check_directory, resolve
from tests.models.conftest import ModelDirectory


def code_of(name: str) -> str:
    with pytest.raises(Refused) as caught:
        resolve(name)
    return caught.value.code


def test_an_absolute_directory_and_the_demo(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == ResolvedModel(str(tmp_path), directory=tmp_path)
    assert resolve(f"{tmp_path}/") == ResolvedModel(f"{tmp_path}/", directory=tmp_path)
    assert resolve("demo") == ResolvedModel("demo")


def test_a_directory_with_the_name_of_an_alias_is_a_directory(tmp_path: Path) -> None:
    for name in ("demo", "smollm2", "owner/name"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve(f"{tmp_path}/{name}").directory == tmp_path / name


@pytest.mark.parametrize("name", aliases.HUB)
def test_an_alias_is_a_repo_at_a_revision(name: str) -> None:
    alias = aliases.HUB[name]
    assert resolve(name) == ResolvedModel(name, repo=Repo(alias.repo, alias.revision))
    assert alias.licence


def test_the_aliases_are_the_documented_ones_and_all_but_one_are_pinned() -> None:
    assert aliases.NAMES == (
        "smollm2",
        "smollm2-instruct",
        "llama-8b",
        "qwen3-0.6b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "decider-0.8b",
        "smolvlm-256m",
        "demo",
    )
    unpinned = {name for name, alias in aliases.HUB.items() if not Repo(alias.repo, alias.revision).pinned}
    assert unpinned <= {"decider-0.8b"}


def test_the_page_has_the_table_of_aliases() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text("utf-8")
    rows = [aliases.documented(name, alias) for name, alias in aliases.HUB.items()]
    assert rows[0].startswith("| `smollm2` | HuggingFaceTB/SmolLM2-135M | `")
    assert "|---|---|---|---|\n" + "".join(rows) + "\n" in page


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("owner/name", Repo("owner/name", "main")),
        ("owner/name@main", Repo("owner/name", "main")),
        ("owner/name@v1.0", Repo("owner/name", "v1.0")),
        ("a.b-c/d_e.f@refs/pr/1", Repo("a.b-c/d_e.f", "refs/pr/1")),
        ("a/b@" + "0f" * 20, Repo("a/b", "0f" * 20)),
        ("0/1@2", Repo("0/1", "2")),
    ],
)
def test_a_repo_id(name: str, repo: Repo) -> None:
    assert resolve(name) == ResolvedModel(name, repo=repo)


@pytest.mark.parametrize("name", ["/none", "/file", "/file/x", "/file/", "/\0", "/" + "x" * 300])
def test_a_path_that_is_no_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused) as caught:
        resolve(f"{tmp_path}{name}")
    assert caught.value.code in ("model/no-such-directory", "model/not-readable")


@pytest.mark.parametrize("name", ["./x", "../x", "~", "~/x", "~x", "./smollm2", "./owner/name"])
def test_a_path_that_the_client_has_not_made_absolute(name: str) -> None:
    assert code_of(name) == "model/no-such-directory"


@pytest.mark.parametrize(
    "name",
    [
        *("", "Demo", "a b/c", "a/b/c", "a/", "a/b/", "x" * 5000, "é/x", "a/é", "a/b\n", ".a/b", "-a/b"),
        *("a/.b", "a/b.", "a/b-", "a--b/c", "a/b--c", "a..b/c", "a/b@", "a/b@..", "a/b@x/../y", "a/b@x//y"),
        *("a/b@/x", "a/b@x/", "a/b@.x", "a/b@x@y", "a\\b/c", "C:/b", "a/b\0", "a/b@x y", "a/b?x=1", "a/b#c"),
    ],
)
def test_what_is_not_a_model(name: str) -> None:
    assert code_of(name) in ("model/not-a-model", "model/near-miss")


ALL = (
    "smollm2, smollm2-instruct, llama-8b, qwen3-0.6b, qwen3-8b, qwen3-30b-a3b, decider-0.8b, smolvlm-256m, "
    "demo"
)


def test_the_refusal_lists_the_aliases() -> None:
    with pytest.raises(Refused) as caught:
        resolve("gpt-4")
    assert caught.value.text == f"gpt-4 is not a directory, an alias ({ALL}) or a Hugging Face repo id"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *(("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("smollm2@main", "smollm2"), ("Demo", "demo")),
        *(("smollm-instruct", "smollm2-instruct"), ("qwen3-0.6", "qwen3-0.6b"), ("llama8b", "llama-8b")),
        *(("llama", "llama-8b"), ("qwen3:8b", "qwen3-8b"), ("qwen3-30b", "qwen3-30b-a3b")),
        *(("owner/name/", "owner/name"), ("https://huggingface.co/owner/name", "owner/name")),
        *(("hf.co/owner/name/tree/main", "owner/name"), ("https://hf.co/owner/name?x#y", "owner/name")),
    ],
)
def test_a_near_miss_is_told_what_may_be_meant(name: str, nearest: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(name)
    assert caught.value.text == (
        f"{name} is not a directory, an alias ({ALL}) or a Hugging Face repo id; did you mean {nearest}?"
    )
    assert resolve(nearest)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    assert code_of(str(tmp_path)) == "model/not-readable"
    tmp_path.chmod(0o700)


def test_a_directory_without_a_config_is_no_model(model: ModelDirectory) -> None:
    check_directory(model.path)
    (model.path / "config.json").unlink()
    with pytest.raises(Refused) as caught:
        check_directory(model.path)
    assert caught.value.code == "model/missing-files"
