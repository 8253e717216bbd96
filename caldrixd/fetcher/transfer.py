"""One large file into one private file, from the byte where the last attempt ended, checked at the end.

The hub's library begins a file anew when it was interrupted; this is the one piece of transfer that is
caldrix's own (docs/decisions/0011-byte-ranges.md).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.library import LEAST_RATE, File, NetworkError, Slow

READ_SIZE = 1 << 20
REPORT_BYTES = 1 << 20
REPORT_SECONDS = 0.2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Patience:
    """Seconds a host may be silent, and attempts in a row that may bring too little."""

    seconds: float = 30.0
    attempts: int = 4

    @property
    def enough(self) -> float:
        """Bytes that make an attempt worth its while: what the least rate brings before it is missed."""
        return LEAST_RATE * 2 * self.seconds

    def pause(self, vain: int) -> float:
        """Seconds to wait after that many attempts in vain."""
        return self.seconds / 30 * 2.0 ** (vain - 1)


class Source(Protocol):
    """Where the bytes come from."""

    def stream(self, name: str, commit: str, offset: int) -> AbstractContextManager[Any]: ...

    def refuse_status(self, response: Any) -> None: ...

    def failed(self, error: Exception) -> Refused: ...


Report = Callable[[int], None]


def fetch(source: Source, file: File, commit: str, partial: Path, patience: Patience, report: Report) -> None:
    """Have the whole of `file` in `partial`, written to disk, with the right digest.

    `report` gets the bytes that are there, now and then. Raises Refused "hub/..."; what was fetched stays for
    the next attempt, unless it is wrong.
    """
    with Sink(partial, file) as sink:
        resumed = sink.resume()
        while True:
            _fill(source, commit, sink, patience, report)
            if sink.is_right():
                sink.sync()
                return
            sink.clear()
            if not resumed:  # what an earlier process left may have been damaged; this was not
                partial.unlink()
                raise Refused("hub/digest", file=file.name)
            resumed = False


class Sink:
    """The private file, and the digest of what is in it. `position` is its size in bytes."""

    def __init__(self, path: Path, file: File) -> None:
        self.file = file
        self.path = path
        self.position = 0
        self._digest = _new_digest(file)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            os.close(self._descriptor)
            raise Refused("hub/cache", path=path, reason="it is no file of this user alone")

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def missing(self) -> int:
        return self.file.size - self.position

    def resume(self) -> bool:
        """Go on behind what is there. False when nothing is."""
        if os.fstat(self._descriptor).st_size > self.file.size:
            self.clear()
        while data := os.pread(self._descriptor, READ_SIZE, self.position):
            self._digest.update(data)
            self.position += len(data)
        return self.position > 0

    def clear(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.position = 0
        self._digest = _new_digest(self.file)

    def write(self, data: memoryview) -> None:
        """Add bytes. Refused "hub/disk-full"; what fitted stays."""
        while data:
            try:
                written = os.pwrite(self._descriptor, data, self.position)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                raise self._disk_full() from None
            self._digest.update(data[:written])
            self.position += written
            data = data[written:]

    def is_right(self) -> bool:
        return bool(self._digest.hexdigest() == self.file.digest)

    def sync(self) -> None:
        """Until the bytes are on the disk: the name they get then must not outlive them."""
        os.fsync(self._descriptor)

    def _disk_full(self) -> Refused:
        free = shutil.disk_usage(self.path.parent).free
        needed = -(-self.missing // (1 << 20))
        return Refused(
            "hub/disk-full", file=self.file.name, path=self.path.parent, needed=needed, free=free >> 20
        )


def is_whole(path: Path, file: File) -> bool:
    """Whether what is at `path` has the digest of a small file."""
    digest = _new_digest(file)
    digest.update(path.read_bytes())
    return bool(digest.hexdigest() == file.digest)


def _new_digest(file: File) -> Any:
    """SHA-256, or git's SHA-1 of a blob, whichever the hub names the file by."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _fill(source: Source, commit: str, sink: Sink, patience: Patience, report: Report) -> None:
    """Ask for what is missing until nothing is. Attempts that bring enough are not counted."""
    vain = 0
    while sink.missing:
        before = sink.position
        reason = "the host ended its answer early"
        try:
            _ask(source, commit, sink, report)
        except (NetworkError, Slow) as error:
            reason = source.failed(error).text
        except _Again as again:
            reason = str(again)
        if sink.position - before > patience.enough:
            vain = 0
        elif sink.missing:
            vain += 1
            if vain >= patience.attempts:
                done, size = sink.position, sink.file.size
                raise Refused("hub/stalled", file=sink.file.name, done=done, size=size, reason=reason)
            time.sleep(patience.pause(vain))


class _Again(Exception):
    """This response brings nothing; another may."""


def _ask(source: Source, commit: str, sink: Sink, report: Report) -> None:
    """One request, and what comes of it."""
    with source.stream(sink.file.name, commit, sink.position) as response:
        skipped = _skipped(source, response, sink)
        said_bytes, said_at = sink.position, time.monotonic()
        report(sink.position)
        for chunk in response.iter_raw():
            data = memoryview(chunk)[skipped:]
            skipped -= len(chunk) - len(data)
            if len(data) > sink.missing:
                raise _wrong_size(response, sink, sink.position + len(data))
            sink.write(data)
            now = time.monotonic()
            if sink.position - said_bytes >= REPORT_BYTES or now - said_at >= REPORT_SECONDS:
                said_bytes, said_at = sink.position, now
                report(sink.position)
    report(sink.position)


def _skipped(source: Source, response: Any, sink: Sink) -> int:
    """How many bytes of the body are there already: all, when the host does not know ranges."""
    status, headers = response.status_code, response.headers
    if status == 416 and sink.position:
        sink.clear()
        raise _Again("the host does not have the rest of the file")
    if status == 206:
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if found is None or int(found[1]) != sink.position:
            raise _Again("the host sent another part of the file than was asked for")
        if found[3] != "*" and int(found[3]) != sink.file.size:
            raise _wrong_size(response, sink, int(found[3]))
        return 0
    if status == 200:
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > sink.file.size:
            raise _wrong_size(response, sink, int(length))
        return sink.position
    if status in (408, 429) or status >= 500:
        raise _Again(f"the host answered with status {status}")
    source.refuse_status(response)
    raise AssertionError("a refused status is raised")


def _wrong_size(response: Any, sink: Sink, got: int) -> Refused:
    host = response.request.url.host
    return Refused("hub/size", file=sink.file.name, host=host, got=got, size=sink.file.size)
