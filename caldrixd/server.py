"""The daemon's side of client connections: accept, greet, one request at a time, always a last event."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import anyio.abc

from caldrix_protocol import limits
from caldrix_protocol.connection import Connection, ProtocolError, answer_hello, as_refusal
from caldrix_protocol.messages import Blob, Cancel, Done, Hello, Message, Refusal, Stop, Welcome
from caldrix_protocol.refusals import Refused
from caldrixd import log
from caldrixd.channel import Channel
from caldrixd.handlers import HANDLERS
from caldrixd.handlers.context import Client, Services

FLUSH_SECONDS = 5.0
NO_DESCRIPTORS_SECONDS = 0.1
# What sending raises for a message that cannot be written: a file name, say, that is no valid text.
UNSENDABLE = (ProtocolError, ValueError)


@dataclass
class Active:
    """The request a connection is answering. `verdict` replaces its last event when it is ended early."""

    request: Message
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    verdict: Message = field(default_factory=lambda: Done(finish_reason="cancelled"))
    over: anyio.Event = field(default_factory=anyio.Event)

    def end(self, verdict: Message) -> None:
        self.verdict = verdict
        self.scope.cancel()


class Server:
    """All client connections. Handlers never let an exception out, so no client can end another's."""

    def __init__(self, listener: socket.socket, services: Services, tasks: anyio.abc.TaskGroup) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._services = services
        self._tasks = tasks
        self._sessions: set[Session] = set()
        self._accepting = anyio.CancelScope()

    async def accept(self) -> None:
        """Take connections until `close_listener`."""
        with self._accepting:
            while True:
                await anyio.wait_readable(self._listener)
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        await anyio.sleep(NO_DESCRIPTORS_SECONDS)
                    continue
                self._tasks.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        session = Session(sock, self._services)
        self._sessions.add(session)
        try:
            await session.run()
        except Exception as error:
            log.incident(error)
        finally:
            self._sessions.discard(session)
            session.close()

    def close_listener(self) -> None:
        self._accepting.cancel()
        self._listener.close()

    async def finish(self) -> None:
        """Return when every running request has ended, but for those that wait for the daemon's end."""
        for session in list(self._sessions):
            await session.finish()

    def refuse(self, refused: Refused) -> None:
        """End every running request with a refusal, but for those that wait for the daemon's end."""
        for session in self._sessions:
            session.refuse(refused)

    async def say_goodbye(self, refused: Refused) -> None:
        """Return when every client has been told, or does not read. No request is taken any more."""
        async with anyio.create_task_group() as tasks:
            for session in self._sessions:
                tasks.start_soon(session.say_goodbye, refused)


class Session:
    """One client connection."""

    def __init__(self, sock: socket.socket, services: Services) -> None:
        self._socket = sock
        self._channel = Channel(sock, Connection("daemon"))
        self._services = services
        self._client = Client(self._send_event)
        self._active: Active | None = None

    async def run(self) -> None:
        """Serve the connection until either side ends it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.write)
            try:
                await self._converse(tasks)
            except ProtocolError as error:
                await self._hang_up(Refused("daemon/bad-frame", reason=error.reason))
            except TimeoutError:
                await self._hang_up(Refused("daemon/bad-frame", reason="it did not arrive whole in time"))
            finally:
                tasks.cancel_scope.cancel()
                for opening in self._client.openings.values():
                    self._services.pool.release(opening.lease)

    async def _converse(self, tasks: anyio.abc.TaskGroup) -> None:
        uid = peer_uid(self._socket)
        if uid != os.geteuid():
            await self._hang_up(Refused("daemon/peer", uid=uid, own=os.geteuid()))
            return
        while True:
            try:
                message = await self._channel.receive(self._services.config.frame_seconds)
            except ProtocolError as error:
                if error.fatal:
                    raise
                self._channel.send(as_refusal(Refused("daemon/bad-request", reason=error.reason)))
                self._client.blobs = {}
                continue
            match message:
                case None:
                    return
                case Hello():
                    answer = self._answer_hello(message)
                    self._channel.send(answer)
                    if type(answer) is Refusal:
                        await self.drain()
                        return
                case Blob():
                    self._client.blobs.setdefault(message.id, []).append(message.data)
                case Cancel():
                    self._cancel()
                case _:
                    self._active = Active(message)
                    tasks.start_soon(self._answer, self._active)

    def _answer_hello(self, greeting: Hello) -> Welcome | Refusal:
        if self._services.shutdown.asked.is_set():
            return as_refusal(Refused("daemon/stopping"))
        return answer_hello(greeting, os.getpid(), self._services.config.build)

    async def _answer(self, active: Active) -> None:
        final = active.verdict
        with active.scope, self._services.traffic.one():
            final = await self._handled(active.request)
        if active.scope.cancelled_caught:
            final = active.verdict
        active.over.set()
        if self._active is active:
            self._active = None
            self._client.blobs, self._client.cancel = {}, None
            self._send_last(final)

    def _send_last(self, final: Message) -> None:
        try:
            self._channel.send(final)
        except UNSENDABLE as error:
            self._channel.send(_internal(error))

    async def _handled(self, request: Message) -> Message:
        try:
            if self._services.shutdown.asked.is_set() and not _waits_for_the_end(request):
                raise Refused("daemon/stopping")
            return await HANDLERS[type(request)](request, self._client, self._services)
        except Refused as refused:
            return as_refusal(limits.behind(refused, "caldrixd"))
        except Exception as error:
            limited = limits.exhausted(error, "caldrixd")
            return _internal(error) if limited is None else as_refusal(limited)

    def _send_event(self, event: Message) -> None:
        if self._active is None:
            return
        try:
            self._channel.send(event)
        except UNSENDABLE as error:
            self._active.end(_internal(error))
        if self._channel.queued > self._services.config.client_queue:
            self._active.end(as_refusal(Refused("daemon/slow-reader")))

    def _cancel(self) -> None:
        if self._client.cancel is not None:
            self._client.cancel()
        elif self._active is not None:
            self._active.scope.cancel()

    async def _hang_up(self, refused: Refused) -> None:
        """Send one refusal and let the connection end."""
        logging.warning("a connection was ended: %s", refused.text)
        active, self._active = self._active, None
        if active is not None:
            active.scope.cancel()
        self._channel.send(as_refusal(refused))
        await self.drain()

    async def say_goodbye(self, refused: Refused) -> None:
        """After the running request tell the client, whose next one may be on its way already."""
        with anyio.move_on_after(FLUSH_SECONDS), suppress(ProtocolError):
            while self._active is not None:
                await self._active.over.wait()
            self._channel.send(as_refusal(refused))
            await self._channel.flush()

    async def drain(self) -> None:
        with anyio.move_on_after(FLUSH_SECONDS):
            if self._active is not None:
                await self._active.over.wait()
            await self._channel.flush()

    async def finish(self) -> None:
        if self._active is not None and not _waits_for_the_end(self._active.request):
            await self._active.over.wait()

    def refuse(self, refused: Refused) -> None:
        if self._active is not None and not _waits_for_the_end(self._active.request):
            self._active.end(as_refusal(refused))

    def close(self) -> None:
        self._channel.close()


def _internal(error: Exception) -> Refusal:
    return as_refusal(Refused("daemon/internal", id=log.incident(error)))


def _waits_for_the_end(request: Message) -> bool:
    return type(request) is Stop and request.daemon


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as it was when it connected.

    Root is nobody special: a model's owner is the only one the daemon works for.
    """
    if sys.platform == "linux":
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(uid)
    sol_local, local_peercred = 0, 1
    _, uid = struct.unpack("iI", sock.getsockopt(sol_local, local_peercred, 76)[:8])
    return int(uid)
