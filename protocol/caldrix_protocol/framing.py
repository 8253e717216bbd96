"""Frames: a length of four bytes, big-endian, then that many bytes of payload."""

from __future__ import annotations

from caldrix_protocol.codec import BadFrame

HEADER = 4
MAX_CONTROL = 1 << 20
MAX_BULK = (8 << 20) + (64 << 10)


def frame(payload: bytes) -> bytes:
    """The payload with its length before it. BadFrame if it is empty or over MAX_BULK bytes."""
    if not 0 < len(payload) <= MAX_BULK:
        raise BadFrame(f"has {len(payload)} bytes; 1 to {MAX_BULK} are possible")
    return len(payload).to_bytes(HEADER, "big") + payload


class FrameReader:
    """Cuts a byte stream into payloads; allocates nothing for a length it has only read.

    `limit` is the largest length accepted, in bytes; it may be changed between calls of `next`.
    """

    __slots__ = ("_buffer", "_start", "limit")

    def __init__(self, limit: int = MAX_BULK) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._start = 0

    def feed(self, data: bytes) -> None:
        """Add bytes as they came from the stream, cut anywhere."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole payload, or None until more is fed. BadFrame for a length of 0 or over `limit`:
        the stream cannot be read any further then."""
        body = self._start + HEADER
        if len(self._buffer) < body:
            return None
        length = int.from_bytes(self._buffer[self._start : body], "big")
        if not 0 < length <= self.limit:
            raise BadFrame(f"claims {length} bytes; 1 to {self.limit} are possible")
        if len(self._buffer) < body + length:
            return None
        self._start = body + length
        return bytes(self._buffer[body : body + length])
