"""The directory of compiled kernels: whether it can be used, who uses what, and what is out of date.

An entry is a directory that numba filled or a library that cc made. Its name is a digest of everything it was
made of, so a new version of anything leaves the old entries behind. Who uses an entry holds a shared `flock`
on it until its process ends; only what nobody holds is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KERNELS = "kernels"
BUILDS = "build-"
_ENTRY = re.compile(r"[0-9a-f]{32}(\.so)?")


def make_writable(directory: Path) -> None:
    """Make a private directory, or see that files can be made in the one that is there. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        return


def hold(entry: Path) -> bool:
    """Use an entry until this process ends; whether it is there."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # a file system without locks, or one that cannot be written
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(entry)
    return True


def prune(directory: Path, current: Collection[str]) -> None:
    """Remove the entries of `directory` but those named in `current` and, of the others, the last used.

    What another process holds stays, and so does what cannot be removed.
    """
    with suppress(OSError):
        others = [path for path in directory.iterdir() if _ENTRY.fullmatch(path.name)]
        others = [path for path in others if path.name not in current]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[:-1]:
            with _alone(path) as alone:
                if alone:
                    _remove(path)


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A new directory in `directory` to compile in, removed at the end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=BUILDS, dir=directory) as place:
            yield Path(place)
    finally:
        os.close(descriptor)


def clear_builds(directory: Path) -> None:
    """Remove what killed compilers left in `directory`. While any compiles there, nothing is removed."""
    builds = sorted(directory.glob(f"{BUILDS}*"))
    if not builds:
        return
    with _alone(directory) as alone:
        if alone:
            for path in builds:
                _remove(path)


def size(directory: Path) -> int:
    """Bytes of all files below `directory`; of what cannot be read, none."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody else holds `path`, and nobody can begin to meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
