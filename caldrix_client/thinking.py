"""The thinking of a reply: from `<think>` at its beginning to `</think>`."""

from __future__ import annotations

from collections.abc import Sequence

OPEN = "<think>"
CLOSE = "</think>"


class Thinking:
    """Cuts a reply that comes in pieces into thinking and what is said; joined they are the reply."""

    def __init__(self) -> None:
        self._begins: bool | None = None  # whether the reply begins with OPEN; None until that is known
        self._text = ""  # of a reply that may begin so, up to CLOSE

    def add(self, piece: str) -> tuple[str, str]:
        """The thinking, then what is said, of all that may be shown after this piece."""
        if self._begins is False:
            return "", piece
        shown = len(self._text) if self._begins else 0
        self._text += piece
        if self._begins is None:
            begun = self._text.lstrip()
            if len(begun) < len(OPEN) and OPEN.startswith(begun):
                return "", ""
            self._begins = begun.startswith(OPEN)
        end = self._text.find(CLOSE) + len(CLOSE)
        if self._begins and end < len(CLOSE):
            return self._text[shown:], ""
        text, self._text = self._text, ""
        if not self._begins:
            return "", text
        self._begins = False
        return text[shown:end], text[end:]

    def finish(self) -> str:
        """What was held back: a reply so short that it might have begun with OPEN."""
        held = self._text if self._begins is None else ""
        self._text = ""
        return held


def thought(pieces: Sequence[tuple[str, int]]) -> int:
    """How many tokens the thinking of a reply has, which comes in pieces of (text, tokens)."""
    reply = "".join(text for text, _ in pieces)
    left = len(reply) - len(said(reply))
    count = 0
    for text, tokens in pieces:
        if not 0 < len(text) <= left:
            break
        left -= len(text)
        count += tokens
    return count


def said(reply: str) -> str:
    """A reply without its thinking; "" where that has no end."""
    if not reply.lstrip().startswith(OPEN):
        return reply
    return reply.partition(CLOSE)[2].lstrip("\n")
