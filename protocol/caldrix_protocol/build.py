"""Which code an installation has: what a daemon started with, and what a client would start.

It looks at names, sizes and times of files, and at no content: a warm run pays for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from caldrix_protocol.version import VERSION

# What a daemon keeps in memory; its workers begin with what is on disk.
_PACKAGES = ("caldrixd", "caldrix_protocol")
_MASK = 2**64 - 1


def find_build(path: Sequence[str]) -> str:
    """VERSION, "+" and what changes when any file of a daemon found on `path` (as sys.path) does.

    VERSION alone where there are no such files, or they cannot be looked at (a link into nothing, an
    installation that is just being replaced): it is not known then which code there is.
    """
    numbers = [0, 0, 0]
    for package in _PACKAGES:
        directory = _find(package, path)
        if directory is None:
            return VERSION
        try:
            _count(directory, numbers)
        except OSError:
            return VERSION
    count, size, times = numbers
    return f"{VERSION}+{count:x}.{size:x}.{times & _MASK:x}"


def same_build(one: str, other: str) -> bool:
    """Whether two that `find_build` gave may be the same code. Where one is not known, the version tells."""
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]


def _find(package: str, path: Sequence[str]) -> str | None:
    for directory in path:
        found = os.path.join(directory, package)
        if os.path.isfile(os.path.join(found, "__init__.py")):
            return found
    return None


def _count(directory: str, numbers: list[int]) -> None:
    """Add how many Python files there are, their bytes and the sum of their times."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            if name.endswith(".py"):
                status = entry.stat()
                numbers[0] += 1
                numbers[1] += status.st_size
                numbers[2] += status.st_mtime_ns
            elif "." not in name and name != "__pycache__" and entry.is_dir():
                _count(entry.path, numbers)
