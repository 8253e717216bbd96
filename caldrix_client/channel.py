"""A greeted connection to the daemon on a blocking client's terms: send, receive, exchange."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

from caldrix_client.interrupts import Interrupts
from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, ProtocolError
from caldrix_protocol.messages import Blob, Cancel, Done, Message, Refusal, Welcome
from caldrix_protocol.refusals import Refused

READ_SIZE = 1 << 16
# How long a daemon may take to end a cancelled request; it needs milliseconds, unless it hangs.
CANCEL_SECONDS = 5.0
STOPPING = "daemon/stopping"


class Declined(Refused):
    """A refusal the daemon sent, in its own words: its row may be newer than this client."""

    def __init__(self, refusal: Refusal) -> None:
        self.code = refusal.code
        self.kind = refusal.kind
        self.fields = refusal.fields
        self.text = refusal.text
        Exception.__init__(self, refusal.text)


class Channel:
    """Messages over one connected socket, which it owns. Closing it stops the request that runs.

    `welcome` is set once the daemon has been greeted. `again` reaches another daemon, should this one be
    about to end when it gets its first request.
    """

    __slots__ = ("_connection", "_socket", "again", "welcome")
    welcome: Welcome
    again: Callable[[], Channel] | None

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._socket = stream
        self._connection = Connection("client")
        self.again = None

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def become(self, other: Channel) -> None:
        """Go on as a channel that was just made, and is left to this one."""
        self.close()
        self._socket, self._connection, self.welcome = other._socket, other._connection, other.welcome

    @property
    def is_over(self) -> bool:
        """Whether the daemon has closed the connection, or said that it will; asked while no request runs."""
        try:
            if self._connection.next_event() is NEED_DATA:
                self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except (OSError, ProtocolError):
            return True
        return True

    def send(self, message: Message) -> None:
        """Write one message whole. What the peer says meanwhile is kept; if it has gone, `receive` tells."""
        data = memoryview(self._connection.send(message))
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                if self._poll(select.POLLOUT | select.POLLIN) & select.POLLIN and not self._read():
                    return
            except OSError:
                return

    def receive(self, wake: int = -1, deadline: float | None = None) -> Message | None:
        """The next message, or None once the descriptor `wake` is readable.

        `deadline` is a time of time.monotonic: TimeoutError after it. Raises Refused when the daemon has
        closed the connection (daemon/closed) or does not speak the protocol (daemon/bad-frame).
        """
        while True:
            try:
                event = self._connection.next_event()
            except ProtocolError as error:
                raise Refused("daemon/bad-frame", reason=error.reason) from None
            if event is CLOSED:
                raise Refused("daemon/closed")
            if event is not NEED_DATA:
                return event
            if not self._poll(select.POLLIN, wake, deadline):
                return None
            self._read()

    def _poll(self, wanted: int, wake: int = -1, deadline: float | None = None) -> int:
        """What the socket is ready for; 0 when only `wake` is readable. TimeoutError after `deadline`."""
        poll = select.poll()
        poll.register(self._socket, wanted)
        if wake >= 0:
            poll.register(wake, select.POLLIN)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = dict(poll.poll(left))
        if not ready:
            raise TimeoutError
        return ready.get(self._socket.fileno(), 0)

    def _read(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self._connection.receive_data(data)
        return bool(data)


def exchange(
    channel: Channel,
    request: Message,
    interrupts: Interrupts,
    blobs: tuple[Blob, ...] = (),
    *,
    cancel_seconds: float = CANCEL_SECONDS,
) -> Iterator[Message]:
    """Send a request and yield its events; the last one is its `done`.

    A daemon that was about to end when the first request of all came to it is left for another, once.
    The first Ctrl-C sends `cancel`, and the events go on until the daemon ends the request; if it does not
    within `cancel_seconds`, KeyboardInterrupt. Raises Declined for `refused`, and Refused when the
    connection breaks.
    """
    for blob in blobs:
        channel.send(blob)
    channel.send(request)
    deadline = None
    while True:
        if interrupts.count and deadline is None:
            deadline = time.monotonic() + cancel_seconds
            channel.send(Cancel())
        try:
            event = channel.receive(interrupts.descriptor, deadline)
        except TimeoutError:
            raise KeyboardInterrupt from None
        if event is None:
            interrupts.clear()
            continue
        again, channel.again = channel.again, None
        if type(event) is Refusal:
            if event.code != STOPPING or again is None or interrupts.count:
                raise Declined(event)
            channel.become(again())
            yield from exchange(channel, request, interrupts, blobs, cancel_seconds=cancel_seconds)
            return
        yield event
        if type(event) is Done:
            return
