"""Turns reply ids into text as they come, whole characters at a time."""

from __future__ import annotations

from typing import Protocol

REPLACEMENT = "\ufffd"
# Ids decoded again with each new one: enough to hold any character and what its text depends on.
KEPT = 8
WINDOW = 32


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


def _settled(text: str) -> int:
    return len(text) - 1 if text.endswith(REPLACEMENT) else len(text)
