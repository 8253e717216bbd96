"""Real daemons in directories of their own, and a plain client to talk to them.

Nothing here waits for a time to pass: a daemon says that it is ready by sd_notify(3), and its end is seen
through its pid.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from caldrix_protocol.address import Address, cache_directory, find_address
from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, hello
from caldrix_protocol.messages import (
    Delta,
    Done,
    Generate,
    Loaded,
    Message,
    Open,
    Opened,
    Ps,
    Refusal,
    Welcome,
)

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # a bound for what would otherwise hang; nothing is expected to take long

# Runs the daemon with other values in its Config than the command line can give.
_WITH_CHANGES = """
import dataclasses, json, os, sys
from caldrixd import config, daemon, log
log.start("caldrixd")
exec(sys.argv[2])
read = config.read(os.environ, uid=os.geteuid(), pid=os.getpid(), idle_unload=900.0)
sys.exit(daemon.run(dataclasses.replace(read, **json.loads(sys.argv[1]))))
"""


class Caller:
    """A client connection that blocks."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.socket.connect(path)
        self.connection = Connection("client")
        if greet:
            self.send(hello(os.getpid()))
            welcome = self.receive()
            assert type(welcome) is Welcome, welcome

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: Message) -> None:
        """All messages in one write."""
        self.socket.sendall(b"".join(self.connection.send(message) for message in messages))

    def receive(self) -> Message | None:
        """The next message; None at the end of the connection."""
        while (event := self.connection.next_event()) is NEED_DATA:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            self.connection.receive_data(data)
        return None if event is CLOSED else event

    def rest(self) -> list[Message]:
        """The events of the running request, the last one included."""
        events: list[Message] = []
        while not events or type(events[-1]) not in (Done, Refusal):
            event = self.receive()
            assert event is not None, f"closed after {events}"
            events.append(event)
        return events

    def ask(self, *messages: Message) -> list[Message]:
        """Send a request (its blobs before it) and return its events."""
        self.send(*messages)
        return self.rest()

    def open(self, model: Path | str, **settings: Any) -> Opened:
        """Open a model that loads."""
        events = self.ask(Open(str(model), {}, **settings))
        found = [event for event in events if type(event) is Opened]
        assert found, events
        return found[0]

    def until(self, kind: type[Any]) -> Message:
        """Receive up to the first event of a kind."""
        while type(event := self.receive()) is not kind:
            assert event is not None
        return event


def raw(text: str) -> tuple[dict[str, Any], ...]:
    """The content of a plain text."""
    return ({"type": "text", "text": text},)


def ask_raw(handle: int, text: str, max_tokens: int | None = None) -> Generate:
    return Generate(handle, raw=raw(text), max_tokens=max_tokens)


def text_of(events: Sequence[Message]) -> str:
    return "".join(event.text for event in events if type(event) is Delta)


@dataclass
class Home:
    """Private XDG directories below a short path. `cache` may be shared: compiled kernels are kept there."""

    root: Path
    cache: Path
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", ".")),
            "HOME": str(self.root),
            "XDG_RUNTIME_DIR": str(self.root / "run"),
            "XDG_STATE_HOME": str(self.root / "state"),
            "XDG_CACHE_HOME": str(self.cache),
            **self.changes,
        }

    @property
    def address(self) -> Address:
        return find_address(self.environment, os.geteuid())

    @property
    def log(self) -> str:
        """What every daemon started here has logged."""
        return (self.root / "log").read_text("utf-8", "replace")


@contextmanager
def private_home(cache: Path | None = None) -> Iterator[Home]:
    root = Path(tempfile.mkdtemp(prefix="cx", dir="/tmp"))
    (root / "run").mkdir(mode=0o700)
    try:
        yield Home(root, cache or root / "cache")
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Daemon:
    """A caldrixd process."""

    def __init__(self, home: Home, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def caller(self, *, greet: bool = True) -> Caller:
        return Caller(self.home.address.socket, greet=greet)

    def loaded(self) -> list[Loaded]:
        with self.caller() as caller:
            return [event for event in caller.ask(Ps()) if type(event) is Loaded]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def stop(self) -> int:
        """End it for certain; its exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
            try:
                return self.process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.wait()


def spawn(home: Home, *arguments: str, changes: Mapping[str, Any] | None = None, prelude: str = "") -> Daemon:
    """Start caldrixd without waiting for it. `changes` are values of its Config; `prelude` runs first."""
    command = [sys.executable, "-P"]
    if changes is None and not prelude:
        command += ["-m", "caldrixd"]
    else:
        command += ["-c", _WITH_CHANGES, json.dumps(changes or {}), prelude]
    with open(home.root / "log", "ab") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=home.environment,
            cwd="/",
        )
    return Daemon(home, process)


@contextmanager
def running_daemon(
    home: Home, *arguments: str, changes: Mapping[str, Any] | None = None, prelude: str = ""
) -> Iterator[Daemon]:
    """A daemon that listens; it is ended at the end of the block."""
    notify = home.root / "notify"
    notify.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(str(notify))
        told = Home(home.root, home.cache, {**home.changes, "NOTIFY_SOCKET": str(notify)})
        daemon = spawn(told, *arguments, changes=changes, prelude=prelude)
        try:
            _await_ready(daemon, news)
            yield daemon
        finally:
            daemon.stop()


def _await_ready(daemon: Daemon, news: socket.socket) -> None:
    end = os.pidfd_open(daemon.pid)
    try:
        ready, _, _ = select.select([news.fileno(), end], [], [], SECONDS)
    finally:
        os.close(end)
    assert news.fileno() in ready, f"caldrixd did not start: {daemon.home.log}"
    assert news.recv(4096) == b"READY=1"


def await_end(pid: int) -> None:
    """Return when a process that need not be a child has ended."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([end], [], [], SECONDS)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(end)


def kernel_cache(config: pytest.Config) -> Path:
    """A cache home for all daemons of all test runs, with the user's own compiled kernels in it.

    Compiling them takes half a minute.
    """
    home = Path(config.cache.mkdir("caldrix-home"))
    kernels = Path(cache_directory(os.environ)) / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "caldrix").mkdir(exist_ok=True)
    link = home / "caldrix" / "kernels"
    if not link.is_symlink() or link.readlink() != kernels:  # the first run, or another user's was before
        new = link.with_name(f"kernels-{os.getpid()}")
        new.symlink_to(kernels)
        new.replace(link)
    return home
