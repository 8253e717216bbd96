"""`doctor`: every lane, usable or with its reasons."""

from __future__ import annotations

from anyio import to_thread

from caldrix_protocol.messages import Doctor, Done, Lane, Message
from caldrixd.handlers.context import Client, Services
from caldrixd.lanes import choose


async def handle(request: Doctor, client: Client, services: Services) -> Message:
    """The probes run with the daemon's environment, not the client's: they say what the daemon could use."""
    for name in choose.ORDER:
        found = await to_thread.run_sync(
            choose.probe, name, services.config.environment, abandon_on_cancel=True
        )
        client.send(
            Lane(
                name=found.name,
                usable=found.usable,
                reasons=tuple(reason.text for reason in found.reasons),
                details=found.details,
                images=found.images,
                speculation=found.speculation,
            )
        )
    return Done()
