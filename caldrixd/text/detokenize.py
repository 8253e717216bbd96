"""Turns reply ids into text as they come, whole characters at a time, up to a stop text."""

from __future__ import annotations

from typing import Protocol

REPLACEMENT = "\ufffd"
# Ids decoded again with each new one: enough to hold any character and what its text depends on.
KEPT = 8
WINDOW = 16


class Decoder(Protocol):
    """What of a tokenizer this module needs."""

    def decode(self, ids: list[int]) -> str: ...

    def is_silent(self, id_: int) -> bool: ...

    def is_byte(self, id_: int) -> bool: ...


class Detokenizer:
    """The pieces of one reply; joined, `finish` included, they equal `decode` of all its ids.

    A trailing U+FFFD is held, for it may be the beginning of a character, and so is a run of raw
    byte tokens, which decodes as a whole or not at all.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._shown = 0

    def add(self, id_: int) -> str:
        """The text that this id completes, often ""."""
        if self._decoder.is_silent(id_):
            return ""
        self._window.append(id_)
        if self._decoder.is_byte(id_):
            return ""
        text = self._decoder.decode(self._window)
        end = _settled(text)
        piece = text[self._shown : end]
        self._shown = max(end, self._shown)
        if len(self._window) > WINDOW:
            self._window = self._window[-KEPT:]
            self._shown = _settled(self._decoder.decode(self._window))
        return piece

    def finish(self) -> str:
        """What was held back. The reply is over."""
        piece = self._decoder.decode(self._window)[self._shown :] if self._window else ""
        self._window = []
        self._shown = 0
        return piece


class Stops:
    """Ends a text before the first stop text in it: the one that is complete first, of those the longest.

    What may be the beginning of one is held. The pieces given out, `finish` included, are the text up to
    there, however it was cut into pieces.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that may be shown after this piece; "" once a stop text was found."""
        if self.found:
            return ""
        if not self._texts:
            return piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._texts if (at := text.find(stop)) >= 0]
        self.found = bool(ends)
        end = min(ends)[1] if ends else len(text) - self._beginning(text)
        self._held = "" if ends else text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back. The text is over."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop text begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._texts):
                return length
        return 0


def _settled(text: str) -> int:
    return len(text) - 1 if text.endswith(REPLACEMENT) else len(text)
