"""The directory of compiled kernels: what is used stays, what is out of date goes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from caldrixd.lanes.drivers import compiler, kernel_cache
from caldrixd.lanes.drivers.compiler import worker_environment
from tests.support.daemon import ROOT

PATHS = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
NOBODY = 65534


def entry(directory: Path, number: int, kind: str) -> Path:
    """What some version compiled, used at that second."""
    path = directory / f"{number:032x}"
    if kind == "library":
        path = path.with_suffix(".so")
        path.write_bytes(b"code")
    else:
        (path / "module").mkdir(parents=True)
        (path / "module" / "kernel.nbc").write_bytes(b"code")
    os.utime(path, (number, number))
    return path


@contextmanager
def another_process(code: str, *arguments: Path) -> Iterator[None]:
    """Runs `code` beside this process, which it has done when the block begins; it is killed at the end."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


HOLD = """
from pathlib import Path
from caldrixd.lanes.drivers.kernel_cache import hold
assert hold(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["directory", "library"])
def test_the_current_the_last_used_and_the_held_stay(tmp_path: Path, kind: str) -> None:
    paths = [entry(tmp_path, number, kind) for number in range(1, 6)]
    others = [tmp_path / "build-x", tmp_path / "c", tmp_path / "README"]
    for path in others:
        path.mkdir()
    with another_process(HOLD, paths[2]):
        os.utime(paths[2], (3, 3))
        kernel_cache.prune(tmp_path, {paths[0].name})
        assert sorted(tmp_path.iterdir()) == sorted([paths[0], paths[2], paths[4], *others])
    kernel_cache.prune(tmp_path, {paths[0].name})
    assert sorted(tmp_path.iterdir()) == sorted([paths[0], paths[4], *others])


def test_what_is_used_counts_as_used_last(tmp_path: Path) -> None:
    paths = [entry(tmp_path, number, "directory") for number in range(1, 4)]
    with another_process(HOLD, paths[0]):
        pass
    kernel_cache.prune(tmp_path, ())
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert not kernel_cache.hold(paths[1])


BUILD = """
from pathlib import Path
from caldrixd.lanes.drivers.kernel_cache import building
place = building(Path(sys.argv[1]))
(place.__enter__() / "half.so").touch()
"""


def test_what_a_killed_compiler_left_is_removed_once_none_compiles(tmp_path: Path) -> None:
    libraries = tmp_path / "kernels" / "c"
    libraries.mkdir(parents=True)
    with another_process(BUILD, libraries):
        pass
    (left,) = libraries.iterdir()
    with another_process(BUILD, libraries):
        worker_environment(tmp_path)
        assert len(list(libraries.iterdir())) == 2
    worker_environment(tmp_path)
    assert list(libraries.iterdir()) == []
    assert left.name.startswith(kernel_cache.BUILDS)


def test_a_build_leaves_nothing(tmp_path: Path) -> None:
    with kernel_cache.building(tmp_path) as place:
        (place / "kernels.so").touch()
        kernel_cache.clear_builds(tmp_path)
        assert (place / "kernels.so").exists()
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_of_files(tmp_path: Path) -> None:
    entry(tmp_path, 1, "directory")
    entry(tmp_path, 2, "library")
    assert kernel_cache.size(tmp_path) == 8
    assert kernel_cache.size(tmp_path / "absent") == 0


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may write everywhere, so it is somebody else here."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_directory_that_was_made_once_and_cannot_be_written_now_is_not_used() -> None:
    """The daemon takes another then; numba would fail."""
    root = Path(tempfile.mkdtemp(prefix="cx", dir="/tmp"))
    try:
        root.chmod(0o755)
        made = Path(worker_environment(root)["NUMBA_CACHE_DIR"])
        for path in (made, made.parent):
            path.chmod(0o555)
        with without_rights(), pytest.raises(OSError, match="Permission denied"):
            worker_environment(root)
        assert list(made.iterdir()) == []
    finally:
        for path in (made.parent, made):
            path.chmod(0o755)
        shutil.rmtree(root)


# A kernel that compiles quickly stands for the interpreter.
COMPILE = """
from caldrixd.lanes.drivers import compiler
compiler.INTERPRETER = "caldrix_kernels.silu_mul.numba_cpu"
compiler.import_kernels(lambda code, fields: None)
"""


def test_a_version_that_was_just_compiled_replaces_all_but_the_last(tmp_path: Path) -> None:
    levels = ("native", "x86-64-v3")
    native, v3 = (Path(worker_environment(tmp_path, isa)["NUMBA_CACHE_DIR"]) for isa in levels)
    old = [entry(native.parent, number, "directory") for number in range(1, 4)]
    environment = {**os.environ, **worker_environment(tmp_path), "PYTHONPATH": PATHS}

    def load() -> set[Path]:
        subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
        return set(native.parent.iterdir())

    assert load() == {native, v3, old[2]}
    assert (native / compiler.COMPLETE).exists()
    newer = entry(native.parent, 4, "directory")
    assert load() == {native, v3, old[2], newer}  # nothing was compiled, so nothing is looked for
