"""What was said so far, as pairs of a user's message and the reply to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from caldrix_protocol.connection import MAX_BLOB_SUM
from caldrix_protocol.messages import MAX_BLOB, Blob
from caldrix_protocol.refusals import Refused

MAX_PAIRS = 2000  # a request holds at most 4096 turns
INLINE_BYTES = 256 << 10  # text of one request that is sent inside it; the rest goes ahead in blobs


class Packed(NamedTuple):
    """Turns, or plain text, as a request carries them, and the blobs to send before it."""

    turns: tuple[dict[str, Any], ...] | None
    raw: tuple[dict[str, Any], ...] | None
    blobs: tuple[Blob, ...]


class Conversation:
    """It always alternates user and assistant, whatever was cancelled, refused or dropped."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._pairs: list[tuple[str, str]] = []

    def pack(self, message: str) -> Packed:
        """The whole conversation with `message` as its last turn. Raises Refused (message/too-big)."""
        spoken = [] if self._system is None else [("system", self._system)]
        for said, replied in self._pairs[-MAX_PAIRS:]:
            spoken += [("user", said), ("assistant", replied)]
        spoken.append(("user", message))
        contents, blobs = _contents([text for _, text in spoken])
        turns = tuple(
            {"role": role, "content": content} for (role, _), content in zip(spoken, contents, strict=True)
        )
        return Packed(turns, None, blobs)

    def keep(self, message: str, reply: str) -> None:
        """Remember an exchange. Without any reply text the message is forgotten too."""
        if reply:
            self._pairs.append((message, reply))

    def drop(self, turns: int) -> None:
        """Forget the oldest turns, as the daemon did; an odd number takes the reply along."""
        del self._pairs[: (turns + 1) // 2]

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._pairs.clear()


def pack_raw(text: str) -> Packed:
    """One prompt as plain text. Raises Refused (message/too-big)."""
    contents, blobs = _contents([text])
    return Packed(None, contents[0], blobs)


def _contents(texts: list[str]) -> tuple[list[tuple[dict[str, Any], ...]], tuple[Blob, ...]]:
    """The content of each turn; the newest texts stay in the request as far as they fit."""
    sizes = [len(text.encode()) for text in texts]
    if sum(sizes) > MAX_BLOB_SUM:
        raise Refused("message/too-big", size=sum(sizes), limit=MAX_BLOB_SUM)
    left = INLINE_BYTES
    contents: list[tuple[dict[str, Any], ...]] = []
    blobs: list[Blob] = []
    for number in reversed(range(len(texts))):
        if sizes[number] <= left:
            left -= sizes[number]
            contents.append(({"type": "text", "text": texts[number]},))
        else:
            data = texts[number].encode()
            blobs += [Blob(number, data[at : at + MAX_BLOB]) for at in range(0, len(data), MAX_BLOB)]
            contents.append(({"type": "text", "blob": number},))
    return contents[::-1], tuple(blobs)
