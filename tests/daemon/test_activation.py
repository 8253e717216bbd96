"""What a service manager hands over: its socket, and where it waits for news."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.messages import Done, Ps, Stop
from caldrixd import config
from caldrixd.activation import notify
from tests.support.daemon import SECONDS, Caller, Home

# Takes the place that systemd has: descriptor 3, and variables for the process that this one becomes.
_ACTIVATE = """
import os, sys
descriptor, count, pid = int(sys.argv[1]), sys.argv[2], os.getpid() + int(sys.argv[3])
os.dup2(descriptor, 3)
os.environ.update(LISTEN_PID=str(pid), LISTEN_FDS=count)
os.execv(sys.executable, [sys.executable, "-P", "-m", "caldrixd"])
"""


def activated(
    home: Home, listener: socket.socket, *, count: int = 1, offset: int = 0
) -> subprocess.Popen[bytes]:
    numbers = [str(number) for number in (listener.fileno(), count, offset)]
    with open(home.root / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _ACTIVATE, *numbers],
            env=home.environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=log,
            cwd="/",
        )


@pytest.fixture
def listener(home: Home) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home.root / "s"))
    listener.listen()
    return listener


def test_an_inherited_socket_is_served_and_left_alone(home: Home, listener: socket.socket) -> None:
    path = str(home.root / "s")
    process = activated(home, listener)
    listener.close()
    with Caller(path) as caller:
        assert caller.ask(Ps()) == [Done()]
        process.terminate()
        assert process.wait(SECONDS) == 0
    assert os.path.lexists(path)
    assert not os.path.lexists(home.address.socket)


def test_a_service_is_not_ended_for_a_client_of_another_installation(
    home: Home, listener: socket.socket
) -> None:
    """Its manager would start the same one again, and again for the next command."""
    process = activated(home, listener)
    listener.close()
    with Caller(str(home.root / "s")) as caller:
        assert caller.ask(Stop(daemon=True, if_idle=True))[-1].code == "daemon/in-use"
        assert caller.ask(Stop(daemon=True)) == [Done()]
    assert process.wait(SECONDS) == 0


@pytest.mark.parametrize(("count", "offset"), [(1, 1), (0, 0), (2, 0)])
def test_variables_that_are_not_meant_for_us(
    home: Home, listener: socket.socket, count: int, offset: int
) -> None:
    news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    news.bind(str(home.root / "news"))
    news.settimeout(SECONDS)
    home.changes = {"NOTIFY_SOCKET": str(home.root / "news")}
    process = activated(home, listener, count=count, offset=offset)
    try:
        assert news.recv(100) == b"READY=1"
        with Caller(home.address.socket) as caller:
            assert caller.ask(Ps()) == [Done()]
    finally:
        process.terminate()
        assert process.wait(SECONDS) == 0
        news.close()
        listener.close()


def test_a_descriptor_that_is_no_listening_unix_socket(home: Home) -> None:
    for odd in (socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)):
        with odd:
            process = activated(home, odd)
            news = f"listening at {home.address.socket}"
            while news not in (home.log if (home.root / "log").exists() else ""):
                assert process.poll() is None
            with Caller(home.address.socket) as caller:
                assert caller.ask(Ps()) == [Done()]
            process.terminate()
            assert process.wait(SECONDS) == 0
        (home.root / "log").unlink()


def test_news_of_ready_watchdog_and_stopping(home: Home, listener: socket.socket) -> None:
    """Ten of the datagrams wait to be read, and no more: those of the watchdog come twice a second here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        news.bind(str(home.root / "news"))
        news.settimeout(SECONDS)
        home.changes = {"NOTIFY_SOCKET": str(home.root / "news"), "WATCHDOG_USEC": "1000000"}
        process = activated(home, listener)
        first = [news.recv(100) for _ in range(3)]
        process.terminate()
        while (last := news.recv(100)) == b"WATCHDOG=1":
            pass
        assert first == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        assert last == b"STOPPING=1"
        assert process.wait(SECONDS) == 0
    listener.close()


def test_news_that_nobody_waits_for(tmp_path: Path) -> None:
    notify("", "READY=1")
    notify(str(tmp_path / "nobody"), "READY=1")


def test_configuration() -> None:
    environment = {
        "HOME": "/home/someone",
        "XDG_STATE_HOME": "/nowhere/state",
        "XDG_CACHE_HOME": "/nowhere/cache",
        "HF_TOKEN": "secret",
        "LISTEN_PID": "7",
        "LISTEN_FDS": "1",
        "NOTIFY_SOCKET": "@abstract",
        "WATCHDOG_USEC": "30000000",
    }
    read = config.read(environment, uid=4242, pid=7, idle_unload=1.5)
    assert read.address.directory == "/nowhere/state/caldrix/run"
    assert read.cache_directory == Path("/nowhere/cache/caldrix")
    assert read.idle_unload == 1.5
    assert read.activation == config.Activation(1, "@abstract", 30.0)
    assert "HF_TOKEN" not in read.environment
    assert "LISTEN_FDS" not in read.environment
    other = config.read(
        {**environment, "WATCHDOG_PID": "8", "LISTEN_FDS": "x"}, uid=4242, pid=8, idle_unload=0
    )
    assert other.activation == config.Activation(0, "@abstract", 30.0)
    wrong = config.read(
        {**environment, "WATCHDOG_PID": "8", "LISTEN_FDS": "-1"}, uid=4242, pid=7, idle_unload=0
    )
    assert wrong.activation == config.Activation(0, "@abstract", 0.0)
