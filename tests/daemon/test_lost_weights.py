"""Weights that change, or that the disk keeps back, while a worker reads them are told in one sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from caldrix_protocol.messages import Open, Opened
from caldrix_protocol.refusals import Refused
from caldrixd.models.changed import identity
from caldrixd.models.files import weight_files
from caldrixd.worker.process import Key, Worker
from tests.support.daemon import ROOT, Home, running_daemon
from tests.support.models import tiny

# In a worker: does to the weights what CHANGE says once they are mapped, before anything else is opened.
_CHANGE = """
import os, sys, threading
path, mapped = os.environ["HOME"] + "/model/model.safetensors", False
def watch(event, arguments):
    global mapped
    if threading.current_thread() is not threading.main_thread():
        return
    if event == "mmap.__new__" and arguments[0] >= 0:
        mapped = os.path.samestat(os.fstat(arguments[0]), os.stat(path))
    elif mapped and event == "open":
        mapped = False
        CHANGE
if "caldrixd.worker" in sys.orig_argv:
    sys.addaudithook(watch)
"""
CUT = "os.truncate(path, 8192)"
TOUCHED = "os.utime(path, ns=(1, 1))"
CUT_TEXT = (
    "model.safetensors is truncated: its header describes 240288 bytes, the file has 8192; download it again"
)
CHANGED_TEXT = "model.safetensors was changed while it was read; run the command again"


@pytest.fixture
def model(home: Home) -> Path:
    return shutil.copytree(tiny("tiny-llama"), home.root / "model")


@pytest.mark.parametrize(("change", "told"), [(CUT, CUT_TEXT), (TOUCHED, CHANGED_TEXT)])
def test_weights_that_change_while_they_are_packed_are_named(
    home: Home, model: Path, change: str, told: str
) -> None:
    hooks = home.root / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(_CHANGE.replace("CHANGE", change), "ascii")
    home.changes = {"PYTHONPATH": f"{hooks}{os.pathsep}{home.environment['PYTHONPATH']}"}
    with running_daemon(home) as daemon, daemon.caller() as caller:
        assert caller.ask(Open(str(model), {}))[-1].text == told
        (hooks / "sitecustomize.py").unlink()
        shutil.copy(tiny("tiny-llama") / "model.safetensors", model)
        assert type(caller.ask(Open(str(model), {}))[-2]) is Opened
    assert "incident" not in home.log


def leave_alone(path: Path) -> None:
    pass


def cut(path: Path) -> None:
    os.truncate(path, 8192)


def grow_back(path: Path) -> None:
    """As a download does that begins anew."""
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole)


def remove(path: Path) -> None:
    path.unlink()


# What a worker is whose mapped file ends before its last page.
_BUS_ERROR = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut, CUT_TEXT),
        (grow_back, CHANGED_TEXT),
        (remove, "{path} has no *.safetensors; inferno reads safetensors only"),
        (
            leave_alone,
            "the disk did not give all of the weights in {path}; the system's log (dmesg) may say why",
        ),
    ],
)
def test_a_bus_error_while_loading_is_told_by_what_became_of_the_files(
    home: Home, model: Path, change: Callable[[Path], None], told: str
) -> None:
    program = home.root / "caldrixd"
    program.mkdir()
    (program / "__init__.py").touch()
    (program / "worker.py").write_text(_BUS_ERROR, "ascii")
    environment = home.environment | {"PYTHONPATH": f"{home.root}{os.pathsep}{ROOT / 'protocol'}"}
    key = Key(str(model), identity(model, weight_files(model)), "cpu")
    change(model / "model.safetensors")

    async def run() -> Refused:
        worker = Worker(key, "model", environment)
        await worker.run()
        assert worker.refused is not None
        return worker.refused

    assert anyio.run(run).text == told.format(path=model)
