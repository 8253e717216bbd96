"""`pin`: the commits that the aliases' repos are at, written into the table of aliases."""

from __future__ import annotations

from anyio import to_thread

from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Done, Known, Message, Pin
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.process import look_up_commits
from caldrixd.handlers.context import Client, Services
from caldrixd.models import aliases, hub, pins


async def handle(request: Pin, client: Client, services: Services) -> Message:
    """A repo of which the hub does not tell is a notice, and in the end Refused "pin/incomplete".

    Refused also "pin/offline" and what `pins` refuses, before anything is asked, and "hub/..." when the hub
    does not answer.
    """
    environment = services.environment(request.environment)
    if variable := hub.offline_variable(environment):
        raise Refused("pin/offline", variable=variable)
    await to_thread.run_sync(pins.check_writable)
    commits: dict[str, str] = {}

    async def report(message: Message) -> None:
        if type(message) is not Known:
            client.send(message)
            return
        commits[message.repo] = message.revision
        for name, alias in aliases.HUB.items():
            if alias.repo == message.repo:
                client.send(message._replace(alias=name, licence=alias.licence))

    repos = list(dict.fromkeys(alias.repo for alias in aliases.HUB.values()))
    failed: Refused | None = None
    try:
        await look_up_commits(repos, environment, services.fetches.seconds, report)
    except Refused as refused:
        failed = refused
    if commits:
        changed = await to_thread.run_sync(pins.rewrite, commits)
        client.send(as_status("status/pinned", path=aliases.TABLE, page=pins.PAGE, count=changed))
    if failed is not None:
        raise failed
    left = [name for name, alias in aliases.HUB.items() if alias.repo not in commits]
    if left:
        raise Refused("pin/incomplete", names=", ".join(left), path=aliases.TABLE)
    return Done()
