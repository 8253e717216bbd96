"""`pin`: the commits that the aliases' repos are at, for the table of aliases."""

from __future__ import annotations

from caldrix_protocol.messages import Done, Known, Message, Pin
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.process import look_up_commits
from caldrixd.handlers.context import Client, Services
from caldrixd.models import aliases, hub


async def handle(request: Pin, client: Client, services: Services) -> Message:
    """Refused "hub/pin-offline"; a repo of which the hub does not tell is a notice."""
    environment = {**services.config.environment, **request.environment}
    if variable := hub.offline_variable(environment):
        raise Refused("hub/pin-offline", variable=variable)
    names = {alias.repo: (name, alias.licence) for name, alias in aliases.HUB.items()}

    async def report(message: Message) -> None:
        if type(message) is Known:
            name, licence = names[message.repo]
            message = message._replace(alias=name, licence=licence)
        client.send(message)

    await look_up_commits(list(names), environment, services.fetches.seconds, report)
    return Done()
