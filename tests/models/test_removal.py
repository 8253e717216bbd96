"""A model goes whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models import removal

# Root may do everything but for its capabilities.
PREFIX = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
REMOVE = """
import pathlib, sys
from caldrix_protocol.refusals import Refused
from caldrixd.models import removal
try:
    removal.remove(pathlib.Path(sys.argv[1]))
except Refused as refused:
    print(refused.text)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two snapshots of a repo that share a blob, as the hub's library lays them out."""
    path = tmp_path / "hub" / "models--tiny--llama"
    (path / "blobs").mkdir(parents=True)
    (path / "blobs" / "weights").write_text("shared")
    for commit in ("a" * 40, "b" * 40):
        (path / "snapshots" / commit).mkdir(parents=True)
        (path / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/weights")
    return path


def names(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def remove(path: Path) -> str:
    command = [*PREFIX, sys.executable, "-c", REMOVE, str(path)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("closed", [".", "..", "blobs", "snapshots", f"snapshots/{'b' * 40}"])
def test_where_a_part_may_not_go_nothing_goes(model: Path, closed: str) -> None:
    before = names(model)
    directory = model / closed
    directory.chmod(0o555)
    told = remove(model)
    directory.chmod(0o755)
    assert names(model.parent) == sorted([model.name, *(f"{model.name}/{name}" for name in before)])
    shown = model if closed == ".." else directory
    assert told == f"{shown} cannot be removed: Permission denied\n"


def test_what_may_go_goes_and_links_are_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    (model / "blobs" / "link").symlink_to(tmp_path / "mine")
    (model / "empty").mkdir(0o555)
    assert remove(model) == ""
    assert names(tmp_path) == ["hub", "mine", "mine/file"]


def test_a_removal_that_was_killed_left_no_model_and_is_finished_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = model.with_name("models--tiny--other")
    other.mkdir()

    def killed(path: Path) -> None:
        (path / "blobs" / "weights").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        removal.remove(model)
    monkeypatch.undo()
    assert not model.exists()
    assert len(list(model.parent.iterdir())) == 2
    removal.finish(model.parent)
    assert list(model.parent.iterdir()) == [other]


def test_a_model_in_a_layer_of_an_image_is_removed_where_it_stands(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As overlayfs answers for a directory of a lower layer."""

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path, None, target)

    monkeypatch.setattr(Path, "rename", refuse)
    removal.remove(model)
    assert list(model.parent.iterdir()) == []


def test_two_that_remove_at_once_are_no_fault_of_each_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.rmtree

    def overtaken(path: Path) -> None:
        monkeypatch.undo()
        removal.finish(path.parent)
        whole(path)

    monkeypatch.setattr(shutil, "rmtree", overtaken)
    removal.remove(model)
    assert list(model.parent.iterdir()) == []
    with pytest.raises(Refused) as caught:
        removal.remove(model)
    assert caught.value.text == f"{model} cannot be removed: No such file or directory"
