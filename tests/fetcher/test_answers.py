"""What a hub may not make of a fetcher, whatever it answers: each answer is refused in one sentence, soon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.messages import Done, Refusal
from tests.fetcher.fetching import MODEL, NAME, WEIGHTS, Cache
from tests.support import hub

REPO = hub.repo(MODEL)
COMMIT = "1" * 40


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with hub.serve({NAME: REPO}) as server:
        yield Cache(tmp_path / "hub", server)


def refusal(cache: Cache) -> Refusal:
    """What the fetcher says at its end, and that it is no internal error and wrote no file outside."""
    last, _ = cache.fetch(seconds=10)
    assert type(last) is Refusal
    assert last.code != "daemon/internal"
    assert "\n" not in last.text
    assert [path.name for path in cache.root.parent.iterdir()] in ([], ["hub"])
    return last


def listing(*files: Any, **more: Any) -> bytes:
    return json.dumps({"sha": COMMIT, "siblings": files, **more}).encode()


def entry(name: Any = "config.json", size: Any = 5, digest: Any = "0" * 40) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": digest}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"NaN",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'"' + b"x" * (33 << 20),
        b'{"sha": 1, "siblings": []}',
        b'{"sha": "main", "siblings": []}',
        listing(sha=COMMIT.replace("1", "１")),
        listing(sha=COMMIT + "\n"),
        listing(siblings=None),
        listing(siblings={"config.json": 1}),
        b'{"sha": "' + b"9" * 5000 + b'"}',
        b'{"sha": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_listing_that_is_none(cache: Cache, body: bytes) -> None:
    cache.server.fail("answer", "info", body=body)
    assert refusal(cache).code == "hub/answer"


@pytest.mark.parametrize(
    "file",
    [
        None,
        [],
        entry(name=None),
        entry(name="../config.json"),
        entry(name="/etc/config.json"),
        entry(name="config.json\0"),
        entry(name="\ud800config.json"),
        entry(size=-1),
        entry(size="5"),
        entry(size=True),
        entry(size=1e308),
        entry(size=float("nan")),
        entry(digest="../../outside"),
        entry(digest="0" * 41),
        entry(digest=None),
        entry() | {"lfs": {"size": 5, "sha256": "../../outside"}},
        entry() | {"lfs": {}},
    ],
)
def test_an_entry_that_cannot_be_trusted_is_no_file(cache: Cache, file: Any) -> None:
    cache.server.fail("answer", "info", body=listing(file))
    assert refusal(cache).code == "hub/missing-files"
    assert cache.server.files() == []


@pytest.mark.parametrize("size", [65 << 20, 1 << 62, 1 << 63, 1 << 70])
def test_a_small_file_that_is_said_to_be_huge(cache: Cache, size: int) -> None:
    cache.server.fail("answer", "info", body=listing(entry(size=size)))
    assert refusal(cache).code == "config/too-big"
    assert cache.server.files() == []


@pytest.mark.parametrize("size", [1 << 60, 1 << 63, 1 << 70])
def test_weights_that_are_said_to_be_huge(cache: Cache, size: int) -> None:
    told = [entry(file.name, file.size, file.blob) for file in REPO.files.values() if file.name != WEIGHTS]
    body = listing(*told, entry(WEIGHTS, size, "0" * 64), sha=REPO.commit)
    cache.server.fail("answer", "info", body=body)
    assert refusal(cache).code == "hub/disk"
    assert WEIGHTS not in cache.server.files()


@pytest.mark.parametrize("what", ["info", "config.json", WEIGHTS])
def test_headers_without_end(cache: Cache, what: str) -> None:
    cache.server.fail("headers", what, at=10 << 20)
    assert refusal(cache).code in ("hub/unreachable", "hub/stalled")
    cache.server.heal()
    assert cache.fetch()[0] == Done()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"sizes": {"a": NaN}}', "\ud800", '{"sizes": {"a": 1e999}}']
)
def test_a_record_that_was_tampered_with_is_made_anew(cache: Cache, text: str) -> None:
    assert cache.fetch()[0] == Done()
    (record,) = (cache.storage / ".caldrix").iterdir()
    record.write_text(text, "utf-8", "surrogatepass")
    assert cache.fetch()[0] == Done()
    assert json.loads(record.read_bytes())["sizes"].keys() == {*MODEL}
