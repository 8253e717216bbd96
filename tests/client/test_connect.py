"""Reaching a daemon, in every state that one can be in, and starting one."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from caldrix_client.channel import Declined, exchange
from caldrix_client.connect import Patience, attach, connect, holder
from caldrix_client.interrupts import Interrupts
from caldrix_protocol.address import ensure_directory
from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import Doctor, Done, Hello, Message, Ps, Status, Stop, Welcome
from caldrix_protocol.refusals import Refused
from caldrix_protocol.version import VERSION
from tests.support.cli import IMPORTS, SECONDS, Home
from tests.support.peer import Model, Peer, Script, Talk

BRIEF = Patience(answer=0.2, start=0.4)


def no_start(pid: int) -> None:
    raise AssertionError(f"a daemon was started: {pid}")


@contextmanager
def held_lock(home: Home, pid: int) -> Iterator[None]:
    """A living daemon's lock file."""
    ensure_directory(home.address)
    with open(home.address.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{pid}\n")
        lock.flush()
        yield


@contextmanager
def listening(home: Home, backlog: int = 16) -> Iterator[socket.socket]:
    ensure_directory(home.address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(home.address.socket)
        listener.listen(backlog)
        yield listener


@contextmanager
def crowd(home: Home) -> Iterator[None]:
    """As many connections as the backlog takes."""
    with ExitStack() as members:
        while True:
            member = members.enter_context(socket.socket(socket.AF_UNIX))
            member.setblocking(False)
            try:
                member.connect(home.address.socket)
            except BlockingIOError:
                break
        yield


def test_a_running_daemon_is_greeted(home: Home) -> None:
    greetings = []

    def greet(talk: Talk, hello: Hello) -> None:
        greetings.append(hello)
        talk.send(Welcome((1, 99), VERSION, 1, ("new feature",)))

    with Peer(home.address, Model(), greet), connect(home.environment, no_start) as channel:
        channel.send(Ps())
    assert greetings[0].protocol == (1, 1)
    assert greetings[0].pid == os.getpid()


def of_another_build(talk: Talk, hello: Hello) -> None:
    talk.send(Welcome((1, 1), f"{VERSION}+another", 17))


def test_an_idle_daemon_of_another_build_is_asked_to_end(home: Home) -> None:
    with Peer(home.address, Model(), of_another_build) as peer:
        with connect(home.environment, no_start, outdated=no_start) as channel:
            channel.send(Ps())
            channel.receive()
        assert peer.requests == [Stop(daemon=True, if_idle=True), Ps()]


def test_a_daemon_of_another_build_that_is_in_use_is_used(home: Home) -> None:
    def script(talk: Talk, request: Message) -> None:
        talk.send(as_refusal(Refused("daemon/in-use", pid=17)) if type(request) is Stop else Done())

    outdated: list[int] = []
    with (
        Peer(home.address, script, of_another_build) as peer,
        connect(home.environment, no_start, outdated=outdated.append) as channel,
    ):
        assert [type(event) for event in exchange(channel, Ps(), Interrupts())] == [Done]
        assert [type(request) for request in peer.requests] == [Stop, Ps]
    assert outdated == [17]


@pytest.mark.parametrize("words", ["daemon/stopping", None])
def test_a_daemon_of_another_build_may_end_by_itself_meanwhile(home: Home, words: str | None) -> None:
    def script(talk: Talk, request: Message) -> None:
        if type(request) is not Stop:
            talk.send(Done())
        elif words is None:
            talk.stream.shutdown(socket.SHUT_RDWR)
        else:
            talk.send(as_refusal(Refused(words)))

    with (
        Peer(home.address, script, of_another_build),
        connect(home.environment, no_start, outdated=no_start) as channel,
    ):
        assert [type(event) for event in exchange(channel, Ps(), Interrupts())] == [Done]


def refusing(*refused: int) -> Script:
    """Requests of these numbers come to a daemon that is about to end; to others one answer comes."""
    numbers = count()

    def script(talk: Talk, request: Message) -> None:
        if next(numbers) in refused:
            talk.send(as_refusal(Refused("daemon/stopping")))
        else:
            talk.send(Done())

    return script


def test_a_daemon_that_ends_as_the_first_request_comes_is_left_for_another(home: Home) -> None:
    with Peer(home.address, refusing(0)) as peer, connect(home.environment, no_start) as channel:
        assert list(exchange(channel, Ps(), Interrupts())) == [Done()]
        assert list(exchange(channel, Doctor(), Interrupts())) == [Done()]
        assert peer.gone.wait(SECONDS)
    assert peer.requests == [Ps(), Ps(), Doctor()]


@pytest.mark.parametrize(("refused", "answered"), [((0, 1), 0), ((1,), 1), ((0, 2), 1)])
def test_it_is_left_once_and_for_the_first_request_only(
    home: Home, refused: tuple[int, ...], answered: int
) -> None:
    with Peer(home.address, refusing(*refused)) as peer, connect(home.environment, no_start) as channel:
        for _ in range(answered):
            assert list(exchange(channel, Ps(), Interrupts())) == [Done()]
        with pytest.raises(Declined, match="caldrixd is stopping; try again"):
            list(exchange(channel, Ps(), Interrupts()))
    assert len(peer.requests) == len(refused) + answered


def test_it_is_not_left_once_it_has_said_anything(home: Home) -> None:
    def script(talk: Talk, request: Message) -> None:
        talk.send(Status("status/lane", "cpu", {}), as_refusal(Refused("daemon/stopping")))

    with Peer(home.address, script) as peer, connect(home.environment, no_start) as channel:
        events = exchange(channel, Ps(), Interrupts())
        assert type(next(events)) is Status
        with pytest.raises(Declined, match="is stopping"):
            next(events)
    assert peer.requests == [Ps()]


def test_it_is_not_left_after_a_ctrl_c(home: Home) -> None:
    interrupts = Interrupts()
    interrupts.count = 1
    with Peer(home.address, refusing(0)) as peer, connect(home.environment, no_start) as channel:
        with pytest.raises(Declined, match="is stopping"):
            list(exchange(channel, Ps(), interrupts))
        assert peer.requests.count(Ps()) == 1


def test_a_daemon_that_ignores_a_cancel_is_left(home: Home) -> None:
    """One Ctrl-C is enough to get away from a daemon that hangs."""
    interrupts = Interrupts()
    interrupts.count = 1
    with Peer(home.address, lambda talk, request: None), connect(home.environment, no_start) as channel:
        events = exchange(channel, Ps(), interrupts, cancel_seconds=0.05)
        with pytest.raises(KeyboardInterrupt):
            next(events)


def test_nobody_there_is_none_and_leaves_no_trace(home: Home) -> None:
    assert attach(home.environment) is None
    assert list((home.path / "run").iterdir()) == []


def test_a_stale_socket_is_nobody(home: Home) -> None:
    with listening(home):
        pass
    assert os.path.exists(home.address.socket)
    assert attach(home.environment) is None


def test_a_daemon_that_does_not_accept_is_busy_by_its_pid(home: Home) -> None:
    with held_lock(home, 4242), listening(home, backlog=0), crowd(home), pytest.raises(Refused) as refused:
        attach(home.environment, BRIEF)
    assert refused.value.code == "daemon/busy"
    assert refused.value.fields["pid"] == 4242


def test_a_daemon_that_does_not_greet_is_busy_by_its_pid(home: Home) -> None:
    with held_lock(home, 4242), listening(home), pytest.raises(Refused) as refused:
        attach(home.environment, BRIEF)
    assert refused.value.code == "daemon/busy"
    assert refused.value.fields["pid"] == 4242


def test_another_major_version_is_refused_with_both_versions(home: Home) -> None:
    def greet(talk: Talk, hello: Hello) -> None:
        talk.send(Welcome((2, 3), "9.9", 1))

    with Peer(home.address, Model(), greet), pytest.raises(Refused) as refused:
        attach(home.environment)
    assert refused.value.text == (
        "caldrixd speaks protocol 2.3 and this client 1.1; run `caldrix stop --daemon` and try again"
    )


def test_a_refused_greeting_is_the_daemons_word(home: Home) -> None:
    def greet(talk: Talk, hello: Hello) -> None:
        talk.send(as_refusal(Refused("daemon/peer", uid=1, own=2)))

    with Peer(home.address, Model(), greet), pytest.raises(Declined) as refused:
        attach(home.environment)
    assert refused.value.code == "daemon/peer"


def stopping(talk: Talk, hello: Hello) -> None:
    talk.send(as_refusal(Refused("daemon/stopping")))


def closing(talk: Talk, hello: Hello) -> None:
    talk.stream.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("greet", [stopping, closing])
def test_a_daemon_about_to_end_counts_as_gone(home: Home, greet: object) -> None:
    with Peer(home.address, Model(), greet):  # type: ignore[arg-type]
        assert attach(home.environment) is None


def test_a_daemon_that_is_alive_but_has_no_socket_is_waited_for_and_not_doubled(home: Home) -> None:
    with held_lock(home, 4242), pytest.raises(Refused) as refused:
        connect(home.environment, no_start, BRIEF)
    assert refused.value.code == "daemon/busy"
    assert "pid 4242" in refused.value.text
    assert not home.log.exists()


def test_the_holder_of_the_lock_is_known_by_the_lock_not_by_the_file(home: Home) -> None:
    assert holder(home.address) is None
    with held_lock(home, 4242):
        assert holder(home.address) == 4242
    assert holder(home.address) is None


@pytest.mark.parametrize("name", ["start.lock", "caldrixd.lock"])
def test_a_lock_that_cannot_be_opened_is_refused_by_its_path(home: Home, name: str) -> None:
    ensure_directory(home.address)
    path = Path(home.address.directory, name)
    path.mkdir()
    with pytest.raises(Refused) as refused:
        connect(home.environment, no_start)
    path.rmdir()
    assert refused.value.text == f"cannot reach caldrixd at {path}: Is a directory"


def test_a_log_that_is_a_pipe_nobody_reads_is_refused(home: Home) -> None:
    home.log.parent.mkdir(parents=True)
    os.mkfifo(home.log)
    with pytest.raises(Refused) as refused:
        connect(home.environment, no_start)
    assert refused.value.code == "daemon/log"


def with_daemon(home: Home, source: str) -> dict[str, str]:
    """An environment in which `python -m caldrixd` runs this source instead."""
    (home.path / "caldrixd.py").write_text(source)
    return home.environment | {"PYTHONPATH": f"{home.path}{os.pathsep}{IMPORTS}", "HF_TOKEN": "hf_secret"}


def test_a_daemon_that_ends_while_starting_is_refused_with_its_log(home: Home) -> None:
    environment = with_daemon(home, "import sys; print('no luck'); sys.exit(3)")
    with pytest.raises(Refused) as refused:
        connect(environment, no_start)
    assert refused.value.text == f"caldrixd ended while starting (status 3); its log is {home.log}"
    assert "no luck" in home.log.read_text()
    assert home.log.stat().st_mode & 0o777 == 0o600


def test_a_daemon_that_is_killed_while_starting_is_refused_by_its_signal(home: Home) -> None:
    environment = with_daemon(home, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(Refused, match=r"ended while starting \(signal 9\)"):
        connect(environment, no_start)


def test_a_daemon_that_never_listens_is_refused_with_its_log(home: Home) -> None:
    pipe = home.path / "pid"  # which whoever reads it waits for
    os.mkfifo(pipe)
    tell = f"print(os.getpid(), file=open({str(pipe)!r}, 'w'), flush=True)"
    environment = with_daemon(home, f"import os, signal; {tell}; signal.pause()")
    with pytest.raises(Refused) as refused:
        connect(environment, no_start, Patience(answer=0.2, start=0.5))
    try:
        assert refused.value.text == f"caldrixd did not start within 0.5 s; its log is {home.log}"
    finally:
        os.kill(int(pipe.read_text()), signal.SIGKILL)


def test_a_daemon_starts_in_its_own_session_with_an_allow_listed_environment(home: Home) -> None:
    report = home.path / "report"
    environment = with_daemon(
        home,
        "import json, os\n"
        f"json.dump([dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), os.read(0, 1).decode(),\n"
        f"           sorted(os.listdir('/proc/self/fd'))[:-1]], open({str(report)!r}, 'w'))\n",
    )
    with pytest.raises(Refused, match="status 0"):
        connect(environment, no_start)
    inherited, directory, leads_session, typed, descriptors = json.loads(Path(report).read_text())
    assert inherited["PYTHONPATH"] == environment["PYTHONPATH"].removesuffix(".").rstrip("/")
    assert "HF_TOKEN" not in inherited
    assert (directory, leads_session, typed) == ("/", True, "")
    assert set(descriptors) <= {"0", "1", "2", "3", "4"}


def test_a_connection_is_over_when_the_daemon_says_that_it_ends_and_when_it_is_closed(home: Home) -> None:
    """Also when the word came along with the end of a request."""
    answered = threading.Event()
    goodbye = as_refusal(Refused("daemon/stopping"))

    def script(talk: Talk, request: Message) -> None:
        talk.send(*((Done(), goodbye) if type(request) is Stop else (Done(),)))
        assert answered.wait(SECONDS)
        if type(request) is Ps:
            talk.send(goodbye)
        elif type(request) is Doctor:
            talk.stream.shutdown(socket.SHUT_RDWR)

    with Peer(home.address, script):
        for request in (Ps(), Doctor(), Stop()):
            answered.clear()
            with connect(home.environment, no_start) as channel:
                assert not channel.is_over
                assert list(exchange(channel, request, Interrupts())) == [Done()]
                assert channel.is_over == (type(request) is Stop)
                answered.set()
                if type(request) is not Stop:
                    assert select.select([channel._socket], [], [], SECONDS)[0]
                assert channel.is_over
