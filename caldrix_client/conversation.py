"""What was said so far, as exchanges: a user's message and the reply to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from caldrix_protocol.connection import MAX_BLOB_SUM
from caldrix_protocol.messages import MAX_BLOB, Blob
from caldrix_protocol.refusals import Refused

MAX_EXCHANGES = 2000  # a request holds at most 4096 turns
INLINE_BYTES = 256 << 10  # text of one request that is sent inside it; the rest goes ahead in blobs


class Packed(NamedTuple):
    """Turns, or plain text, as a request carries them, and the blobs to send before it."""

    turns: tuple[dict[str, Any], ...] | None
    raw: tuple[dict[str, Any], ...] | None
    blobs: tuple[Blob, ...]


class Exchange(NamedTuple):
    """A message, the reply to it, and how many tokens the context held after it."""

    message: str
    reply: str
    tokens: int


class Conversation:
    """It always alternates user and assistant, whatever was cancelled, refused or dropped."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._exchanges: list[Exchange] = []

    def __len__(self) -> int:
        """How many exchanges it has."""
        return len(self._exchanges)

    @property
    def tokens(self) -> int:
        """How many tokens the context held after the last exchange; 0 before the first."""
        return self._exchanges[-1].tokens if self._exchanges else 0

    def pack(self, message: str) -> Packed:
        """The whole conversation with `message` as its last turn. Raises Refused (message/too-big)."""
        spoken = [] if self.system is None else [("system", self.system)]
        for exchange in self._exchanges:
            spoken += [("user", exchange.message), ("assistant", exchange.reply)]
        spoken.append(("user", message))
        contents, blobs = _contents([text for _, text in spoken])
        turns = tuple(
            {"role": role, "content": content} for (role, _), content in zip(spoken, contents, strict=True)
        )
        return Packed(turns, None, blobs)

    def keep(self, exchange: Exchange) -> int:
        """Remember an exchange; without any reply text it is forgotten, the message too.

        Returns how many of the oldest turns were forgotten, because a request cannot hold them.
        """
        if exchange.reply:
            self._exchanges.append(exchange)
        excess = max(0, len(self._exchanges) - MAX_EXCHANGES)
        del self._exchanges[:excess]
        return 2 * excess

    def take_back(self) -> Exchange:
        """Forget the last exchange, and return it. Raises Refused (message/nothing-said)."""
        if not self._exchanges:
            raise Refused("message/nothing-said")
        return self._exchanges.pop()

    def drop(self, turns: int) -> None:
        """Forget the oldest turns, as the daemon did; an odd number takes the reply along."""
        del self._exchanges[: (turns + 1) // 2]

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._exchanges.clear()


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
