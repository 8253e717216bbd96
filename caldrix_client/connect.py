"""Reach the user's daemon, and start it when there is none."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from caldrix_client.channel import STOPPING, Channel, Declined
from caldrix_client.environment import for_daemon
from caldrix_protocol.address import Address, ensure_directory, find_address, state_directory
from caldrix_protocol.build import find_build, same_build
from caldrix_protocol.connection import hello, versions_differ
from caldrix_protocol.messages import Message, Refusal, Stop, Welcome
from caldrix_protocol.refusals import Refused
from caldrix_protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR

if TYPE_CHECKING:
    from subprocess import Popen

PAUSE = 0.02  # seconds between two tries
ATTEMPTS = 2  # daemons that may end while starting, before this is a failure


class Patience(NamedTuple):
    """Seconds to wait: `answer` for a living daemon's welcome, `start` for a new daemon's socket."""

    answer: float = 10.0
    start: float = 20.0


PATIENCE = Patience()


def _ignore(pid: int) -> None:
    """Says nothing."""


def attach(environment: Mapping[str, str], patience: Patience = PATIENCE) -> Channel | None:
    """A greeted channel to the running daemon, or None if none runs. Starts nothing.

    Raises Refused: daemon/busy when it does not answer in time, daemon/version, daemon/connect, socket/...
    """
    address = find_address(environment, os.geteuid())
    return _try(address, time.monotonic() + patience.answer)


def connect(
    environment: Mapping[str, str],
    started: Callable[[int], None],
    patience: Patience = PATIENCE,
    outdated: Callable[[int], None] = _ignore,
) -> Channel:
    """A greeted channel to the daemon, which is started first when none runs; `started` is told its pid.

    A daemon that runs other code than this client would start is replaced when nobody uses it; else
    `outdated` is told its pid. Raises Refused like `attach`, and daemon/exited or daemon/did-not-start, which
    name the log file.
    """

    def again() -> Channel:
        return _reach(environment, started, patience, outdated)

    channel = again()
    channel.again = again
    return channel


def _reach(
    environment: Mapping[str, str],
    started: Callable[[int], None],
    patience: Patience,
    outdated: Callable[[int], None],
) -> Channel:
    channel = attach(environment, patience)
    if channel is not None and same_build(channel.welcome.version, find_build(sys.path)):
        return channel
    address = find_address(environment, os.geteuid())
    if channel is not None:
        if not _ended(channel, address, time.monotonic() + patience.start):
            outdated(channel.welcome.pid)
            return channel
        channel.close()
    ensure_directory(address)
    deadline = time.monotonic() + patience.start
    try:
        descriptor = os.open(address.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unreachable(address.start_lock, error) from None
    try:
        while not _lock(descriptor):
            channel = _try(address, deadline)
            if channel is not None:
                return channel
            if time.monotonic() > deadline:
                raise _not_started(environment, patience)
            time.sleep(PAUSE)
        return _start(address, environment, started, patience)
    finally:
        os.close(descriptor)


def holder(address: Address) -> int | None:
    """The pid of the daemon that holds its lock; 0 if it has not written it yet, None if nobody holds it."""
    try:
        descriptor = os.open(address.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreachable(address.lock, error) from None
    try:
        if _lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)


def _start(
    address: Address, environment: Mapping[str, str], started: Callable[[int], None], patience: Patience
) -> Channel:
    """With the start lock held: one daemon, waited for. One that is just ending is waited out first."""
    deadline = time.monotonic() + patience.start
    process: Popen[bytes] | None = None
    ended = 0
    while (channel := _try(address, deadline)) is None:
        if time.monotonic() > deadline:
            pid = holder(address)
            if pid is None or (process is not None and process.pid == pid):
                raise _not_started(environment, patience)
            raise Refused("daemon/busy", pid=pid or "unknown", path=address.socket)
        if process is not None and process.poll() is not None:
            ended += holder(address) is None
            if ended >= ATTEMPTS:
                raise _exited(process.returncode, environment)
            process = None
        if process is None and holder(address) is None:
            process = _spawn(environment)
        time.sleep(PAUSE)
    if process is not None:
        started(process.pid)
    return channel


def _try(address: Address, deadline: float) -> Channel | None:
    """One attempt to connect and greet. None when nobody listens, or when the daemon is just stopping."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not _connected(stream, address, deadline):
            stream.close()
            return None
        channel = Channel(stream)
        if _greet(channel, address, deadline):
            return channel
    except BaseException:
        stream.close()
        raise
    channel.close()
    return None


def _connected(stream: socket.socket, address: Address, deadline: float) -> bool:
    stream.setblocking(False)
    while True:
        try:
            stream.connect(address.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # the backlog is full; a Unix socket gives nothing to wait for
            if time.monotonic() > deadline:
                raise _busy(address) from None
            time.sleep(PAUSE)
        except OSError as error:
            raise _unreachable(address.socket, error) from None
        else:
            return True


def _greet(channel: Channel, address: Address, deadline: float) -> bool:
    """Exchange hello and welcome; False when the daemon closes instead, because it is about to end."""
    answer = _answer(channel, hello(os.getpid()), address, deadline)
    if answer is None:
        return False
    if type(answer) is Refusal:
        raise Declined(answer)
    assert type(answer) is Welcome
    channel.welcome = answer
    if answer.protocol[0] != PROTOCOL_MAJOR:
        raise versions_differ(answer.protocol, (PROTOCOL_MAJOR, PROTOCOL_MINOR))
    return True


def _ended(channel: Channel, address: Address, deadline: float) -> bool:
    """Have the daemon end unless somebody uses it; whether it has."""
    return type(_answer(channel, Stop(daemon=True, if_idle=True), address, deadline)) is not Refusal


def _answer(channel: Channel, message: Message, address: Address, deadline: float) -> Message | None:
    """What the daemon says to a message; None when it is about to end anyway, or has."""
    channel.send(message)
    try:
        answer = channel.receive(deadline=deadline)
    except TimeoutError:
        raise _busy(address) from None
    except Refused as refused:
        if refused.code == "daemon/closed":
            return None
        raise
    return None if type(answer) is Refusal and answer.code == STOPPING else answer


def _spawn(environment: Mapping[str, str]) -> Popen[bytes]:
    """Run caldrixd in a session of its own, without our terminal, directory or environment."""
    import subprocess

    path = _log_file(environment)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(path, flags | os.O_NONBLOCK, 0o600)  # opening a FIFO would wait for its reader
    except OSError as error:
        raise Refused("daemon/log", path=path, reason=error.strerror) from None
    try:
        return subprocess.Popen(
            (sys.executable, "-P", "-m", "caldrixd"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=for_daemon(environment),
            start_new_session=True,
        )
    finally:
        os.close(log)


def _lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unreachable(path: str, error: OSError) -> Refused:
    return Refused("daemon/connect", path=path, reason=error.strerror)


def _busy(address: Address) -> Refused:
    return Refused("daemon/busy", pid=holder(address) or "unknown", path=address.socket)


def _not_started(environment: Mapping[str, str], patience: Patience) -> Refused:
    return Refused("daemon/did-not-start", seconds=f"{patience.start:g}", log=_log_file(environment))


def _exited(status: int, environment: Mapping[str, str]) -> Refused:
    from caldrix_protocol.limits import of_status

    limited = of_status(status, "caldrixd")
    if limited is not None:
        return Refused("client/limit", **limited.fields)
    return Refused("daemon/exited", reason=_ending(status), log=_log_file(environment))


def _log_file(environment: Mapping[str, str]) -> str:
    return os.path.join(state_directory(environment), "caldrixd.log")


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
