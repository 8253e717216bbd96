"""The Hugging Face cache, looked at without its library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models.hub import Record, Repo, cache_root, look, offline_variable, write_record

COMMIT = "0123456789" * 4
PINNED = Repo("owner/name", COMMIT)
MAIN = Repo("owner/name", "main")
MODEL = {"config.json": 2, "tokenizer.json": 2, "model.safetensors": 9}


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "HF_HOME": "/f"}, "/f/hub"),
        ({"HOME": "/h", "HF_HOME": "/f", "HF_HUB_CACHE": "/c"}, "/c"),
        ({"HOME": "/h", "HF_HOME": "", "HF_HUB_CACHE": ""}, "/h/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_library_has_it(environment: dict[str, str], root: str) -> None:
    assert cache_root(environment) == Path(root)


def test_without_a_home_there_is_no_cache() -> None:
    with pytest.raises(Refused) as caught:
        cache_root({})
    assert caught.value.code == "socket/no-home"


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, None),
        ({"CALDRIX_OFFLINE": "0", "HF_HUB_OFFLINE": "No"}, None),
        ({"CALDRIX_OFFLINE": ""}, None),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ({"HF_HUB_OFFLINE": "yes", "CALDRIX_OFFLINE": "true"}, "CALDRIX_OFFLINE"),
    ],
)
def test_the_variable_that_forbids_connections(environment: dict[str, str], variable: str | None) -> None:
    assert offline_variable(environment) == variable


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = MAIN.snapshot(tmp_path, COMMIT)
    directory.mkdir(parents=True)
    for name, size in MODEL.items():
        (directory / name).write_bytes(b"x" * size)
    MAIN.reference(tmp_path).parent.mkdir()
    MAIN.reference(tmp_path).write_text(COMMIT)
    return tmp_path


def test_nothing_is_known_of_what_was_never_fetched(cache: Path) -> None:
    assert look(Repo("owner/other", "main"), cache) is None
    assert look(Repo("owner/name", "v1"), cache) is None
    assert look(Repo("owner/name", "f" * 40), cache) is None
    MAIN.reference(cache).write_text("../../../etc")
    assert look(MAIN, cache) is None
    MAIN.reference(cache).write_bytes(COMMIT.encode() + b" " * 2000)
    assert look(MAIN, cache) is None


def test_a_reference_that_is_no_file_is_not_waited_for(cache: Path) -> None:
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        MAIN.reference(cache).unlink(missing_ok=True)
        make(MAIN.reference(cache))
        assert look(MAIN, cache) is None
        if make is Path.mkdir:
            MAIN.reference(cache).rmdir()


@pytest.mark.parametrize("repo", [MAIN, PINNED])
def test_a_snapshot_of_another_program_is_judged_by_its_files(cache: Path, repo: Repo) -> None:
    found = look(repo, cache)
    assert found is not None
    assert (found.directory, found.missing, found.certain) == (MAIN.snapshot(cache, COMMIT), (), True)
    for name in MODEL:
        (found.directory / name).unlink()
    found = look(repo, cache)
    assert found is not None
    assert found.missing == ("config.json", "tokenizer.json", "*.safetensors")


def test_digests_are_those_of_the_blobs_where_every_file_has_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = MAIN.snapshot(cache, COMMIT)
    blobs = MAIN.storage(cache) / "blobs"
    blobs.mkdir()
    digests = {name: f"{number}" * (64 if number == 2 else 40) for number, name in enumerate(MODEL)}
    for name, digest in digests.items():
        found = look(PINNED, cache)
        assert found is not None
        assert (found.certain, found.digests) == (True, {})
        (directory / name).rename(blobs / digest)
        (directory / name).symlink_to(f"../../blobs/{digest}")
    (directory / "onnx").mkdir()
    found = look(PINNED, cache)
    assert found is not None
    assert (found.complete, found.certain, found.digests) == (True, False, digests)
    monkeypatch.setattr(os, "access", lambda path, mode: path != MAIN.storage(cache))
    found = look(PINNED, cache)
    assert found is not None
    assert (found.certain, found.digests) == (True, {})


def test_weights_without_an_index_may_not_be_all(cache: Path) -> None:
    directory = MAIN.snapshot(cache, COMMIT)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    found = look(PINNED, cache)
    assert found is not None
    assert (found.complete, found.certain) == (True, False)


def test_files_that_the_index_names_are_missing(cache: Path) -> None:
    directory = MAIN.snapshot(cache, COMMIT)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    found = look(PINNED, cache)
    assert found is not None
    assert (found.missing, found.certain) == (("b.safetensors",), True)


def test_a_record_says_what_is_missing(cache: Path) -> None:
    directory = MAIN.snapshot(cache, COMMIT)
    sizes = {**MODEL, "chat_template.jinja": 5}
    write_record(MAIN.record(cache, COMMIT), Record(sizes, dict.fromkeys(sizes, 7)))
    found = look(MAIN, cache)
    assert found is not None
    assert (found.missing, found.certain) == (("chat_template.jinja",), True)
    (directory / "chat_template.jinja").write_text("12345")
    (directory / "model.safetensors").write_text("cut")
    found = look(MAIN, cache)
    assert found is not None
    assert found.missing == ("model.safetensors",)


def test_what_was_not_compared_with_its_digest_is_not_certain(cache: Path) -> None:
    write_record(MAIN.record(cache, COMMIT), Record(MODEL, {"config.json": 7}))
    found = look(MAIN, cache)
    assert found is not None
    assert (found.missing, found.certain) == ((), False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"sizes": {}}',
        '{"sizes": {"a": "1"}}',
        '{"sizes": {"../../etc/passwd": 1}}',
        '{"sizes": {"a": 1}, "checked": []}',
    ],
)
def test_a_record_that_cannot_be_used_is_as_none(cache: Path, text: str) -> None:
    record = MAIN.record(cache, COMMIT)
    record.parent.mkdir()
    record.write_text(text)
    found = look(MAIN, cache)
    assert found is not None
    assert found.complete
