"""The end of a daemon, in an order of events that a test gives: no client is left without a word."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, hello
from caldrix_protocol.messages import Doctor, Done, Message, Ps, Refusal, Stop, Welcome
from caldrix_protocol.refusals import Refused
from caldrixd import config
from caldrixd.fetcher.process import Fetches
from caldrixd.handlers.context import Services, Shutdown
from caldrixd.lanes import choose
from caldrixd.server import Server
from caldrixd.worker.pool import Pool
from tests.support.daemon import SECONDS

STOPPING = Refused("daemon/stopping")


class Client:
    """A client's end that says what a test wants, when it wants."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection("client")

    def send(self, message: Message) -> None:
        self._socket.sendall(self._connection.send(message))

    async def receive(self) -> Message | None:
        """The next message; None at the end of the connection."""
        with anyio.fail_after(SECONDS):
            while (event := self._connection.next_event()) is NEED_DATA:
                await anyio.wait_readable(self._socket)
                try:
                    data = self._socket.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                self._connection.receive_data(data)
        return None if event is CLOSED else event


class Ending:
    """A server, what ends it, and a way to connect."""

    def __init__(self, path: str, server: Server, shutdown: Shutdown) -> None:
        self._path = path
        self.server = server
        self.shutdown = shutdown

    async def client(self, *, greet: bool = True) -> Client:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect(self._path)
        client = Client(sock)
        if greet:
            client.send(hello(1))
            assert type(await client.receive()) is Welcome
        return client


@asynccontextmanager
async def ending(directory: Path) -> AsyncIterator[Ending]:
    environment = {"HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    told = config.read(environment, uid=os.geteuid(), pid=os.getpid(), idle_unload=900.0)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "s"))
    listener.listen()
    shutdown = Shutdown()
    async with anyio.create_task_group() as tasks:
        services = Services(told, Pool(tasks, 900.0), Fetches(tasks, 30.0), shutdown)
        server = Server(listener, services, tasks)
        tasks.start_soon(server.accept)
        yield Ending(str(directory / "s"), server, shutdown)
        tasks.cancel_scope.cancel()
    listener.close()


def code_of(message: Message | None) -> str:
    assert type(message) is Refusal, message
    return message.code


def run(test: Callable[[Ending], object], directory: Path) -> None:
    async def wait() -> None:
        async with ending(directory) as end:
            await test(end)  # type: ignore[misc]

    directory.chmod(0o700)
    anyio.run(wait)


@pytest.mark.parametrize("request_of", [Ps(), Stop(), Stop(daemon=True)])
def test_a_request_that_crosses_the_goodbye_is_refused(tmp_path: Path, request_of: Message) -> None:
    async def test() -> None:
        async with ending(tmp_path) as end:
            client = await end.client()
            end.shutdown.ask("a test")
            await end.server.say_goodbye(STOPPING)
        with suppress(BrokenPipeError):
            client.send(request_of)
        assert code_of(await client.receive()) == "daemon/stopping"
        assert await client.receive() is None

    tmp_path.chmod(0o700)
    anyio.run(test)


def test_a_client_that_has_not_greeted_is_told_and_looks_for_another_daemon(tmp_path: Path) -> None:
    async def test(end: Ending) -> None:
        client = await end.client(greet=False)
        greeted = await end.client()  # who came before it has been accepted
        end.shutdown.ask("a test")
        await end.server.say_goodbye(STOPPING)
        for one in (client, greeted):
            assert code_of(await one.receive()) == "daemon/stopping"

    run(test, tmp_path)


def test_a_running_request_has_its_end_before_the_goodbye(tmp_path: Path) -> None:
    async def test(end: Ending) -> None:
        client = await end.client()
        client.send(Stop(daemon=True))
        await end.shutdown.asked.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end.server.say_goodbye, STOPPING)
            await anyio.lowlevel.checkpoint()
            end.shutdown.over.set()
        assert await client.receive() == Done()
        assert code_of(await client.receive()) == "daemon/stopping"

    run(test, tmp_path)


def test_a_daemon_that_answers_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing, seen = threading.Event(), threading.Event()

    def probe(name: str, environment: object) -> choose.Probe:
        probing.set()
        seen.wait(SECONDS)
        return choose.Probe(name, ())

    async def test(end: Ending) -> None:
        first, second = await end.client(), await end.client()
        first.send(Doctor())
        await to_thread.run_sync(probing.wait, SECONDS)
        second.send(Stop(daemon=True, if_idle=True))
        assert code_of(await second.receive()) == "daemon/in-use"
        assert not end.shutdown.asked.is_set()
        seen.set()
        while type(await first.receive()) is not Done:
            pass
        second.send(Stop(daemon=True, if_idle=True))
        await end.shutdown.asked.wait()

    monkeypatch.setattr(choose, "probe", probe)
    run(test, tmp_path)


def test_two_clients_of_another_build_ask_at_once(tmp_path: Path) -> None:
    """The second one must not use a daemon that is ending, and its asking must not hurry it."""

    async def test(end: Ending) -> None:
        first, second = await end.client(), await end.client()
        first.send(Stop(daemon=True, if_idle=True))
        await end.shutdown.asked.wait()
        second.send(Stop(daemon=True, if_idle=True))
        assert code_of(await second.receive()) == "daemon/stopping"
        assert not end.shutdown.urgent.is_set()
        end.shutdown.over.set()
        assert await first.receive() == Done()

    run(test, tmp_path)


def test_a_handler_that_runs_into_a_limit_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(name: str, environment: object) -> choose.Probe:
        raise OSError(errno.EMFILE, "Too many open files")

    async def test(end: Ending) -> None:
        client = await end.client()
        client.send(Doctor())
        assert code_of(await client.receive()) == "daemon/limit"

    monkeypatch.setattr(choose, "probe", probe)
    run(test, tmp_path)


def test_one_that_does_not_read_keeps_no_other_from_being_told(tmp_path: Path) -> None:
    """The first one's request does not end, so that its goodbye cannot come."""

    async def test(end: Ending) -> None:
        first, second = await end.client(), await end.client()
        first.send(Stop(daemon=True))
        await end.shutdown.asked.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end.server.say_goodbye, STOPPING)
            assert code_of(await second.receive()) == "daemon/stopping"
            end.shutdown.over.set()
        assert await first.receive() == Done()

    run(test, tmp_path)
