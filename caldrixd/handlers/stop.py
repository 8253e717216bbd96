"""`stop`: unload one model, all models, or end the daemon."""

from __future__ import annotations

from caldrix_protocol.messages import Done, Message, Stop
from caldrix_protocol.refusals import Refused
from caldrixd.handlers.context import Client, Services
from caldrixd.handlers.meant import meant


async def handle(request: Stop, client: Client, services: Services) -> Message:
    """`done` comes when the models' memory is free, or when another daemon could start."""
    if request.daemon:
        services.shutdown.ask("a client asked for it")
        await services.shutdown.over.wait()
        return Done()
    pool = services.pool
    workers = list(pool) if request.model is None else await meant(request.model, pool)
    if request.model is not None and not workers:
        raise Refused("model/not-loaded", model=request.model)
    for worker in workers:
        worker.stop(Refused("worker/unloaded", model=worker.name))
    for worker in workers:
        await worker.ended.wait()
    return Done()
