"""Fetchers on a file system whose locks do not hold: each writes a file of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldrix_protocol.messages import Done, Planned
from tests.fetcher.fetching import MIB, NAME, WEIGHTS, Cache, Fetcher, weighing
from tests.support import hub

REPO = weighing(5 * MIB)
SIZE = REPO.files[WEIGHTS].size

# As NFS without its lock service and some cluster file systems do: whoever asks for a lock has it.
LYING = "import fcntl\nfcntl.flock = lambda *_: None\n"
# As a file system without locks does.
LACKING = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with hub.serve({NAME: REPO}) as server:
        yield Cache(tmp_path / "hub", server)


def start(cache: Cache, locks: str) -> Fetcher:
    """A fetcher with these locks, which fetches weights."""
    directory = cache.root.parent / "python"
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(locks)
    paths = [str(directory), *(path for path in sys.path if path)]
    fetcher = cache.start(seconds=60, PYTHONPATH=os.pathsep.join(paths))
    fetcher.until(Planned)
    fetcher.go_on()
    return fetcher


def stalled(cache: Cache, at: int) -> Fetcher:
    """A fetcher that has written up to there, and whose host sends no more until it is released."""
    cache.server.fail("stall", WEIGHTS, at=at, times=1)
    sent = cache.server.sent(WEIGHTS)
    fetcher = start(cache, LYING)
    cache.server.wait(lambda: cache.server.sent(WEIGHTS) > sent)
    fetcher.until_downloaded(at - MIB)
    return fetcher


def whole(cache: Cache) -> bool:
    blobs = cache.storage / "blobs"
    names = {file.etag for file in REPO.files.values()}
    with REPO.files[WEIGHTS].open() as data:
        return {path.name for path in blobs.iterdir()} == names and (
            (cache.snapshot(REPO) / WEIGHTS).read_bytes() == data.read()
        )


def test_a_slow_one_does_not_write_into_what_a_fast_one_finished(cache: Cache) -> None:
    """What it would write is wrong, which only it could notice."""
    cache.server.fail("altered", WEIGHTS, at=3 * MIB, times=1)
    slow = stalled(cache, 2 * MIB)
    fast = start(cache, LYING)
    assert fast.finish() == Done()
    assert whole(cache)
    cache.server.release()
    assert slow.finish() == Done()
    assert whole(cache)
    assert cache.server.sent(WEIGHTS) <= 2 * SIZE


def test_two_at_once_make_one_whole_file(cache: Cache) -> None:
    first = stalled(cache, 2 * MIB)
    second = stalled(cache, 3 * MIB)
    cache.server.release()
    assert (first.finish(), second.finish()) == (Done(), Done())
    assert whole(cache)


def test_one_that_begins_anew_takes_nothing_from_another(cache: Cache) -> None:
    """The first is told to drop what it has, when the second goes on with that already."""
    partial = cache.partial(REPO)
    partial.parent.mkdir(parents=True)
    with REPO.files[WEIGHTS].open() as data:
        partial.write_bytes(data.read(MIB))
    cache.server.fail("silent", WEIGHTS, host="cdn", times=1)
    first = start(cache, LYING)
    cache.server.wait(lambda: "cdn" in [request.host for request in cache.server.requests])
    second = stalled(cache, 3 * MIB)
    cache.server.fail("416", WEIGHTS, host="cdn", times=1)
    cache.server.release()
    assert (first.finish(), second.finish()) == (Done(), Done())
    assert whole(cache)


def test_a_lock_file_whose_owner_died_is_none_where_there_are_no_locks(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=2 * MIB, times=1)
    killed = start(cache, LACKING)
    cache.server.wait(lambda: cache.server.sent(WEIGHTS) == 2 * MIB)
    killed.until_downloaded(MIB)
    killed.kill()
    cache.server.release()
    assert start(cache, LACKING).finish() == Done()
    assert whole(cache)
    assert cache.server.sent(WEIGHTS) - SIZE <= MIB
