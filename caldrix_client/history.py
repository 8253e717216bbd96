"""What was typed in earlier chats, for the keys that bring it back: a file of JSON strings, one a line."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import BinaryIO

KEPT = 1000  # the newest entries; a file with more than twice as many is cut to these
MAX_BYTES = 8 << 20  # of a file that is read; of a longer one its end


class History:
    """The file at `path`, which its user alone can read. The first `keep` makes it. All raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: str | None = None

    def entries(self) -> list[str]:
        """The newest KEPT entries, the oldest first. A line that is none is left out."""
        try:
            with _opened(self.path, os.O_RDONLY) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - MAX_BYTES))
                lines = file.read(MAX_BYTES).splitlines()
        except FileNotFoundError:
            return []
        found = [entry for line in lines if (entry := _entry(line)) is not None][-KEPT:]
        if len(lines) > 2 * KEPT or size > MAX_BYTES:
            self._replace(found)
        return found

    def keep(self, entry: str) -> None:
        """Append one entry, whole whatever other chats append; not the same twice in a row."""
        if entry == self._last:
            return
        self._last = entry
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with _opened(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_line(entry))

    def _replace(self, entries: list[str]) -> None:
        beside = f"{self.path}.{os.getpid()}"
        with _opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(b"".join(map(_line, entries)))
        os.replace(beside, self.path)


def _opened(path: str, flags: int) -> BinaryIO:
    """A regular file; opening a FIFO would wait for its other end."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb")


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, str) else None


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"
