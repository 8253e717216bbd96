"""The daemon's side of downloads: who shares one, who leaves, and what becomes of the process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from caldrix_protocol.messages import Planned, Status
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.process import Fetches, Wanted
from caldrixd.models.hub import Repo
from tests.fetcher.fetching import MIB, NAME, WEIGHTS, Cache, weighing
from tests.support import hub

pytestmark = pytest.mark.anyio
REPO = weighing(2 * MIB)
SIZE = REPO.files[WEIGHTS].size


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with hub.serve({NAME: REPO}) as server:
        yield Cache(tmp_path / "hub", server)


@asynccontextmanager
async def downloads(seconds: float = 30.0) -> AsyncIterator[Fetches]:
    async with anyio.create_task_group() as tasks:
        yield Fetches(tasks, seconds)
    assert children() == []


def children() -> list[int]:
    """The fetchers that this process has started; other tests leave it other children."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if b"caldrixd.fetcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Client:
    """Someone who wants the model; `hears` is set at the first word on the download."""

    def __init__(self, cache: Cache, **more: str) -> None:
        self.heard: list[Any] = []
        self.hears = anyio.Event()
        self.refusal: Refused | None = None
        self.missing = 0
        self.scope = anyio.CancelScope()
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(cache.root.parent),
            "HF_HUB_CACHE": str(cache.root),
            **cache.server.environment,
            **more,
        }
        self.wanted = Wanted(NAME, Repo(NAME, "main"), environment)

    def report(self, message: Any) -> None:
        self.heard.append(message)
        self.hears.set()

    async def accept(self, plan: Planned) -> None:
        self.missing = plan.missing_bytes

    async def want(self, fetches: Fetches) -> None:
        with self.scope:
            try:
                await fetches.fetch(self.wanted, self.report, self.accept)
            except Refused as refused:
                self.refusal = refused

    @property
    def said(self) -> list[str]:
        return [message.code for message in self.heard if type(message) is Status]


class Poor(Client):
    """One whose memory the model does not fit."""

    async def accept(self, plan: Planned) -> None:
        raise Refused("run/memory", model=NAME, needed=2, free=1, ctx=7)


async def test_a_download_is_one_for_each_place_repo_revision_and_token(cache: Cache) -> None:
    same = Client(cache, CALDRIX_OFFLINE="0").wanted.key
    assert same == Client(cache).wanted.key
    others = ({"HF_TOKEN": "x"}, {"HF_TOKEN_PATH": "/x"}, {"HF_HOME": "/x"})
    for other in (*others, {"HF_ENDPOINT": "http://other"}, {"HF_HUB_CACHE": "/elsewhere"}):
        assert Client(cache, **other).wanted.key != same


async def stalled(cache: Cache) -> None:
    """Wait until the hub has sent the first MiB of the weights."""
    await anyio.to_thread.run_sync(cache.server.wait, lambda: cache.server.sent(WEIGHTS) == MIB)


async def test_all_who_join_hear_everything_and_one_download_is_made(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    clients = [Client(cache) for _ in range(5)]
    async with downloads() as fetches, anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.want, fetches)
            await client.hears.wait()
        await stalled(cache)
        cache.server.release()
    assert [client.refusal for client in clients] == [None] * 5
    assert {tuple(client.said) for client in clients} == {tuple(clients[0].said)}
    assert cache.server.sent(WEIGHTS) == SIZE
    assert sum(request.what == "info" for request in cache.server.requests) == 1


async def test_a_model_that_does_not_fit_is_not_fetched(cache: Cache) -> None:
    poor = Poor(cache)
    async with downloads() as fetches:
        await poor.want(fetches)
    assert poor.refusal is not None
    assert poor.refusal.fields["ctx"] == 7
    assert WEIGHTS not in cache.server.files()


async def test_who_is_refused_leaves_the_download_to_who_is_not(cache: Cache) -> None:
    poor, rich = Poor(cache), Client(cache)
    async with downloads() as fetches, anyio.create_task_group() as tasks:
        tasks.start_soon(rich.want, fetches)
        tasks.start_soon(poor.want, fetches)
    assert (rich.refusal, cache.server.sent(WEIGHTS)) == (None, SIZE)
    assert poor.refusal is not None
    assert poor.refusal.code == "run/memory"


async def test_the_last_to_leave_ends_the_download_and_the_next_goes_on(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    first, second, third = Client(cache), Client(cache), Client(cache)
    async with downloads() as fetches, anyio.create_task_group() as tasks:
        for client in (first, second):
            tasks.start_soon(client.want, fetches)
            await client.hears.wait()
        await stalled(cache)
        first.scope.cancel()
        (process,) = children()
        os.kill(process, 0)
        second.scope.cancel()
        tasks.start_soon(third.want, fetches)
    cache.server.release()
    assert third.refusal is None
    assert (first.missing, second.missing) == (SIZE, SIZE)
    assert SIZE - MIB <= third.missing == cache.server.sent(WEIGHTS) - MIB
    assert cache.server.sent(WEIGHTS) - SIZE <= MIB
    assert (cache.snapshot(REPO) / WEIGHTS).stat().st_size == SIZE


async def test_a_fetcher_that_is_killed_is_a_refusal_for_all(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    clients = [Client(cache), Client(cache)]
    async with downloads() as fetches, anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.want, fetches)
            await client.hears.wait()
        (process,) = children()
        os.kill(process, signal.SIGKILL)
    cache.server.release()
    for client in clients:
        assert client.refusal is not None
        assert client.refusal.code == "hub/fetcher-died"
    assert clients[0].refusal is not clients[1].refusal


async def test_a_token_is_in_no_command_line(cache: Cache) -> None:
    cache.server.fail("stall", WEIGHTS, at=MIB, times=1)
    client = Client(cache, HF_TOKEN=hub.MEMBER)
    async with downloads() as fetches, anyio.create_task_group() as tasks:
        tasks.start_soon(client.want, fetches)
        await stalled(cache)
        (process,) = children()
        assert hub.MEMBER.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        cache.server.release()
    assert client.refusal is None
