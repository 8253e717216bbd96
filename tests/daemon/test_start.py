"""One daemon for each user: the lock, the socket, and what stands in their way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.options import options_of
from caldrix_protocol.usage import daemon_help
from tests.support.daemon import ROOT, SECONDS, Daemon, Home, running_daemon, spawn


def refused_start(home: Home, *arguments: str) -> tuple[int, str]:
    """Exit status and last log line of a daemon that does not come up."""
    status = spawn(home, *arguments).wait()
    return status, home.log.splitlines()[-1]


def test_a_second_daemon_names_the_first(daemon: Daemon) -> None:
    status, said = refused_start(daemon.home)
    assert status == 1
    assert said == f"caldrixd: caldrixd is already running (pid {daemon.pid})"
    assert daemon.loaded() == []


def test_a_stopped_daemon_keeps_its_socket(daemon: Daemon) -> None:
    before = os.lstat(daemon.home.address.socket).st_ino
    daemon.signal(signal.SIGSTOP)
    others = [spawn(daemon.home) for _ in range(4)]
    assert [other.wait() for other in others] == [1] * 4
    assert os.lstat(daemon.home.address.socket).st_ino == before
    daemon.signal(signal.SIGCONT)
    assert daemon.loaded() == []


def test_what_a_killed_daemon_left_is_replaced(home: Home) -> None:
    with running_daemon(home) as first:
        first.signal(signal.SIGKILL)
        first.wait()
        assert Path(home.address.socket).exists()
    with running_daemon(home) as second:
        assert second.loaded() == []
        assert Path(home.address.lock).read_text("ascii") == f"{second.pid}\n"


def test_another_kind_of_file_is_left_alone(home: Home) -> None:
    path = Path(home.address.socket)
    path.parent.mkdir(mode=0o700)
    path.write_text("mine", "ascii")
    status, said = refused_start(home)
    assert status == 1
    assert said == f"caldrixd: {path} is not a socket; caldrixd does not remove it"
    assert path.read_text("ascii") == "mine"


def test_an_open_runtime_directory_is_refused(home: Home) -> None:
    directory = Path(home.address.directory)
    directory.mkdir()
    directory.chmod(0o755)
    status, said = refused_start(home)
    assert status == 1
    assert said.endswith(f"run chmod 700 {directory}")
    assert list(directory.iterdir()) == []


def test_the_socket_is_never_open_to_others(home: Home) -> None:
    """Not even between bind and chmod: here the chmod never comes."""
    old = os.umask(0)
    try:
        with running_daemon(home, prelude="os.chmod = lambda *arguments: None"):
            assert stat.S_IMODE(os.lstat(home.address.socket).st_mode) & 0o077 == 0
    finally:
        os.umask(old)


def test_modes_of_a_running_daemon(daemon: Daemon) -> None:
    address = daemon.home.address
    assert stat.S_IMODE(os.lstat(address.directory).st_mode) == 0o700
    assert stat.S_IMODE(os.lstat(address.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.lstat(address.lock).st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--idle-unload"], "--idle-unload needs a value"),
        (["--idle-unload", "soon"], "--idle-unload must be seconds from 0 to 31536000, got soon"),
        (["--idle-unload=-1"], "--idle-unload must be seconds from 0 to 31536000, got -1"),
        (["--port", "80"], "unknown flag --port; `caldrix help` lists the flags"),
        (["now"], "caldrixd takes no arguments, got now"),
    ],
)
def test_bad_arguments(home: Home, arguments: list[str], said: str) -> None:
    assert refused_start(home, *arguments) == (2, f"caldrixd: {said}")
    assert not Path(home.address.directory).exists()


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["--version"], "caldrixd 0.1.0\n"),
        (["--idle-unload", "3", "--version"], "caldrixd 0.1.0\n"),
        (["--help"], "usage: caldrixd [flags]\n"),
        (["-h"], "usage: caldrixd [flags]\n"),
    ],
)
def test_what_is_asked_for_goes_to_stdout(home: Home, arguments: list[str], begins: str) -> None:
    command = [sys.executable, "-P", "-m", "caldrixd", *arguments]
    done = subprocess.run(command, env=home.environment, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(begins)
    assert not Path(home.address.directory).exists()


def test_help_has_every_flag() -> None:
    for option in options_of("caldrixd"):
        assert f"  {option.name} {option.metavar}\n      {option.doc} [{option.absent}]" in daemon_help()
    assert max(map(len, daemon_help().splitlines())) <= 110


_HANGS = """
import sys, threading
from caldrixd import __main__, daemon
sys.argv = ["caldrixd"]
daemon.run = lambda config: threading.Thread(target=threading.Event().wait).start() or 3
sys.exit(__main__.main())
"""


def test_what_a_thread_still_waits_for_does_not_keep_it_alive(home: Home) -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], env=home.environment, timeout=SECONDS)
    assert done.returncode == 3


def test_it_starts_without_what_only_workers_need() -> None:
    heavy = [
        "numpy",
        "numba",
        "llvmlite",
        "tokenizers",
        "jinja2",
        "gguf",
        "huggingface_hub",
        "safetensors",
        "PIL",
    ]
    code = f"import sys, caldrixd.daemon; print([name for name in {heavy} if name in sys.modules])"
    paths = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
