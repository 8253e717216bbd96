"""What a handler gets beside its request: the client's connection and the daemon's shared parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from caldrix_protocol.messages import Message, Open, Ready
from caldrixd.config import Config
from caldrixd.fetcher.process import Fetches
from caldrixd.worker.pool import Lease, Pool
from caldrixd.worker.process import Settings

# A handler sends events as they come and returns the last one, `done` or `refused`. It may raise Refused.
Handler = Callable[[Any, "Client", "Services"], Awaitable[Message]]


@dataclass
class Shutdown:
    """The daemon's end. `ask` may come from anywhere, `over` is set when a new daemon could start."""

    asked: anyio.Event = field(default_factory=anyio.Event)
    urgent: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)
    reason: str = ""
    status: int = 0

    def ask(self, reason: str, status: int = 0) -> None:
        """End after the running replies, within the drain time; asked again: at once."""
        if self.asked.is_set():
            self.urgent.set()
        else:
            self.reason, self.status = reason, status
            self.asked.set()


@dataclass
class Traffic:
    """How many requests are being answered."""

    requests: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


@dataclass(frozen=True)
class Services:
    """The daemon's parts that requests share."""

    config: Config
    pool: Pool
    fetches: Fetches
    shutdown: Shutdown
    traffic: Traffic = field(default_factory=Traffic)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Of what is done for a request: its own variables over those of the daemon.

        A request that has a HOME has the directories below it too, wherever the daemon has its own.
        """
        left = () if "HOME" not in own else ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")
        kept = {name: value for name, value in self.config.environment.items() if name not in left}
        return {**kept, **own}


@dataclass(frozen=True)
class Opening:
    """An open model of one connection. The request is kept to load it again if its worker ends.

    `ctx` is in tokens; `waited` are the seconds this opening took; `summary` says how replies are computed.
    """

    request: Open
    lease: Lease
    ready: Ready
    ctx: int
    summary: str
    waited: float

    @property
    def settings(self) -> Settings:
        request = self.request
        return Settings(self.ctx, request.dtype, request.threads, request.max_batch)


@dataclass
class Client:
    """One connection, as its requests see it. `send` never blocks.

    `blobs` are the frames of each blob sent for this request. `cancel` is what the client's `cancel` does;
    by default the server ends the handler.
    """

    send: Callable[[Message], None]
    openings: dict[int, Opening] = field(default_factory=dict)
    blobs: dict[int, list[bytes]] = field(default_factory=dict)
    cancel: Callable[[], None] | None = None
    next_handle: int = 1

    def add(self, opening: Opening) -> int:
        """The handle of a newly opened model."""
        handle = self.next_handle
        self.next_handle += 1
        self.openings[handle] = opening
        return handle
