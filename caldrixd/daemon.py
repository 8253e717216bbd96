"""The composition root: one daemon for each user, from its lock to its end."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.abc

from caldrix_protocol.address import Address, ensure_directory
from caldrix_protocol.refusals import Refused
from caldrixd.activation import inherited_listener, notify
from caldrixd.config import Config
from caldrixd.fetcher.process import Fetches
from caldrixd.handlers.context import Services, Shutdown
from caldrixd.server import Server
from caldrixd.worker.pool import Pool

BACKLOG = 1024
PRIVATE = 0o600
LOCK_PAUSES = (0.0, 0.01, 0.03, 0.1)


def run(config: Config) -> int:
    """Serve until told to stop; the exit status. Refused when this user has a daemon, or none can listen."""
    os.umask(0o077)
    ensure_directory(config.address)
    lock = take_lock(config.address.lock)
    doorway = open_doorway(config)
    return anyio.run(_serve, config, doorway, lock)


def take_lock(path: str) -> int:
    """The descriptor that holds the daemon's lock until it is closed. Refused "daemon/already-running"."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
    if not _locked(descriptor):
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise Refused("daemon/already-running", pid=holder or "unknown")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _locked(descriptor: int) -> bool:
    """Whether the lock could be had. A client that looks whether it is held holds it for a moment itself."""
    for pause in LOCK_PAUSES:
        time.sleep(pause)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


@dataclass(frozen=True)
class Doorway:
    """The listening socket. `identity` is (device, inode) of its file if it is ours to watch and remove."""

    listener: socket.socket
    path: str
    identity: tuple[int, int] | None

    def intact(self) -> bool:
        return self.identity is None or _identity(self.path) == self.identity

    def remove(self) -> None:
        if self.identity is not None and self.intact():
            os.unlink(self.path)


def open_doorway(config: Config) -> Doorway:
    """The service manager's socket if it gave one, else our own. The caller holds the daemon's lock."""
    listener = inherited_listener(config.activation.sockets)
    if listener is not None:
        return Doorway(listener, config.address.socket, None)
    return bind(config.address)


def bind(address: Address) -> Doorway:
    """Listen at the address, in place of what a dead daemon left there. Refused "socket/in-the-way"."""
    path = address.socket
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise Refused("socket/in-the-way", path=path)
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, PRIVATE)
    listener.listen(BACKLOG)
    return Doorway(listener, path, _identity(path))


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


async def _serve(config: Config, doorway: Doorway, lock: int) -> int:
    shutdown = Shutdown()
    async with anyio.create_task_group() as tasks:
        pool = Pool(tasks, config.idle_unload)
        services = Services(config, pool, Fetches(tasks, config.fetch_seconds), shutdown)
        server = Server(doorway.listener, services, tasks)
        await tasks.start(_watch_signals, shutdown)
        tasks.start_soon(server.accept)
        tasks.start_soon(services.pool.unload_idle)
        tasks.start_soon(_watch_doorway, config, doorway, shutdown)
        tasks.start_soon(_feed_watchdog, config)
        notify(config.activation.notify, "READY=1")
        logging.info("listening at %s", doorway.path)
        await shutdown.asked.wait()
        await _stop(config, doorway, lock, server, services)
        tasks.cancel_scope.cancel()
    return shutdown.status


async def _stop(config: Config, doorway: Doorway, lock: int, server: Server, services: Services) -> None:
    """Close the listener, remove the socket, finish replies, end workers, release the lock: in this order."""
    logging.info("stopping: %s", services.shutdown.reason)
    notify(config.activation.notify, "STOPPING=1")
    server.close_listener()
    doorway.remove()
    await _drain(config.drain_seconds, server, services.shutdown)
    refused = Refused("daemon/stopping")
    server.refuse(refused)
    for worker in services.pool:
        worker.stop(refused)
    for worker in services.pool:
        await worker.ended.wait()
    os.close(lock)
    services.shutdown.over.set()
    await server.say_goodbye(refused)


async def _drain(seconds: float, server: Server, shutdown: Shutdown) -> None:
    async def hurry() -> None:
        await shutdown.urgent.wait()
        tasks.cancel_scope.cancel()

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hurry)
            await server.finish()
            tasks.cancel_scope.cancel()


async def _watch_signals(shutdown: Shutdown, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            shutdown.ask(f"received {number.name}")


async def _watch_doorway(config: Config, doorway: Doorway, shutdown: Shutdown) -> None:
    """End when the socket's file is not ours any more: nobody could reach this daemon.

    One that ends already has removed it itself, and its running replies are not to be hurried by that.
    """
    while doorway.intact():
        await anyio.sleep(config.socket_check_seconds)
    if not shutdown.asked.is_set():
        shutdown.ask(f"{doorway.path} was removed or replaced", status=1)


async def _feed_watchdog(config: Config) -> None:
    """Tell the service manager that the main loop runs."""
    if not config.activation.watchdog_seconds:
        return
    while True:
        notify(config.activation.notify, "WATCHDOG=1")
        await anyio.sleep(config.activation.watchdog_seconds / 2)
