"""`ps`: the loaded models."""

from __future__ import annotations

import time

from caldrix_protocol.messages import Done, Loaded, Message, Ps
from caldrixd.handlers.context import Client, Services
from caldrixd.lanes.lane import Variant
from caldrixd.worker.process import ENDED, LOADING, Worker

USUAL = (Variant().isa, Variant().kernels)


async def handle(request: Ps, client: Client, services: Services) -> Message:
    for worker in services.pool:
        if worker.state != ENDED:
            client.send(_loaded(worker))
    return Done()


def _loaded(worker: Worker) -> Loaded:
    idle = worker.state != LOADING and not worker.busy
    return Loaded(
        model=worker.name,
        lane=worker.key.lane,
        state="answering" if worker.busy else "idle" if idle else "loading",
        pid=worker.pid,
        size=worker.size,
        leases=worker.leases,
        idle_seconds=max(0.0, time.monotonic() - worker.idle_since) if idle else 0.0,
        variant=" ".join(part for part in (worker.key.isa, worker.key.kernels) if part not in USUAL),
    )
