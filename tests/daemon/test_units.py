"""The unit files: what the daemon's safety and its behaviour rest on is in them."""

from __future__ import annotations

import configparser
import os
import plistlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from caldrixd.config import Config
from tests.support.daemon import ROOT

UNITS = ROOT / "systemd"


def section(name: str, title: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name, "utf-8")
    return dict(parser[title])


def test_the_service() -> None:
    service = section("caldrixd.service", "Service")
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "UMask": "0077",
        "RuntimeDirectory": "caldrix",
        "RuntimeDirectoryMode": "0700",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "LimitCORE": "0",
        "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6",
        "SystemCallFilter": "@system-service",
    }
    assert {name: service.get(name) for name in expected} == expected
    assert float(service["TimeoutStopSec"]) > Config.drain_seconds
    assert float(service["WatchdogSec"]) > 0
    # Each of these would break the daemon: compiled kernels, GPUs, downloads.
    assert not {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateNetwork"} & service.keys()
    # With these the manager of a user, which may not drop capabilities, does not start it.
    dropping = {"CapabilityBoundingSet", "ProtectClock", "ProtectKernelModules", "ProtectKernelLogs"}
    assert not (dropping | {"AmbientCapabilities"}) & service.keys()


def test_the_socket() -> None:
    unit = section("caldrixd.socket", "Socket")
    assert unit["ListenStream"] == "%t/caldrix/caldrixd.sock"
    assert (unit["SocketMode"], unit["DirectoryMode"]) == ("0600", "0700")


def test_the_launch_agent() -> None:
    with open(UNITS / "org.caldrix.caldrixd.plist", "rb") as file:
        agent = plistlib.load(file)
    assert agent["Umask"] == 0o077
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] > Config.drain_seconds


def test_what_the_service_may_write_to() -> None:
    """All may be read, since models stand anywhere; `yes` would shut out what is below, whatever is added."""
    service = section("caldrixd.service", "Service")
    assert service["ProtectHome"] == "read-only"
    assert service["ReadWritePaths"].split() == ["%C", "%S", "-%h/.cache/huggingface"]


def drop_in(directory: Path) -> str:
    """What docs/run.md adds for a cache elsewhere, as it is of that directory."""
    (block,) = re.findall(r"^```ini\n(.*?)^```$", (ROOT / "docs/run.md").read_text("utf-8"), re.M | re.S)
    assert "/data/huggingface" in block
    return str(block).replace("/data/huggingface", str(directory))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    (tmp_path / "caldrixd.service.d").mkdir()
    (tmp_path / "caldrixd.service.d" / "override.conf").write_text(drop_in(tmp_path), "utf-8")
    program = tmp_path / ".local/bin/caldrixd"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n", "ascii")
    program.chmod(0o755)
    for name in ("caldrixd.socket", "caldrixd.service"):
        text = (UNITS / name).read_text("utf-8").replace("%h/.local/bin/caldrixd", str(program))
        (tmp_path / name).write_text(text, "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "caldrixd.socket", "caldrixd.service"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
