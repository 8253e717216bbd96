"""One large file into one private file, from the byte where the last attempt ended, checked at the end.

The hub's library begins a file anew when it was interrupted; this is the one piece of transfer that is
caldrix's own (docs/decisions/0011-byte-ranges.md).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from caldrix_protocol.refusals import Refused
from caldrix_protocol.sizes import MB
from caldrixd.fetcher.library import LEAST_RATE, NO_SPACE, File, NetworkError, Slow

READ_SIZE = 1 << 20
REPORT_BYTES = 1 << 20
REPORT_SECONDS = 0.2
SUFFIX = ".caldrix-partial"
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


def fetch(source: Source, file: File, commit: str, blob: Path, patience: Patience, report: Report) -> bool:
    """Have the whole of `file` at `blob`, with the right digest and written to disk.

    `report` gets the bytes that are there, now and then. False where another process put it there. Raises
    Refused "hub/..."; what was fetched stays for the next attempt, unless it is wrong.
    """
    claim = True
    while size(blob) != file.size:
        with Sink(blob.parent, file, claim) as sink, suppress(Taken):
            _fetch(source, commit, sink, patience, report)
            sink.become(blob)
            return True
        claim = False
    return False


def _fetch(source: Source, commit: str, sink: Sink, patience: Patience, report: Report) -> None:
    resumed = sink.resume()
    while True:
        _fill(source, commit, sink, patience, report)
        if sink.is_right():
            return
        sink.clear()
        if not resumed:  # what an earlier process left may have been damaged; this was not
            sink.remove()
            raise Refused("hub/digest", file=sink.file.name)
        resumed = False


def partials(blobs: Path, file: File) -> list[Path]:
    """What earlier attempts left of a file, each a file of this user alone; the largest first."""
    found = []
    for path in blobs.glob(f"{file.digest}*{SUFFIX}"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
                found.append((status.st_size, path))
    return [path for _, path in sorted(found, reverse=True)]


def begun(blobs: Path, file: File) -> int:
    """Bytes behind which the next attempt goes on: not all, since one that is whole has its name."""
    there = max((size(path) for path in partials(blobs, file)[:1]), default=0)
    return min(there, file.size - 1) if 0 < there <= file.size else 0


class Taken(Exception):
    """Another process goes on with the file: locks do not hold here."""


class Sink:
    """A file that this process alone writes, and the digest of what is in it. `position` is its size.

    No other process knows its name. With `claim` it is what an earlier attempt left, under the new name; who
    writes that still, since its file system's locks hold nobody off, misses the name at its next bytes.
    """

    def __init__(self, blobs: Path, file: File, claim: bool) -> None:
        self.file = file
        self.path = blobs / f"{file.digest}.{secrets.token_hex(8)}{SUFFIX}"
        self.position = 0
        for left in partials(blobs, file) if claim else ():
            with suppress(FileNotFoundError):
                left.rename(self.path)
                break
        self._open()

    def _open(self) -> None:
        self._digest = _new_digest(self.file)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._identity = os.fstat(self._descriptor)

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
        """Begin anew, in another file: this one may be another process's by now."""
        os.close(self._descriptor)
        self.remove()
        self.position = 0
        self._open()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def write(self, data: memoryview) -> None:
        """Add bytes. Refused "hub/disk-full"; what fitted stays. Raises Taken."""
        while data:
            self._check_name()
            try:
                written = os.pwrite(self._descriptor, data, self.position)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise self._disk_full() from None
            self._digest.update(data[:written])
            self.position += written
            data = data[written:]

    def is_right(self) -> bool:
        return bool(self._digest.hexdigest() == self.file.digest)

    def become(self, blob: Path) -> None:
        """Take that name, after the bytes are on the disk, and remove other attempts. Raises Taken."""
        os.fsync(self._descriptor)
        try:
            self.path.rename(blob)
        except FileNotFoundError:
            raise Taken from None
        for path in partials(blob.parent, self.file):
            path.unlink(missing_ok=True)

    def _check_name(self) -> None:
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            raise Taken from None
        if not os.path.samestat(found, self._identity):
            raise Taken

    def _disk_full(self) -> Refused:
        free = shutil.disk_usage(self.path.parent).free
        needed, free = -(-self.missing // MB), free // MB
        return Refused("hub/disk-full", file=self.file.name, path=self.path.parent, needed=needed, free=free)


def size(path: Path) -> int:
    """In bytes; -1 when nothing is there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def is_whole(path: Path, file: File) -> bool:
    """Whether what is at `path` has the digest of a file."""
    digest = _new_digest(file)
    with path.open("rb", buffering=0) as data:
        while piece := data.read(READ_SIZE):
            digest.update(piece)
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
