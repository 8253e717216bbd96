"""Run the real command `caldrix` in a home of its own: with pipes, or in a real pseudo-terminal."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from caldrix_protocol.address import Address, find_address

ROOT = Path(__file__).parents[2]
IMPORTS = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
COMMAND = (sys.executable, "-m", "caldrix_client")
SECONDS = 300  # a test that waits longer for anything has failed


class Result(NamedTuple):
    """What a finished command left behind."""

    status: int
    out: str
    err: str


class Home(NamedTuple):
    """A user's home, runtime and state directories, made for one test; `cache` may be shared."""

    path: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.path),
            "XDG_RUNTIME_DIR": str(self.path / "run"),
            "XDG_STATE_HOME": str(self.path / "state"),
            "XDG_CACHE_HOME": str(self.cache),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": IMPORTS,
            "TERM": "xterm",
            "LANG": "C.UTF-8",
        }

    @property
    def address(self) -> Address:
        return find_address(self.environment, os.geteuid())

    @property
    def log(self) -> Path:
        return self.path / "state" / "caldrix" / "caldrixd.log"

    def start(self, *arguments: str, out: int | None = None, **more: str) -> subprocess.Popen[bytes]:
        """The command with pipes, running. `out` replaces its stdout, `more` is further environment."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            (*COMMAND, *arguments),
            stdin=pipe,
            stdout=pipe if out is None else out,
            stderr=pipe,
            env=self.environment | more,
        )

    def caldrix(self, *arguments: str, typed: bytes = b"", **more: str) -> Result:
        """Run the command to its end with `typed` on a piped stdin."""
        return finish(self.start(*arguments, out=None, **more), typed)


def finish(process: subprocess.Popen[bytes], typed: bytes = b"") -> Result:
    """Wait for a command that `Home.start` began."""
    with process:
        try:
            out, err = process.communicate(typed, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Result(process.returncode, (out or b"").decode(), err.decode())


@contextmanager
def new_home(cache: Path | None = None) -> Iterator[Home]:
    """A home with a path short enough for a socket; a daemon that was started in it is ended with it."""
    path = Path(tempfile.mkdtemp(prefix="caldrix-"))
    (path / "run").mkdir(mode=0o700)
    home = Home(path, cache or path / "cache")
    try:
        yield home
    finally:
        _end_daemon(home)
        shutil.rmtree(path, ignore_errors=True)


def _end_daemon(home: Home) -> None:
    """Kill the daemon that holds the lock of this home, if one does, also where it has only just begun."""
    try:
        lock = open(home.path / "run" / "caldrix" / "caldrixd.lock", "r+b", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        return
    with lock:
        while not _is_free(lock):
            pid = os.pread(lock.fileno(), 32, 0).strip()  # nothing, or an earlier one's, for a moment
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(pid), signal.SIGKILL)


def _is_free(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Screen:
    """A command in a pseudo-terminal: what it shows, and the keys pressed."""

    def __init__(
        self,
        home: Home,
        *arguments: str,
        typed: int | None = None,
        out: int | None = None,
        err: int | None = None,
        **more: str,
    ) -> None:
        """`typed`, `out`, `err`: descriptors that replace the terminal; a `typed` of -1 closes stdin."""
        self.keys, self.terminal = pty.openpty()
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read = 0
        self.process = subprocess.Popen(
            (*COMMAND, *arguments),
            stdin=self.terminal if typed is None else None if typed < 0 else typed,
            stdout=self.terminal if out is None else out,
            stderr=self.terminal if err is None else err,
            env=home.environment | more,
            start_new_session=True,
            preexec_fn=partial(_take_terminal, self.terminal, typed == -1),
        )

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def press(self, keys: str) -> None:
        """Type; "\\x03" is Ctrl-C and "\\x04" Ctrl-D."""
        os.write(self.keys, keys.encode())

    def expect(self, text: str) -> str:
        """Wait for text after what was expected before; return all that was shown up to its end."""
        deadline = time.monotonic() + SECONDS
        while (at := self.shown.find(text, self._read)) < 0:
            if not self._more(deadline):
                raise AssertionError(f"ended without {text!r}: {self.shown[self._read :]!r}")
        start, self._read = self._read, at + len(text)
        return self.shown[start : self._read]

    def ready(self) -> str:
        """Wait until the line editor takes a message: it then asks the terminal to mark what is pasted."""
        return self.expect("\x1b[?2004h")

    def hang_up(self) -> None:
        """Close the terminal, as the end of its window does."""
        self._close_terminal()
        if self.keys >= 0:
            os.close(self.keys)
            self.keys = -1

    def end(self) -> int:
        """Wait for the end of the command; its exit status."""
        self._close_terminal()
        deadline = time.monotonic() + SECONDS
        while self._more(deadline):
            pass
        return self.process.wait(SECONDS)

    def _close_terminal(self) -> None:
        """Leave the terminal to the command: what it showed then has an end."""
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self.keys], [], [], seconds)[0])

    def _more(self, deadline: float) -> bool:
        """Read what is shown next; False once nobody can show anything any more."""
        while not self._readable(0.2):
            if self.process.poll() is not None and not self._readable(0.0):
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing after {self.shown[self._read :]!r}")
        try:
            data = os.read(self.keys, 1 << 16)
        except OSError:  # EIO: the last process with this terminal has gone
            return False
        self.shown += self._decoder.decode(data)
        return bool(data)


def _take_terminal(terminal: int, without_stdin: bool) -> None:
    """In the child: Ctrl-C in this terminal is for it."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    if without_stdin:
        os.close(0)
