"""The daemon's handles on fetcher processes: one for each download, shared by all who want the model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc

from caldrix_protocol import codec, framing, limits
from caldrix_protocol.messages import FROM_FETCHER, Done, Message, Planned, Progress, Refusal
from caldrix_protocol.refusals import Refused
from caldrixd import log
from caldrixd.fetcher import demo
from caldrixd.models.hub import DEFAULT_ENDPOINT, Repo, cache_root, offline_variable

STOP_SECONDS = 5.0
# What says which token the library sends, or which file has it.
TOKEN_VARIABLES = ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_HUB_DISABLE_IMPLICIT_TOKEN")
PROGRESS_SECONDS = 0.1  # a fast download says more than a client needs

Report = Callable[[Message], Awaitable[None]]
# What a request says to a plan before its weights are fetched: nothing, or Refused.
Accept = Callable[[Planned], Awaitable[None]]


async def fetch_demo(cache: Path, environment: Mapping[str, str], report: Report) -> Path:
    """Make the demo model complete in `cache` and return its directory.

    `environment` is the fetcher's whole environment (the daemon's allow-listed one with the client's
    variables over it). `report` gets Status and Progress messages. Raises Refused "demo/...". Cancelling
    stops the fetch.
    """
    target = demo.model_directory(cache)
    if demo.is_complete(target):
        return target
    async with _running([demo.ALIAS, str(cache)], environment) as process:
        last = await _relay(process, report)
    _raise_unless_done(last, Refused("demo/fetcher-died", reason=f"status {process.returncode}"))
    return target


async def look_up_commits(
    names: list[str], environment: Mapping[str, str], seconds: float, report: Report
) -> None:
    """Report a Known with the commit of each repo, or a Notice. Raises Refused "hub/..."."""
    arguments = ["commits", str(cache_root(environment)), f"{seconds}", *names]
    async with _running(arguments, with_library(environment, seconds)) as process:
        last = await _relay(process, report)
    died = f"status {process.returncode}"
    _raise_unless_done(last, Refused("hub/fetcher-died", model="the aliases", reason=died))


@dataclass(frozen=True)
class Wanted:
    """A repo that a request wants, as the user called it, with the fetcher's whole environment."""

    model: str
    repo: Repo
    environment: Mapping[str, str]

    @property
    def cache(self) -> Path:
        return cache_root(self.environment)

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for requests that one download serves. What a token may read, it may read alone."""
        offline = offline_variable(self.environment) or ""
        endpoint = self.environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
        token = (self.environment.get(name, "") for name in TOKEN_VARIABLES)
        return endpoint, str(self.cache), self.repo.name, self.repo.revision, offline, *token


class Fetches:
    """All downloads from hubs that run. `seconds` is how long a host may be silent."""

    def __init__(self, tasks: anyio.abc.TaskGroup, seconds: float) -> None:
        self._tasks = tasks
        self.seconds = seconds
        self._fetches: dict[tuple[str, ...], Fetch] = {}

    async def fetch(self, wanted: Wanted, report: Callable[[Message], None], accept: Accept) -> None:
        """Return when the model is complete in the cache. Raises Refused "hub/..." and what `accept` raises.

        Whoever wants the same joins the download that runs, and hears what was said of it so far. The last to
        be cancelled or refused ends it.
        """
        fetch = self._fetches.get(wanted.key)
        if fetch is None or fetch.ending:
            fetch = self._fetches[wanted.key] = Fetch(wanted, self.seconds, after=fetch)
            self._tasks.start_soon(self._run, fetch)
        with fetch.joined(report):
            await fetch.planned.wait()
            if fetch.plan is not None:
                await accept(fetch.plan)
                fetch.accepted.set()
            await fetch.over.wait()
        fetch.raise_refusal()

    def busy(self, storage: Path) -> bool:
        """Whether a download into this directory of a cache runs."""
        wanted = [fetch.wanted for fetch in self._fetches.values()]
        return any(one.repo.storage(one.cache) == storage for one in wanted)

    async def _run(self, fetch: Fetch) -> None:
        try:
            await fetch.run()
        finally:
            if self._fetches.get(fetch.wanted.key) is fetch:
                del self._fetches[fetch.wanted.key]


class Joined(NamedTuple):
    """Who hears of a fetch; compared by identity, since two may be equal."""

    report: Callable[[Message], None]


class Fetch:
    """One download. `plan` is known once `planned` is set, which it also is at the end; then `over` is."""

    def __init__(self, wanted: Wanted, seconds: float, *, after: Fetch | None = None) -> None:
        self.wanted = wanted
        self.plan: Planned | None = None
        self.planned = anyio.Event()
        self.accepted = anyio.Event()
        self.over = anyio.Event()
        self.ending = False
        self._seconds = seconds
        self._after = after
        self._scope = anyio.CancelScope()
        self._listeners: list[Joined] = []
        self._said: list[Message] = []
        self._progress: Message | None = None
        self._told = 0.0  # when progress was last passed on
        self._refusal: Refused | None = None

    @contextmanager
    def joined(self, report: Callable[[Message], None]) -> Iterator[None]:
        """Hear what was and will be said. The download ends when nobody is left."""
        for message in (*self._said, *([self._progress] if self._progress else [])):
            report(message)
        listener = Joined(report)
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners = [other for other in self._listeners if other is not listener]
            if not self._listeners:
                self.ending = True
                self._scope.cancel()

    def raise_refusal(self) -> None:
        """A refusal of its own for each who waited."""
        if self._refusal is not None:
            raise Refused(self._refusal.code, **self._refusal.fields)

    async def run(self) -> None:
        """Run the fetcher process to its end. A fetch that was given up before has ended then."""
        try:
            with self._scope:
                if self._after is not None:
                    await self._after.over.wait()
                    self._after = None
                await self._fetch()
        except Refused as refused:
            self._refusal = refused
        except Exception as error:
            limited = limits.exhausted(error, "caldrixd")
            self._refusal = limited or Refused("daemon/internal", id=log.incident(error))
        finally:
            self.ending = True
            self.planned.set()
            self.over.set()

    async def _fetch(self) -> None:
        repo, model = self.wanted.repo, self.wanted.model
        arguments = ["hub", str(self.wanted.cache), model, repo.name, repo.revision, f"{self._seconds}"]
        environment = with_library(self.wanted.environment, self._seconds)
        async with _running(arguments, environment) as process, anyio.create_task_group() as tasks:
            tasks.start_soon(self._let_go_on, process)
            last = await _relay(process, self._hear)
            tasks.cancel_scope.cancel()
        died = Refused("hub/fetcher-died", model=model, reason=f"status {process.returncode}")
        _raise_unless_done(last, died)

    async def _let_go_on(self, process: anyio.abc.Process) -> None:
        await self.accepted.wait()
        assert process.stdin is not None
        try:
            await process.stdin.send(b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # it has ended, which its stdout tells

    async def _hear(self, message: Message) -> None:
        if type(message) is Planned:
            self.plan = message
            self.planned.set()
            return
        if type(message) is Progress:
            self._progress = message
            now = time.monotonic()
            if message.done < message.total and now - self._told < PROGRESS_SECONDS:
                return
            self._told = now
        else:
            self._said.append(message)
        for listener in list(self._listeners):
            listener.report(message)


def with_library(environment: Mapping[str, str], seconds: float) -> dict[str, str]:
    """What makes huggingface_hub silent, plain and as patient as we are; empty variables are unset."""
    whole_seconds = str(max(1, round(seconds)))
    return {
        **{name: value for name, value in environment.items() if value},
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "critical",
        "HF_HUB_DOWNLOAD_TIMEOUT": whole_seconds,
        "HF_HUB_ETAG_TIMEOUT": whole_seconds,
    }


@asynccontextmanager
async def _running(arguments: list[str], environment: Mapping[str, str]) -> AsyncIterator[anyio.abc.Process]:
    """A fetcher process, which has ended after the block."""
    process = await anyio.open_process(
        [sys.executable, "-P", "-m", "caldrixd.fetcher", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        cwd="/",
        env=dict(environment),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        await _end(process)


async def _relay(process: anyio.abc.Process, report: Report) -> Message | None:
    """Report events until the last one; that one, or None when the process ended without it."""
    assert process.stdout is not None
    reader = framing.FrameReader()
    while True:
        while (payload := reader.next()) is not None:
            message = codec.decode(payload, FROM_FETCHER)
            if type(message) in (Done, Refusal):
                return message
            await report(message)
        try:
            reader.feed(await process.stdout.receive())
        except anyio.EndOfStream:
            return None


def _raise_unless_done(last: Message | None, died: Refused) -> None:
    if type(last) is Refusal:
        raise Refused(last.code, **last.fields)
    if type(last) is not Done:
        raise died


async def _end(process: anyio.abc.Process) -> None:
    """End of input tells the fetcher to stop; one that does not obey is killed."""
    with anyio.CancelScope(shield=True):
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(STOP_SECONDS):
            await process.wait()
        if process.returncode is None:
            process.kill()
        await process.aclose()
