"""`generate`: one reply of an open model, relayed from its worker."""

from __future__ import annotations

from caldrix_protocol.messages import Generate, Message
from caldrix_protocol.refusals import Refused
from caldrixd.handlers.context import Client, Opening, Services
from caldrixd.handlers.open import load


async def handle(request: Generate, client: Client, services: Services) -> Message:
    opening = await _opening(request.handle, client, services)
    worker = opening.lease.worker
    stream = worker.begin(request, client.blobs, opening.settings, client.send)
    client.cancel = lambda: worker.abort(stream)
    try:
        await stream.ended.wait()
    finally:
        worker.leave(stream)
    return stream.final


async def _opening(handle: int, client: Client, services: Services) -> Opening:
    """The open model, loaded again if its worker has ended since it was opened."""
    opening = client.openings.get(handle)
    if opening is None:
        raise Refused("daemon/bad-request", reason=f"there is no handle {handle}")
    if not opening.lease.worker.alive:
        services.pool.release(opening.lease)
        opening = await load(opening.request, client, services)
        client.openings[handle] = opening
    return opening
