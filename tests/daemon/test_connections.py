"""What a client may send: everything else is answered or cut off, and never hurts another client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import msgpack
import numba
import pytest

from caldrix_protocol.codec import encode
from caldrix_protocol.connection import hello
from caldrix_protocol.framing import frame
from caldrix_protocol.messages import (
    Blob,
    Cancel,
    Doctor,
    Done,
    Generate,
    Hello,
    Message,
    Open,
    Ps,
    Refusal,
    Stop,
    Welcome,
)
from caldrixd.lanes.drivers.cpu import cpu_flags, isa_level
from tests.support.daemon import Caller, Daemon, Home, raw, running_daemon
from tests.support.models import tiny

HELLO = frame(encode(hello(1)))
PS = frame(encode(Ps()))


@pytest.fixture
def caller(shared: Daemon) -> Iterator[Caller]:
    """A connection that has said nothing yet; the daemon serves others after it."""
    with shared.caller(greet=False) as caller:
        yield caller
    with shared.caller() as other:
        assert other.ask(Ps())[-1] == Done()


def answers(caller: Caller, data: bytes) -> list[Message]:
    """Everything the daemon sends for `data`, until it closes or our end of file."""
    caller.connection.send(hello(1))
    caller.socket.sendall(data)
    caller.socket.shutdown(socket.SHUT_WR)
    received: list[Message] = []
    while (event := caller.receive()) is not None:
        received.append(event)
    return received


def codes(events: list[Message]) -> list[str]:
    return [event.code for event in events if type(event) is Refusal]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        (1 << 20).to_bytes(4, "big") + b"x" * (1 << 20),
        frame(b"\xc1"),
        frame(b"\x93\x01\x02\x03"),
        frame(encode(hello(1)) + b"x"),
        frame(b"\x91" * 3000),
        frame(b"\xdd\xff\xff\xff\xff"),
        frame(msgpack.packb({"type": "hello", "protocol": [1], "version": "x", "pid": -1})),
        PS,
    ],
    ids=range(11),
)
def test_no_hello(caller: Caller, data: bytes) -> None:
    assert codes(answers(caller, data)) == ["daemon/bad-frame"]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "sing"},
        {"type": "ps", "loud": True},
        {"type": "generate", "handle": 1},
        {"type": "generate", "handle": -1, "raw": []},
        {"type": "open", "model": "/x", "environment": {}, "ctx": 2**31},
        {"type": "open", "model": "/x", "environment": {}, "ctx": float("nan")},
        {"type": "open", "model": b"/x", "environment": {}},
        {"type": ["ps"]},
        {},
    ],
    ids=str,
)
def test_a_bad_request_is_refused_and_the_next_one_answered(caller: Caller, body: dict[str, object]) -> None:
    caller.send(hello(1))
    assert type(caller.receive()) is Welcome
    caller.connection.send(Ps())
    caller.socket.sendall(frame(msgpack.packb(body)))
    assert codes(caller.rest()) == ["daemon/bad-request"]
    assert caller.ask(Ps())[-1] == Done()


@pytest.mark.parametrize("data", [frame(encode(hello(1))), frame(encode(Generate(1))) * 2, b"\0\0\0\0"])
def test_what_ends_a_greeted_connection(caller: Caller, data: bytes) -> None:
    assert codes(answers(caller, HELLO + data))[-1] in ("daemon/bad-frame", "daemon/bad-request")


@pytest.mark.parametrize("length", range(1, len(HELLO + PS)))
def test_end_of_file_at_every_byte(shared: Daemon, length: int) -> None:
    with shared.caller(greet=False) as caller:
        events = answers(caller, (HELLO + PS)[:length])
    assert [type(event) for event in events] == ([Welcome] if length >= len(HELLO) else [])


def test_a_cancel_that_comes_too_late_changes_nothing(caller: Caller) -> None:
    caller.send(hello(1))
    assert type(caller.receive()) is Welcome
    assert caller.ask(Ps()) == [Done()]
    caller.socket.sendall(frame(encode(Cancel())) * 2)
    assert caller.ask(Ps()) == [Done()]


def test_requests_sent_ahead_are_refused(caller: Caller) -> None:
    opening = frame(msgpack.packb({"type": "open", "model": str(tiny("tiny-llama")), "environment": {}}))
    events = answers(caller, HELLO + opening + PS)
    assert codes(events) == ["daemon/bad-frame"]


def test_noise_leaves_the_daemon_alone(home: Home) -> None:
    """Recorded sessions with some bytes changed, left out or added: whatever comes of it, no incident."""
    opening = frame(encode(Open(str(tiny("tiny-llama")), {"HOME": "/x"}, backend="metal")))
    sessions = [
        HELLO + opening + frame(encode(Blob(1, b"text"))) + frame(encode(Generate(1, raw=raw("hi")))),
        HELLO + PS + frame(encode(Stop("x"))) + frame(encode(Cancel())) + PS,
    ]
    random = Random(20)
    with running_daemon(home) as daemon:
        for _ in range(300):
            noise = bytearray(random.choice(sessions))
            for _ in range(random.randint(1, 4)):
                place = random.randrange(len(noise))
                match random.randrange(3):
                    case 0:
                        noise[place] = random.randrange(256)
                    case 1:
                        del noise[place : place + random.randint(1, 9)]
                    case _:
                        noise[place:place] = random.randbytes(random.randint(1, 9))
            with daemon.caller(greet=False) as caller, suppress(BrokenPipeError, ConnectionResetError):
                caller.socket.sendall(noise)
                caller.socket.shutdown(socket.SHUT_WR)
                while caller.socket.recv(1 << 16):
                    pass
        assert daemon.loaded() == []
    assert "incident" not in home.log


def test_a_half_sent_frame_is_cut_off(home: Home) -> None:
    with running_daemon(home, changes={"frame_seconds": 0.05}) as daemon, daemon.caller() as caller:
        caller.connection.send(Ps())
        caller.socket.sendall(PS[:7])
        refused = caller.receive()
        assert type(refused) is Refusal
        assert refused.text.endswith("it did not arrive whole in time")
        assert caller.receive() is None
        assert daemon.loaded() == []


def test_another_protocol_version_is_told_both(caller: Caller) -> None:
    caller.send(Hello((2, 7), "9.9", 1))
    refused = caller.receive()
    assert type(refused) is Refusal
    assert refused.code == "daemon/version"
    assert refused.fields == {"theirs": "1.1", "ours": "2.7"}
    assert caller.receive() is None


def test_a_later_minor_version_is_welcome(caller: Caller) -> None:
    caller.send(Hello((1, 99), "1.9", 1, ("telepathy",)))
    welcome = caller.receive()
    assert type(welcome) is Welcome
    assert welcome.protocol == (1, 1)


def test_doctor_tells_every_lane(shared: Daemon) -> None:
    with shared.caller() as caller:
        *lanes, done = caller.ask(Doctor())
    assert done == Done()
    assert [lane.name for lane in lanes] == ["metal", "hip", "cpu"]
    metal, hip, cpu = lanes
    assert (metal.usable, metal.reasons) == (False, ("the Metal lane exists on macOS only",))
    assert not hip.usable
    assert hip.reasons
    assert (cpu.usable, cpu.reasons) == (True, ())
    level, kernels = isa_level(cpu_flags()), f"kernels numba {numba.__version__}, which compiles here"
    assert (cpu.details[0], cpu.details[-2]) == (f"{level}, {os.cpu_count()} processors", kernels)
    assert cpu.details[-1].startswith("compiled kernels are kept in ")


def test_unknown_models_and_handles(caller: Caller) -> None:
    caller.send(hello(1))
    caller.receive()
    assert codes(caller.ask(Stop("nothing"))) == ["model/not-loaded"]
    refused = caller.ask(Generate(7, raw=()))[-1]
    assert (refused.code, refused.text) == (
        "daemon/bad-request",
        "the request is not valid: there is no handle 7",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
def test_another_user_is_refused(home: Home) -> None:
    script = (
        "import os, socket, sys; os.seteuid(65534); s = socket.socket(socket.AF_UNIX);"
        " s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(4096)); assert s.recv(1) == b''"
    )
    with running_daemon(home) as daemon:
        address = home.address
        for directory in (home.root, home.root / "run", address.directory):
            os.chmod(directory, 0o755)
        os.chmod(address.socket, 0o666)
        command = [sys.executable, "-c", script, address.socket]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        os.chmod(address.directory, 0o700)
        refused = msgpack.unpackb(done.stdout[4:])
        assert refused["code"] == "daemon/peer"
        assert refused["fields"] == {"uid": 65534, "own": 0}
        assert daemon.loaded() == []
