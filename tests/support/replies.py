"""Drives an engine until it is idle and collects what each request got."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from caldrix_protocol.refusals import Refused
from caldrixd.engine.engine import Engine
from caldrixd.engine.session import TokenEvent, Usage


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None
    refused: Refused | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.finish is None, "an event after the end"
        if event.token is not None:
            self.tokens.append(event.token)
        self.finish, self.usage, self.refused = event.finish, event.usage, event.refused


def collect(replies: dict[int, Reply], events: Iterable[TokenEvent]) -> None:
    for event in events:
        replies.setdefault(event.id, Reply()).add(event)


def drain(engine: Engine) -> dict[int, Reply]:
    """Replies by request id."""
    replies: dict[int, Reply] = {}
    while engine.busy:
        collect(replies, engine.step())
    return replies
