"""From what a name stands for to a directory that has all its files, fetched first if need be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from anyio import to_thread

from caldrix_protocol.address import cache_directory
from caldrix_protocol.connection import as_notice, as_status
from caldrix_protocol.messages import Message
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.process import Accept, Wanted, fetch_demo
from caldrixd.handlers.context import Services
from caldrixd.models import hub
from caldrixd.models.resolve import ResolvedModel

# The hub cannot be asked: then what the cache holds is as good as anybody can know.
AWAY = {"hub/unreachable", "hub/timeout", "hub/slow", "hub/status", "hub/web-page"}

Send = Callable[[Message], None]


async def obtain(
    resolved: ResolvedModel, own: Mapping[str, str], send: Send, services: Services, accept: Accept
) -> Path:
    """The model's directory. `own` are the client's variables; `accept` may refuse a download's plan.

    `send` gets status lines and progress. Refused "hub/..." and "demo/...".
    """
    environment = services.environment(own)
    if resolved.directory is not None:
        send(as_status("status/directory", path=resolved.directory))
        return resolved.directory
    if resolved.repo is None:
        return await _demo(resolved, environment, send)
    return await _hub(Wanted(resolved.name, resolved.repo, environment), send, services, accept)


async def _demo(resolved: ResolvedModel, environment: Mapping[str, str], send: Send) -> Path:
    fetched = False

    async def report(message: Message) -> None:
        nonlocal fetched
        fetched = True
        send(message)

    directory = await fetch_demo(Path(cache_directory(environment)), environment, report)
    if not fetched:
        send(as_status("status/cached", model=resolved.name, path=directory))
    return directory


async def _hub(wanted: Wanted, send: Send, services: Services, accept: Accept) -> Path:
    """From the cache alone when it is known to hold everything, and that to be right."""
    cached = await to_thread.run_sync(hub.look, wanted.repo, wanted.cache)
    usable = cached if cached is not None and cached.complete else None
    variable = hub.offline_variable(wanted.environment)
    if variable is not None and usable is None:
        raise _offline(wanted, cached, variable)
    fetched = False

    def report(message: Message) -> None:
        nonlocal fetched
        fetched = True
        send(message)

    settled = usable is not None and usable.certain and wanted.repo.pinned
    if variable is not None:
        settled = usable is not None and not usable.digests
    if not settled:
        try:
            await services.fetches.fetch(wanted, report, accept)
        except Refused as refused:
            if usable is None or refused.code not in AWAY:
                raise
            send(as_notice("notice/hub-unreachable", reason=refused.text))
        usable = await to_thread.run_sync(hub.look, wanted.repo, wanted.cache)
    if usable is None or not usable.complete:
        raise _incomplete(wanted, usable)
    if not fetched:
        send(as_status("status/cached", model=wanted.model, path=usable.directory))
    return usable.directory


def _offline(wanted: Wanted, cached: hub.Cached | None, variable: str) -> Refused:
    names = ", ".join(cached.missing) if cached is not None else "all its files"
    return Refused("hub/offline", variable=variable, model=wanted.model, path=wanted.cache, names=names)


def _incomplete(wanted: Wanted, found: hub.Cached | None) -> Refused:
    names = ", ".join(found.missing) if found is not None else "all its files"
    path = found.directory if found is not None else wanted.repo.storage(wanted.cache)
    return Refused("hub/incomplete", model=wanted.model, path=path, names=names)
