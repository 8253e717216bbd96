"""All workers of the daemon: one for each model and lane, shared by everyone who opens it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import anyio
import anyio.abc

from caldrix_protocol.refusals import Refused
from caldrixd import log
from caldrixd.worker.process import ENDED, LOADING, READY, Key, Worker


@dataclass
class Lease:
    """One hold on a worker. A model that somebody holds is not unloaded for being idle."""

    worker: Worker
    held: bool = True


class Pool:
    """`tasks` runs the workers; it lives as long as the pool is used.

    A worker is unloaded when, for `idle_unload` seconds, nobody has leased it and it answered nothing.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, idle_unload: float) -> None:
        self._tasks = tasks
        self._idle_unload = idle_unload
        self._workers: dict[Key, Worker] = {}
        self._changed = anyio.Event()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def find(self, key: Key) -> Worker | None:
        """The worker of `key` that is loading or loaded."""
        worker = self._workers.get(key)
        return worker if worker is not None and worker.state != ENDED else None

    async def gone(self, key: Key) -> None:
        """Wait for the end of a worker of `key` that is on its way out and still holds its memory."""
        worker = self._workers.get(key)
        if worker is not None and worker.state == ENDED:
            await worker.ended.wait()

    def named(self, model: str) -> list[Worker]:
        """The workers that were opened as `model`, or whose directory it is."""
        return [worker for worker in self if model in worker.names and worker.state != ENDED]

    def start(self, worker: Worker) -> Worker:
        """Run a new worker; `find` has none of its key."""
        self._workers[worker.key] = worker
        self._tasks.start_soon(self._run, worker)
        return worker

    async def _run(self, worker: Worker) -> None:
        try:
            await worker.run()
        except Exception as error:
            log.incident(error)
        finally:
            if self._workers.get(worker.key) is worker:
                del self._workers[worker.key]
            self._change()

    def lease(self, worker: Worker) -> Lease:
        worker.leases += 1
        return Lease(worker)

    def release(self, lease: Lease) -> None:
        """Give a lease back, once or more often. A load that nobody waits for any more is ended."""
        if not lease.held:
            return
        lease.held = False
        worker = lease.worker
        worker.leases -= 1
        worker.idle_since = time.monotonic()
        if not worker.leases and worker.state == LOADING:
            worker.stop(Refused("worker/unloaded", model=worker.name))
        self._change()

    def idle(self) -> list[Worker]:
        """Loaded workers that nobody holds or waits for, the longest unused first."""
        free = [worker for worker in self if worker.state == READY and not worker.leases and not worker.busy]
        return sorted(free, key=lambda worker: worker.idle_since)

    async def unload(self, worker: Worker, refused: Refused) -> None:
        """End a worker and wait until it is gone, and its memory with it."""
        worker.stop(refused)
        await worker.ended.wait()

    async def unload_idle(self) -> None:
        """Unload what was idle for too long, for ever."""
        while True:
            changed = self._changed
            now = time.monotonic()
            waits = [worker.idle_since + self._idle_unload - now for worker in self.idle()]
            with anyio.move_on_after(max(0.0, min(waits)) if waits else None):
                await changed.wait()
                continue
            for worker in self.idle():
                if time.monotonic() - worker.idle_since >= self._idle_unload:
                    logging.info("worker %d was idle for %g s", worker.pid, self._idle_unload)
                    await self.unload(worker, Refused("worker/unloaded", model=worker.name))

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
