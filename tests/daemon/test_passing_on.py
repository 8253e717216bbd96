"""How a token gets from a worker's socket to a client's: its order, its ends, and the work it is, counted."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from caldrix_protocol import codec
from caldrix_protocol.codec import encode
from caldrix_protocol.connection import NEED_DATA, Connection, ProtocolError, answer_hello, hello
from caldrix_protocol.messages import Delta, Done, Generate, Load, Message, Progress, Ready, Relay
from caldrixd.channel import Channel
from caldrixd.worker import process
from caldrixd.worker.process import Key, Settings, Stream, Worker
from tests.support.daemon import SECONDS, raw

REPLY = [Delta(f" {number}", (number,)) for number in range(20)]
REQUEST = Generate(1, raw=raw("hi"))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(SECONDS):
            await test()

    anyio.run(bounded)


def received(connection: Connection, data: bytes) -> list[Message]:
    connection.receive_data(data)
    messages = []
    while (event := connection.next_event()) is not NEED_DATA:
        messages.append(event)
    return messages


def client_at_work() -> tuple[Channel, Connection, socket.socket]:
    """A daemon's channel to a client whose request runs, and the client's end of it."""
    ours, theirs = socket.socketpair()
    client, daemon = Connection("client"), Connection("daemon")
    (greeting,) = received(daemon, client.send(hello(1)))
    received(client, daemon.send(answer_hello(greeting, 2)))
    received(daemon, client.send(REQUEST))
    return Channel(ours, daemon), client, theirs


class Passing:
    """A worker whose process is the test, with one reply for one client."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.connection = Connection("worker")
        self.client, self._reading, self._client_end = client_at_work()
        self.worker = Worker(Key("/tiny", (), "cpu"), "tiny", {})
        self.worker._channel = Channel(ours, Connection("parent"))
        self.tasks: list[object] = []  # the task, if any, in which each event was passed on

    async def begin(self) -> Stream:
        received(self.connection, self.socket.recv(1 << 16))
        self.socket.sendall(self.connection.send(Ready("f32", 256, True, 1)))
        await self.worker.loaded(self.client.send)
        return self.worker.begin(REQUEST, {}, Settings(256, "f32", 1, 8), self._deliver)

    def _deliver(self, event: Message) -> None:
        self.tasks.append(asyncio.current_task())
        self.client.send(event)

    def relays(self, stream: Stream, *messages: Message) -> bytes:
        return b"".join(self.connection.send(Relay(stream.number, encode(message))) for message in messages)

    def shown(self) -> list[Message]:
        """What has come to the client."""
        return received(self._reading, self._client_end.recv(1 << 16))


@asynccontextmanager
async def passing() -> AsyncIterator[tuple[Passing, Stream]]:
    one = Passing()
    async with anyio.create_task_group() as tasks:
        assert one.worker._channel is not None
        tasks.start_soon(one.worker._converse, one.worker._channel)
        await anyio.wait_readable(one.socket)
        yield one, await one.begin()
        one.socket.close()


def test_events_come_in_their_order_and_the_last_one_ends_the_stream() -> None:
    async def test() -> None:
        async with passing() as (one, stream):
            events = [Progress("prompt", 1, 2, "tokens"), *REPLY, Progress("prompt", 2, 2, "tokens"), *REPLY]
            one.socket.sendall(one.relays(stream, *events, Done("stop", (1, 2))))
            await stream.ended.wait()
            assert one.shown() == events
            assert stream.final == Done("stop", (1, 2))
            assert not one.worker.busy

    run(test)


def test_a_delta_is_written_once_and_neither_decoded_nor_encoded_nor_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **how: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **how)

        monkeypatch.setattr(owner, name, counted)

    async def test() -> None:
        async with passing() as (one, stream):
            told, end = one.relays(stream, *REPLY), one.relays(stream, Done("stop"))
            count(process, "decode")  # of events; that of the frame around them is another
            count(codec, "packb")
            count(anyio, "wait_readable")
            count(Channel, "_read_some")
            count(Channel, "_send_some")
            one.socket.sendall(told + end)
            await stream.ended.wait()
            monkeypatch.undo()
            assert one.shown() == REPLY
            assert set(one.tasks) == {None}

    run(test)
    assert counts == {"decode": 1, "_read_some": 1, "_send_some": len(REPLY)}


def test_a_delta_of_a_reply_that_nobody_reads_any_more_is_dropped() -> None:
    async def test() -> None:
        async with passing() as (one, stream):
            one.worker.leave(stream)
            other = one.worker.begin(REQUEST, {}, Settings(256, "f32", 1, 8), one.client.send)
            one.socket.sendall(one.relays(stream, *REPLY) + one.relays(other, REPLY[0], Done("stop")))
            await other.ended.wait()
            assert one.shown() == REPLY[:1]

    run(test)


class Ended(Exception):
    """Of who takes messages."""


def from_worker() -> tuple[Channel, Connection, socket.socket]:
    """A channel to a worker that is loaded, and the worker's end."""
    ours, theirs = socket.socketpair()
    worker, parent = Connection("worker"), Connection("parent")
    received(worker, parent.send(Load("tiny", "/tiny", "cpu")))
    received(parent, worker.send(Ready("f32", 256, True, 1)))
    return Channel(ours, parent), worker, theirs


def sent(worker: Connection, count: int) -> tuple[list[Relay], bytes]:
    relays = [Relay(number, encode(Delta("a"))) for number in range(count)]
    return relays, b"".join(map(worker.send, relays))


def test_delivering_ends_when_the_peer_has_closed() -> None:
    async def test() -> None:
        channel, worker, theirs = from_worker()
        relays, data = sent(worker, 3)
        theirs.sendall(data)
        theirs.close()
        taken: list[Message] = []
        await channel.deliver(taken.append)
        assert taken == relays

    run(test)


def test_what_comes_before_a_bad_frame_is_delivered() -> None:
    async def test() -> None:
        channel, worker, theirs = from_worker()
        relays, data = sent(worker, 2)
        theirs.sendall(data + bytes(4))
        taken: list[Message] = []
        with pytest.raises(ProtocolError, match="claims 0 bytes"):
            await channel.deliver(taken.append)
        assert taken == relays

    run(test)


def test_what_a_taker_raises_ends_the_delivery_and_the_rest_is_there_to_be_read() -> None:
    async def test() -> None:
        channel, worker, theirs = from_worker()
        relays, data = sent(worker, 3)
        theirs.sendall(data)
        taken: list[Message] = []

        def take(message: Message) -> None:
            taken.append(message)
            if len(taken) == 2:
                raise Ended

        with pytest.raises(Ended):
            await channel.deliver(take)
        assert taken == relays[:2]
        assert await channel.receive() == relays[2]

    run(test)


def test_a_taker_that_cancels_the_delivery_gets_no_further_message() -> None:
    async def test() -> None:
        channel, worker, theirs = from_worker()
        relays, data = sent(worker, 3)
        theirs.sendall(data)
        taken: list[Message] = []
        with anyio.CancelScope() as scope:

            def take(message: Message) -> None:
                taken.append(message)
                scope.cancel()

            await channel.deliver(take)
        assert scope.cancelled_caught
        assert taken == relays[:1]
        assert [await channel.receive() for _ in range(2)] == relays[1:]

    run(test)
