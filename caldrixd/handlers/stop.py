"""`stop`: unload one model, all models, or end the daemon."""

from __future__ import annotations

import os
import sys

from caldrix_protocol.build import find_build
from caldrix_protocol.messages import Done, Message, Stop
from caldrix_protocol.refusals import Refused
from caldrixd.handlers.context import Client, Services
from caldrixd.handlers.meant import meant


async def handle(request: Stop, client: Client, services: Services) -> Message:
    """`done` comes when the models' memory is free, or when another daemon could start."""
    if request.daemon:
        if request.if_idle and services.shutdown.asked.is_set():  # asking again would cut replies short
            raise Refused("daemon/stopping")
        if request.if_idle and _needed(services):
            raise Refused("daemon/in-use", pid=os.getpid())
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


def _needed(services: Services) -> bool:
    """Whether anybody else uses this daemon, or a service manager would only start the same one again."""
    if services.traffic.requests > 1 or any(worker.leases for worker in services.pool):
        return True
    return services.config.activation.sockets > 0 and find_build(sys.path) == services.config.build
