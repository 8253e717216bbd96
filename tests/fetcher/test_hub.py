"""The fetcher process against a hub on loopback: what is in the cache after it, whatever happened."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download

from caldrix_protocol.messages import Done, Planned, Progress, Refusal
from caldrixd.models.hub import Repo, look
from tests.fetcher.fetching import MIB, MODEL, NAME, WEIGHTS, Cache, weighing, whole
from tests.support import hub
from tests.support.hub_repo import File

REPO = weighing(3 * MIB + 17)
LARGE = weighing(30_000_000)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with hub.serve({NAME: REPO}) as server:
        yield Cache(tmp_path / "hub", server)


def test_a_model_is_where_the_library_looks_for_it(cache: Cache) -> None:
    last, fetcher = cache.fetch()
    assert last == Done()
    assert whole(cache, REPO)
    assert (cache.storage / "refs/main").read_text() == REPO.commit
    asked = len(cache.server.requests)
    found = snapshot_download(NAME, cache_dir=cache.root, local_files_only=True)
    assert Path(found) == cache.snapshot(REPO)
    scanned = scan_cache_dir(cache.root)
    assert (scanned.warnings, [repo.repo_id for repo in scanned.repos]) == ([], [NAME])
    assert len(cache.server.requests) == asked
    assert fetcher.said == ["status/downloading", *["status/downloaded"] * len(MODEL)]
    assert not list(cache.root.rglob("*partial*"))


def test_small_files_behind_a_redirect_of_the_hub(tmp_path: Path) -> None:
    with hub.serve({NAME: REPO}, resolve_cache=True) as server:
        cache = Cache(tmp_path / "hub", server)
        assert cache.fetch()[0] == Done()
        assert whole(cache, REPO)


def test_a_proxy_that_cannot_be_used(cache: Cache) -> None:
    last, _ = cache.fetch(ALL_PROXY="socks9://x", NO_PROXY="", no_proxy="")
    assert type(last) is Refusal
    assert last.code in ("hub/unreachable", "hub/answer")


def test_a_password_in_the_endpoint_is_not_repeated(cache: Cache) -> None:
    last, _ = cache.fetch(HF_ENDPOINT="http://name:secret@127.0.0.1:1")
    assert type(last) is Refusal
    assert (last.code, "secret" in last.text) == ("hub/unreachable", False)


def test_the_plan_comes_before_any_weight(cache: Cache) -> None:
    fetcher = cache.start()
    plan = fetcher.until(Planned)
    size = REPO.files[WEIGHTS].size
    assert plan == Planned(str(cache.snapshot(REPO)), size, size)
    assert WEIGHTS not in cache.server.files()
    assert fetcher.end() == 1  # nobody wants it any more
    assert WEIGHTS not in cache.server.files()


def test_what_is_complete_asks_the_hub_once(cache: Cache) -> None:
    cache.fetch()
    cache.server.requests.clear()
    last, fetcher = cache.fetch()
    assert (last, fetcher.heard) == (Done(), [Done()])
    assert [request.what for request in cache.server.requests] == ["info"]


def test_progress_never_goes_back_and_ends_at_the_total(cache: Cache) -> None:
    cache.server.fail("cut", WEIGHTS, at=2 * MIB, times=1)
    cache.server.fail("no-range", WEIGHTS, host="cdn", times=1)
    last, fetcher = cache.fetch()
    assert last == Done()
    progress = [(message.done, message.total) for message in fetcher.heard if type(message) is Progress]
    size = REPO.files[WEIGHTS].size
    assert progress == sorted(progress)
    assert progress[-1] == (size, size)
    assert whole(cache, REPO)


def kill_and_go_on(cache: Cache, repo: hub.Repo, at: int) -> None:
    """Kill a fetcher when the hub has sent `at` bytes of the weights; another one ends the work."""
    cache.server.fail("stall", WEIGHTS, at=at, times=1)
    first = cache.start()
    first.until(Planned)
    first.go_on()
    cache.server.wait(lambda: cache.server.sent(WEIGHTS) == at)
    first.until_downloaded(at - MIB)
    first.kill()
    assert stat.S_IMODE(cache.partial(repo).stat().st_mode) == 0o600
    assert not (cache.snapshot(repo) / WEIGHTS).exists()
    cache.server.release()
    last, _ = cache.fetch()
    assert last == Done()
    assert whole(cache, repo)
    assert cache.server.sent(WEIGHTS) - repo.files[WEIGHTS].size <= MIB


@pytest.mark.parametrize("percent", [10, 50, 99])
def test_a_killed_fetcher_is_gone_on_from_inside_the_file(tmp_path: Path, percent: int) -> None:
    with hub.serve({NAME: LARGE}) as server:
        kill_and_go_on(Cache(tmp_path / "hub", server), LARGE, LARGE.files[WEIGHTS].size * percent // 100)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 50, 99])
def test_a_killed_fetcher_of_200_megabytes(tmp_path: Path, percent: int) -> None:
    repo = weighing(200_000_000)
    with hub.serve({NAME: repo}) as server:
        kill_and_go_on(Cache(tmp_path / "hub", server), repo, 2_000_000 * percent)


def test_what_an_earlier_process_left_damaged_is_fetched_anew(cache: Cache) -> None:
    partial = cache.partial(REPO)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(MIB))
    last, _ = cache.fetch()
    assert last == Done()
    assert whole(cache, REPO)
    ranges = [request.range for request in cache.server.requests if request.host == "cdn"]
    assert ranges == [f"bytes={MIB}-", None]


def test_a_partial_file_longer_than_the_file_is_not_used(cache: Cache) -> None:
    partial = cache.partial(REPO)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(4 * MIB))
    last, _ = cache.fetch()
    assert last == Done()
    assert cache.server.sent(WEIGHTS) == REPO.files[WEIGHTS].size


@pytest.mark.parametrize("kind", ["link", "second link", "directory"])
def test_what_is_no_partial_file_of_ours_is_left_alone(cache: Cache, tmp_path: Path, kind: str) -> None:
    victim, partial = tmp_path / "victim", cache.partial(REPO)
    victim.write_text("the user's own")
    partial.parent.mkdir(parents=True)
    if kind == "link":
        partial.symlink_to(victim)
    elif kind == "second link":
        partial.hardlink_to(victim)
    else:
        partial.mkdir()
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)
    assert victim.read_text() == "the user's own"
    assert os.path.lexists(partial)


def test_weights_with_another_digest_leave_nothing(cache: Cache) -> None:
    cache.server.fail("altered", WEIGHTS, at=MIB)
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/digest"
    assert not cache.partial(REPO).exists()
    assert cache.server.sent(WEIGHTS) == REPO.files[WEIGHTS].size


def test_a_small_weight_file_is_checked_by_its_git_digest(tmp_path: Path) -> None:
    repo = weighing(50_000)
    with hub.serve({NAME: repo}) as server:
        cache = Cache(tmp_path / "hub", server)
        server.fail("altered", WEIGHTS, at=7, times=1)
        last, _ = cache.fetch()
        assert type(last) is Refusal
        assert last.code == "hub/digest"
        assert cache.fetch()[0] == Done()
        assert whole(cache, repo)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_small_file_is_checked_by_its_digest_and_not_kept(cache: Cache, name: str) -> None:
    cache.server.fail("altered", name, at=REPO.files[name].size // 2, times=1)
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/digest"
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)


def test_a_blob_that_is_there_is_only_linked(cache: Cache) -> None:
    cache.fetch()
    (cache.snapshot(REPO) / WEIGHTS).unlink()
    cache.server.requests.clear()
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)
    assert WEIGHTS not in cache.server.files()


def test_a_blob_that_lost_its_end_is_fetched_anew(cache: Cache) -> None:
    cache.fetch()
    os.truncate(cache.snapshot(REPO) / WEIGHTS, 1000)
    os.truncate(cache.snapshot(REPO) / "tokenizer.json", 1000)
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)


def test_the_old_commit_stays_usable_until_the_new_one_is_whole(cache: Cache) -> None:
    cache.fetch()
    new = weighing(2 * MIB)
    cache.server.move(NAME, new)
    cache.server.fail("altered", WEIGHTS, at=5)
    assert type(cache.fetch()[0]) is Refusal
    found = look(Repo(NAME, "main"), cache.root)
    assert found is not None
    assert (found.directory, found.missing) == (cache.snapshot(REPO), ())
    cache.server.heal()
    assert cache.fetch()[0] == Done()
    found = look(Repo(NAME, "main"), cache.root)
    assert found is not None
    assert found.directory == cache.snapshot(new)


def test_who_holds_the_librarys_lock_and_does_nothing_is_named(cache: Cache) -> None:
    lock = cache.root / ".locks/models--tiny--llama" / f"{REPO.files[WEIGHTS].etag}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        last, _ = cache.fetch(seconds=3)
    assert type(last) is Refusal
    assert last.code == "hub/locked"
    assert str(lock) in last.text
    assert cache.fetch()[0] == Done()


def test_a_lock_file_that_nobody_holds_is_no_lock(cache: Cache) -> None:
    lock = cache.root / ".locks/models--tiny--llama" / f"{REPO.files[WEIGHTS].etag}.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert cache.fetch()[0] == Done()


def test_two_processes_fetch_one_file_once(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    first = cache.start(seconds=600)
    first.until(Planned)
    first.go_on()
    cache.server.wait(lambda: cache.server.sent(WEIGHTS) == MIB)
    second = cache.start(seconds=600)
    second.until(Planned)
    second.go_on()
    cache.server.release()
    assert (first.finish(), second.finish()) == (Done(), Done())
    assert cache.server.sent(WEIGHTS) == REPO.files[WEIGHTS].size


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    size = 1 << 60
    listed = hub.repo({**MODEL, WEIGHTS: b"x" * 200_000})
    huge = listed.files[WEIGHTS]
    huge.__dict__["size"] = size  # what the hub says of it
    with hub.serve({NAME: listed}) as server:
        last, fetcher = Cache(tmp_path / "hub", server).fetch()
        assert server.files("cdn") == []
    assert type(last) is Refusal
    assert last.code == "hub/disk"
    assert last.fields["needed"] >= size // 10**6
    assert 0 < last.fields["free"] < size // 10**6
    assert fetcher.said == []


def test_a_cache_that_cannot_be_written_is_named(cache: Cache) -> None:
    cache.root.write_text("a file")
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/cache"
    assert str(cache.root) in last.text


def test_a_small_file_does_not_fill_the_disk(cache: Cache) -> None:
    """A body of 200 MB in place of one of 20 kB."""
    cache.server.fail("long", "tokenizer.json", at=200 * MIB)
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/answer"
    assert cache.server.sent("tokenizer.json") < 100 * MIB
    assert max(path.stat().st_size for path in cache.root.rglob("*") if path.is_file()) <= 64 * MIB


@pytest.mark.slow
def test_a_small_file_of_unknown_size_is_given_up(cache: Cache) -> None:
    cache.server.fail("silent", "tokenizer.json", method="HEAD")
    last, _ = cache.fetch(seconds=2)
    assert type(last) is Refusal
    assert last.code == "hub/timeout"
    cache.server.heal()
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)


def test_a_fetcher_killed_in_a_small_file_leaves_nothing_for_ever(cache: Cache) -> None:
    cache.server.fail("stall", "tokenizer.json", at=100, times=1)
    first = cache.start()
    cache.server.wait(lambda: cache.server.sent("tokenizer.json") == 100)
    first.kill()
    cache.server.release()
    assert cache.fetch()[0] == Done()
    blobs = {path.name for path in (cache.storage / "blobs").iterdir()}
    assert blobs == {file.etag for file in REPO.files.values()}


def test_a_hub_without_its_listing_is_not_taken_for_one_without_a_file(cache: Cache) -> None:
    cache.server.fail("absent", "info")
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/no-repo"


@pytest.mark.parametrize("endpoint", ["ftp://x", "nonsense", "http://", "file:///etc"])
def test_an_endpoint_that_is_none(cache: Cache, endpoint: str) -> None:
    last, _ = cache.fetch(HF_ENDPOINT=endpoint)
    assert type(last) is Refusal
    assert last.code == "hub/endpoint"
    assert endpoint in last.text


def test_a_hub_that_is_not_there(cache: Cache) -> None:
    last, _ = cache.fetch(HF_ENDPOINT="http://127.0.0.1:1")
    assert type(last) is Refusal
    assert last.code == "hub/unreachable"
    assert "127.0.0.1:1" in last.text


class Hostile(File):
    """A file that the listing names rightly, and whose own answer does not."""

    @property
    def etag(self) -> str:
        return "../../../../outside"


def test_an_etag_that_leaves_the_cache_is_refused(cache: Cache, tmp_path: Path) -> None:
    config = REPO.files["config.json"]
    files = {**REPO.files, "config.json": Hostile(config.name, config.source)}
    cache.server.move(NAME, replace(REPO, files=files))
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/answer"
    assert not list(tmp_path.rglob("outside*"))


def test_a_commit_that_is_none_is_refused(cache: Cache, tmp_path: Path) -> None:
    cache.server.move(NAME, replace(REPO, commit="../../../outside"))
    last, _ = cache.fetch()
    assert type(last) is Refusal
    assert last.code == "hub/answer"
    assert not list(tmp_path.rglob("outside*"))
