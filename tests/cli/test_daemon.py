"""The command and the real daemon: starting one, finding one, ending one."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from caldrix_client.channel import exchange
from caldrix_client.connect import Patience, attach, connect, holder
from caldrix_client.interrupts import Interrupts
from caldrix_protocol.messages import Done, Ps, Stop
from caldrix_protocol.refusals import Refused
from caldrixd.models.aliases import NAMES
from tests.support.cli import ROOT, Home, finish
from tests.support.daemon import await_end

HERD = 50
UNKNOWN = f"caldrix: nope is not a directory, an alias ({', '.join(NAMES)}) or a Hugging Face repo id\n"


def start_daemon(home: Home) -> int:
    """Start a daemon with the cheapest request that does; its pid."""
    result = home.caldrix("run", "nope", "-p", "x")
    pid = holder(home.address)
    assert result == (1, "", f"caldrix: started caldrixd (pid {pid})\n{UNKNOWN}")
    assert pid
    return pid


def births(home: Home) -> int:
    return home.log.read_text().count("listening at")


def test_a_cold_herd_ends_up_on_one_daemon(home: Home) -> None:
    herd = [home.start("run", "nope", "-p", "x") for _ in range(HERD)]
    results = [finish(process) for process in herd]
    said = sorted(re.sub(r"caldrix: started .*\n", "", result.err) for result in results)
    assert said == [UNKNOWN] * HERD
    assert {result.status for result in results} == {1}
    assert births(home) == 1
    assert sum("started caldrixd" in result.err for result in results) == 1


def test_a_daemon_stays_and_is_found(home: Home) -> None:
    start_daemon(home)
    assert home.caldrix("run", "nope", "-p", "x") == (1, "", UNKNOWN)
    assert home.caldrix("ps").status == 0
    assert births(home) == 1


def test_stop_ends_the_daemon_and_the_next_run_starts_another(home: Home) -> None:
    first = start_daemon(home)
    assert home.caldrix("stop") == (0, "", "")
    assert home.caldrix("stop", "--daemon") == (0, "", "caldrix: caldrixd has stopped\n")
    assert home.caldrix("ps").err == "caldrix: caldrixd is not running\n"
    second = start_daemon(home)
    assert second != first
    assert births(home) == 2


def test_a_killed_daemon_is_replaced(home: Home) -> None:
    first = start_daemon(home)
    os.kill(first, signal.SIGKILL)
    await_end(first)
    assert os.path.exists(home.address.socket)
    assert start_daemon(home) != first


@pytest.fixture
def installation(tmp_path: Path) -> str:
    """A copy of the packages, as the import path that leads to it."""
    for name in ("caldrixd", "caldrix_client", "protocol/caldrix_protocol", "kernels/caldrix_kernels"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return str(tmp_path)


def test_an_idle_daemon_with_old_code_is_replaced(home: Home, installation: str) -> None:
    def run() -> str:
        process = home.start("run", "nope", "-p", "x", PYTHONPATH=installation, PYTHONSAFEPATH="1")
        return finish(process).err

    assert run().endswith(UNKNOWN)
    first = holder(home.address)
    assert run() == UNKNOWN
    with (Path(installation) / "caldrixd" / "spec.py").open("a") as file:
        file.write("# new\n")
    said = run()
    second = holder(home.address)
    assert said == f"caldrix: started caldrixd (pid {second})\n{UNKNOWN}"
    assert first != second
    assert run() == UNKNOWN
    assert births(home) == 2


def test_a_daemon_that_another_build_ends_before_the_first_request_comes_is_left(home: Home) -> None:
    """As when two installations are used in turn: one ends the daemon that the other has just reached."""
    first = start_daemon(home)
    started: list[int] = []
    with connect(home.environment, started.append) as channel:
        with connect(home.environment, started.append) as other:
            assert list(exchange(other, Stop(daemon=True, if_idle=True), Interrupts())) == [Done()]
        await_end(first)
        assert list(exchange(channel, Ps(), Interrupts())) == [Done()]
    assert started == [holder(home.address)]
    assert births(home) == 2


def test_a_stopped_daemon_is_busy_and_not_replaced(home: Home) -> None:
    pid = start_daemon(home)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(8):
            with pytest.raises(Refused, match=f"pid {pid}"):
                attach(home.environment, Patience(0.1, 0.1))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert home.caldrix("ps").status == 0
    assert holder(home.address) == pid
    assert births(home) == 1


def test_doctor_starts_a_daemon_and_prints_every_lane(home: Home) -> None:
    result = home.caldrix("doctor")
    assert result.status == 0
    lines = result.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["metal", "hip", "cpu"]
    for line in lines:
        lane = line.partition(":")[0]
        assert re.search(rf"; images on {lane}: (yes|no); speculation=(yes|no)$", line)
    assert lines[-1].startswith("cpu: usable (")


def test_a_runtime_directory_open_to_others_is_refused(home: Home) -> None:
    directory = home.path / "run" / "caldrix"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    result = home.caldrix("run", "nope", "-p", "x")
    assert result.status == 1
    assert result.err.endswith(f"run chmod 700 {directory}\n")
    assert result.err.count("\n") == 1
    assert not home.log.exists()
