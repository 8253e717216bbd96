"""`ps`, `stop` and `doctor` as processes against a scripted daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import Done, Hello, Lane, Loaded, Message, Stop, Welcome
from caldrix_protocol.refusals import Refused
from tests.support.cli import SECONDS, Home
from tests.support.peer import Model, Peer, Script, Talk


def sending(*messages: Message) -> Script:
    return lambda talk, request: talk.send(*messages)


def test_ps_is_a_table(home: Home) -> None:
    loaded = (
        Loaded("/models/a\x1b", "cpu", "idle", 12, 1_500_000, 1, 61.4),
        Loaded("demo", "cpu", "answering", 345, 269_000_000, 20, 0.0, "x86-64-v3"),
    )
    with Peer(home.address, sending(*loaded, Done())):
        result = home.caldrix("ps")
    assert result == (
        0,
        "MODEL          LANE           STATE      PID  SIZE    CLIENTS  IDLE\n"
        "/models/a\\x1b  cpu            idle       12   2 MB    1        61 s\n"
        "demo           cpu x86-64-v3  answering  345  269 MB  20       0 s\n",
        "",
    )


def test_doctor_prints_a_line_per_lane(home: Home) -> None:
    lanes = (
        Lane("hip", False, ("no \x1bruntime", "no lld")),
        Lane("cpu", True, (), ("x86-64-v3", "2 threads"), False, True),
    )
    with Peer(home.address, sending(*lanes, Done())):
        result = home.caldrix("doctor")
    assert result == (
        0,
        "hip: no (no \\x1bruntime; no lld); images on hip: no; speculation=no\n"
        "cpu: usable (x86-64-v3; 2 threads); images on cpu: no; speculation=yes\n",
        "",
    )


def test_doctor_without_a_usable_lane_fails_with_every_reason(home: Home) -> None:
    lanes = (Lane("hip", False, ("a", "b")), Lane("cpu", False, ("c",)))
    with Peer(home.address, sending(*lanes, Done())):
        result = home.caldrix("doctor")
    assert result.status == 1
    assert result.out.count("\n") == 2
    assert result.err == "caldrix: no usable lane (hip: a; b\n  cpu: c)\n"


def test_stop_names_a_model_as_ps_does(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home.path)
    (home.path / "here").mkdir()
    with Peer(home.address, sending(Done())) as peer:
        for arguments in (("here",), ("./gone",), ("demo",), ()):
            assert home.caldrix("stop", *arguments) == (0, "", "")
        assert home.caldrix("stop", "--daemon") == (0, "", "caldrix: caldrixd has stopped\n")
    here = os.getcwd()
    assert peer.requests == [
        Stop(f"{here}/here"),
        Stop(f"{here}/gone"),
        Stop("demo"),
        Stop(None),
        Stop(None, True),
    ]


def test_a_refused_stop_is_its_sentence(home: Home) -> None:
    with Peer(home.address, sending(as_refusal(Refused("worker/unloaded", model="m")))):
        assert home.caldrix("stop", "m") == (1, "", "caldrix: m was unloaded by caldrix stop\n")


@pytest.mark.parametrize(
    ("arguments", "status"), [(("ps",), 0), (("stop",), 0), (("stop", "--daemon"), 0), (("stop", "m"), 1)]
)
def test_without_a_daemon_none_is_started(home: Home, arguments: tuple[str, ...], status: int) -> None:
    assert home.caldrix(*arguments) == (status, "", "caldrix: caldrixd is not running\n")
    assert not home.log.exists()


@pytest.mark.parametrize("words", ["daemon/stopping", None])
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("stop", "--daemon"), 0, ("caldrixd has stopped",) * 2),
        (
            ("ps",),
            1,
            ("caldrixd is stopping; try again", "caldrixd closed the connection before the request ended"),
        ),
    ],
)
def test_a_daemon_that_is_ending_anyway(
    home: Home, words: str | None, arguments: tuple[str, ...], status: int, said: tuple[str, str]
) -> None:
    def script(talk: Talk, request: Message) -> None:
        if words is None:
            talk.stream.shutdown(socket.SHUT_RDWR)
        else:
            talk.send(as_refusal(Refused(words)))

    with Peer(home.address, script):
        assert home.caldrix(*arguments) == (status, "", f"caldrix: {said[words is None]}\n")


HOLDER = """\
import fcntl, os, signal, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(os.getpid(), file=lock, flush=True)
print("held", flush=True)
signal.pause()
"""


def test_stop_ends_a_daemon_of_another_version_by_a_signal(home: Home) -> None:
    def greet(talk: Talk, hello: Hello) -> None:
        talk.send(Welcome((2, 0), "9.9", 1))

    with Peer(home.address, Model(), greet):
        daemon = subprocess.Popen(
            (sys.executable, "-c", HOLDER, home.address.lock), stdout=subprocess.PIPE, text=True
        )
        with daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "held\n"
            assert home.caldrix("ps").status == 1
            result = home.caldrix("stop", "--daemon")
            assert daemon.wait(SECONDS) == -signal.SIGTERM
    assert result.status == 0
    assert result.err == f"caldrix: caldrixd (pid {daemon.pid}) finishes its replies and then stops\n"
