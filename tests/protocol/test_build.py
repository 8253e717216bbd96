"""A build's name changes with every file that a daemon runs, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caldrix_protocol.build import find_build, same_build
from caldrix_protocol.version import VERSION


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Where both packages are."""
    for file in ("caldrixd/__init__.py", "caldrixd/text/child.py", "caldrix_protocol/__init__.py"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", "ascii")
    return tmp_path


def test_every_change_of_a_source_is_another_build(installed: Path) -> None:
    path = ["/nowhere", str(installed)]
    found = [find_build(path)]

    def changed() -> bool:
        found.append(find_build(path))
        return len(set(found)) == len(found)

    assert found[0].startswith(f"{VERSION}+")
    (installed / "caldrixd" / "text" / "new.py").touch()
    assert changed()
    (installed / "caldrixd" / "text" / "child.py").write_text("x = 22\n", "ascii")
    assert changed()
    time = (installed / "caldrix_protocol" / "__init__.py").stat().st_mtime_ns
    os.utime(installed / "caldrix_protocol" / "__init__.py", ns=(time, time - 1))
    assert changed()
    (installed / "caldrixd" / "text" / "child.py").unlink()
    assert changed()


def test_what_is_no_source_changes_nothing(installed: Path) -> None:
    found = find_build([str(installed)])
    (installed / "caldrixd" / "__pycache__").mkdir()
    (installed / "caldrixd" / "__pycache__" / "daemon.py").touch()
    (installed / "caldrixd" / "README.md").touch()
    (installed / "other").mkdir()
    assert find_build([str(installed), "/elsewhere"]) == found


def test_without_files_only_the_version_is_known(installed: Path) -> None:
    (installed / "caldrixd" / "__init__.py").unlink()
    assert find_build([str(installed)]) == VERSION
    assert find_build([]) == VERSION


def test_a_file_that_cannot_be_looked_at_leaves_the_version_alone(installed: Path) -> None:
    (installed / "caldrixd" / ".#child.py").symlink_to("me@host.4711")  # an editor's lock
    assert find_build([str(installed)]) == VERSION


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1.0+a", "1.0+a", True),
        ("1.0+a", "1.0+b", False),
        ("1.0+a", "1.0", True),
        ("1.0", "1.0+a", True),
        ("1.0", "1.1+a", False),
        ("1.0", "1.1", False),
    ],
)
def test_builds_are_compared_as_far_as_they_are_known(one: str, other: str, same: bool) -> None:
    assert same_build(one, other) is same
