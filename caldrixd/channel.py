"""A protocol connection on a non-blocking socket: received messages, queued sends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import nullcontext

import anyio

from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection
from caldrix_protocol.messages import Message

READ_SIZE = 1 << 16


class Channel:
    """Both ends of the daemon use it: towards a client and towards a worker.

    `send` never blocks; what the socket does not take at once is queued (`queued` bytes) and leaves
    while `write` runs. Once the peer has gone, sends are dropped.
    """

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._connection = connection
        self._outgoing = bytearray()
        self._filled = anyio.Event()
        self._emptied = anyio.Event()
        self._open = True

    @property
    def queued(self) -> int:
        return len(self._outgoing)

    def send(self, message: Message) -> None:
        """Send one message, or queue it. ProtocolError when the connection's state does not allow it."""
        if not self._open:
            return
        data = self._connection.send(message)
        if not self._outgoing:
            data = data[self._send_some(data) :]
        if data and self._open:
            self._outgoing += data
            self._filled.set()

    def _send_some(self, data: bytes | bytearray) -> int:
        """How many bytes the socket took; a peer that has gone takes them all."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._open = False
            return len(data)

    async def write(self) -> None:
        """Send what is queued, for ever."""
        while True:
            await self._filled.wait()
            self._filled = anyio.Event()
            while self._outgoing:
                await anyio.wait_writable(self._socket)
                del self._outgoing[: self._send_some(self._outgoing)]
            self._emptied.set()
            self._emptied = anyio.Event()

    async def flush(self) -> None:
        """Return when nothing is queued any more; `write` runs beside it."""
        while self._outgoing:
            await self._emptied.wait()

    async def receive(self, seconds: float | None = None) -> Message | None:
        """The next message; None when the peer has closed. ProtocolError for anything but the protocol.

        TimeoutError when a message has begun to arrive and stays incomplete for `seconds`.
        """
        begun = False
        while True:
            event = self._connection.next_event()
            if event is CLOSED:
                return None
            if event is not NEED_DATA:
                return event
            # A scope for each token of a reply would be a tenth of what passing it on takes.
            with anyio.fail_after(seconds) if begun and seconds is not None else nullcontext():
                await anyio.wait_readable(self._socket)
            data = self._read_some()
            if data is not None:
                self._connection.receive_data(data)
                begun = True

    async def deliver(self, take: Callable[[Message], None]) -> None:
        """Give `take` each message as it comes, until the peer has closed.

        ProtocolError as `receive`, and whatever `take` raises. No task waits for the single message, as one
        does there: waking it takes more than all the rest of passing a token on.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def arrived() -> None:
            try:
                data = None if over.done() else self._read_some()
                if data is not None:
                    self._connection.receive_data(data)
                while not over.done() and (event := self._connection.next_event()) is not NEED_DATA:
                    if event is CLOSED:
                        over.set_result(None)
                    else:
                        take(event)
            except Exception as error:
                over.set_exception(error)

        loop.add_reader(self._socket, arrived)
        try:
            await over
        finally:
            loop.remove_reader(self._socket)

    def _read_some(self) -> bytes | None:
        """Bytes, b"" for the end, None when there was nothing after all."""
        try:
            return self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close the socket. No task waits on it any more."""
        self._open = False
        self._socket.close()
