"""Whether the files that a model depends on are still those that they were."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Name, inode, size and change time of each file.
Identity = tuple[tuple[str, int, int, int], ...]


def identity(directory: Path, names: Iterable[str]) -> Identity:
    """Of those files that are there. OSError."""
    found = [(name, (directory / name).stat()) for name in names if (directory / name).exists()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def changed(directory: Path, before: Identity) -> str | None:
    """The first file that is gone or another than it was `before`; None when all are the same."""
    for known in before:
        now: Identity = ()
        with suppress(OSError):
            now = identity(directory, known[:1])
        if now != (known,):
            return known[0]
    return None
