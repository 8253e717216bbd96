"""`pull`: a model made complete in the cache, without loading it."""

from __future__ import annotations

from anyio import to_thread

from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Done, Message, Planned, Pull
from caldrixd.handlers.context import Client, Services
from caldrixd.handlers.look import look
from caldrixd.handlers.obtain import obtain
from caldrixd.models.resolve import resolve


async def handle(request: Pull, client: Client, services: Services) -> Message:
    """Disk is checked, memory is not: what is fetched now may run elsewhere or later."""
    resolved = await to_thread.run_sync(resolve, request.model)
    directory = await obtain(resolved, request.environment, client.send, services, _accept)
    await to_thread.run_sync(look, directory)
    client.send(as_status("status/pulled", model=request.model))
    return Done()


async def _accept(planned: Planned) -> None:
    """Whatever its size."""
