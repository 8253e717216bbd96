"""What is in the cache already is compared with its digests, once, whoever put it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.messages import Done, Planned, Refusal
from caldrixd.models.hub import Repo, look
from tests.fetcher.fetching import MIB, NAME, WEIGHTS, Cache, weighing, whole
from tests.support import hub

REPO = weighing(3 * MIB + 17)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with hub.serve({NAME: REPO}) as server:
        yield Cache(tmp_path / "hub", server)


def alter(path: Path) -> None:
    """Change one byte, and with it the time of the last change."""
    before = path.stat().st_mtime_ns
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before + 1, before + 1))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", WEIGHTS])
def test_what_was_altered_in_the_cache_is_fetched_anew(cache: Cache, name: str) -> None:
    cache.fetch()
    alter(cache.snapshot(REPO) / name)
    cache.server.requests.clear()
    last, fetcher = cache.fetch()
    assert last == Done()
    assert whole(cache, REPO)
    assert cache.server.files() == [name]
    if name != "config.json":  # which is had before it can be known what is to come
        assert fetcher.said == ["status/downloading", "status/downloaded"]


def test_what_another_program_fetched_is_compared_with_its_digest_once(cache: Cache) -> None:
    cache.server.fail("altered", WEIGHTS, at=MIB)
    cache.server.fail("altered", "tokenizer.json", at=100)
    cache.fill_by_the_library()
    cache.server.heal()
    cache.server.requests.clear()
    last, fetcher = cache.fetch()
    assert (last, set(cache.server.files())) == (Done(), {"tokenizer.json", WEIGHTS})
    assert whole(cache, REPO)
    sizes = [(plan.weight_bytes, plan.missing_bytes) for plan in fetcher.heard if type(plan) is Planned]
    assert sizes == [(REPO.files[WEIGHTS].size, 0)]


def test_what_was_compared_is_not_read_again(cache: Cache) -> None:
    """Such a change, which leaves no trace, is the proof."""
    cache.fetch()
    weights = cache.snapshot(REPO) / WEIGHTS
    before = weights.stat().st_mtime_ns
    alter(weights)
    os.utime(weights, ns=(before, before))
    cache.server.requests.clear()
    assert cache.fetch()[1].heard == [Done()]
    assert cache.server.files() == []


def test_where_nothing_can_be_noted_what_is_whole_is_used(cache: Cache) -> None:
    """Otherwise every run would read all of it."""
    cache.fill_by_the_library()
    (cache.storage / ".caldrix").touch()
    alter(cache.snapshot(REPO) / WEIGHTS)
    assert cache.fetch()[1].heard == [Done()]
    (cache.snapshot(REPO) / WEIGHTS).unlink()
    (cache.storage / "blobs" / REPO.files[WEIGHTS].etag).unlink()
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/cache"


def test_where_nothing_can_be_noted_a_commit_is_used_as_it_is(cache: Cache) -> None:
    cache.fill_by_the_library()
    (cache.storage / ".caldrix").touch()
    found = look(Repo(NAME, REPO.commit), cache.root)
    assert found is not None
    assert (found.certain, found.digests) == (True, {})


def test_a_word_on_a_large_file_that_is_compared(tmp_path: Path) -> None:
    repo = weighing(100_000_001)
    with hub.serve({NAME: repo}) as server:
        cache = Cache(tmp_path / "hub", server)
        cache.fill_by_the_library()
        last, fetcher = cache.fetch()
    assert (last, fetcher.said) == (Done(), ["status/checking"])


def test_what_is_altered_while_the_rest_comes_is_not_used(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    fetcher = cache.start()
    fetcher.until(Planned)
    fetcher.go_on()
    cache.server.wait(lambda: cache.server.sent(WEIGHTS) == MIB)
    alter(cache.snapshot(REPO) / "tokenizer.json")
    cache.server.release()
    last = fetcher.finish()
    assert type(last) is Refusal
    assert last.code == "hub/incomplete"
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)


def test_what_another_program_fetched_of_a_commit_is_compared_without_the_hub(cache: Cache) -> None:
    cache.fill_by_the_library()
    cache.server.requests.clear()
    pinned = Repo(NAME, REPO.commit)
    before = look(pinned, cache.root)
    assert before is not None
    assert (before.complete, before.certain) == (True, False)
    assert before.digests == {name: file.etag for name, file in REPO.files.items()}
    last, fetcher = cache.fetch(f"{NAME}@{REPO.commit}", CALDRIX_OFFLINE="1")
    assert last == Done()
    size = REPO.files[WEIGHTS].size
    assert fetcher.heard == [Planned(str(cache.snapshot(REPO)), size, 0), Done()]
    after = look(pinned, cache.root)
    assert after is not None
    assert (after.complete, after.certain, after.digests) == (True, True, {})
    assert cache.server.requests == []


@pytest.mark.parametrize("changes", [{"HF_ENDPOINT": "nowhere"}, {"SSL_CERT_FILE": "/none"}], ids=" ".join)
def test_what_only_a_hub_needs_is_not_asked_of_who_needs_none(cache: Cache, changes: dict[str, Any]) -> None:
    cache.fill_by_the_library()
    model = f"{NAME}@{REPO.commit}"
    (cache.snapshot(REPO) / "tokenizer.json").rename(cache.root / "aside")
    last, _ = cache.fetch(model, **changes)
    assert type(last) is Refusal
    assert last.code in ("hub/endpoint", "hub/certificates")
    (cache.root / "aside").rename(cache.snapshot(REPO) / "tokenizer.json")
    assert cache.fetch(model, **changes)[0] == Done()
    found = look(Repo(NAME, REPO.commit), cache.root)
    assert found is not None
    assert found.certain


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
@pytest.mark.parametrize("damage", [lambda data: b"x" + data[1:], lambda data: data[:-1]])
def test_what_another_program_left_damaged_of_a_commit_is_fetched_anew(
    cache: Cache, name: str, damage: Callable[[bytes], bytes]
) -> None:
    cache.fill_by_the_library()
    blob = cache.storage / "blobs" / REPO.files[name].etag
    blob.write_bytes(damage(blob.read_bytes()))
    model = f"{NAME}@{REPO.commit}"
    said = f"{model}: {name} in the Hugging Face cache does not match its digest, and is not fetched again: "
    last, _ = cache.fetch(model, HF_HUB_OFFLINE="1")
    assert (type(last), last.text) == (Refusal, f"{said}HF_HUB_OFFLINE is set")
    last, _ = cache.fetch(model, HF_ENDPOINT="http://127.0.0.1:1")
    assert (type(last), last.code, last.text.startswith(said)) == (Refusal, "hub/damaged", True)
    assert cache.fetch(model)[0] == Done()
    assert whole(cache, REPO)
    found = look(Repo(NAME, REPO.commit), cache.root)
    assert found is not None
    assert found.certain
