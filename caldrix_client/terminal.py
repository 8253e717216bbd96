"""The user's terminal: the only place that writes to it, and that reads lines from it.

The answer goes to stdout, everything else to stderr. What a model or a file name says is shown with its
control characters made visible, so that it cannot act on a terminal; an answer into a pipe is left as it is.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from caldrix_protocol.refusals import Refused, sentence

INPUT = 0
ANSWER = 1
MESSAGES = 2
PREFIX = "caldrix: "
ERASE_LINE = "\r\x1b[K"
PROMPT = "> "
READ_SIZE = 1 << 16

_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they change the order of what follows
_VISIBLE = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _OVERRIDES}


def safe(text: str) -> str:
    """The text with what could steer a terminal written as escapes; tab and newline stay."""
    return text.translate(_VISIBLE)


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


class Terminal:
    """Writes to descriptors 1 and 2, reads lines from descriptor 0. `term` is the value of TERM."""

    def __init__(self, term: str) -> None:
        self.interactive = os.isatty(INPUT)
        self._answer_on_screen = os.isatty(ANSWER)
        self._messages_on_screen = os.isatty(MESSAGES)
        self._styled = self._messages_on_screen and term not in ("", "dumb")
        self._progress = ""  # the line that is drawn and will be erased
        self._answered = False  # the answer that is under way has text
        self._midline = False  # and its last line has not ended
        self._typed = bytearray()
        self._input_ended = False

    def be_plain(self) -> None:
        """From here on no progress line and no line editing."""
        self._styled = False

    def answer(self, text: str) -> None:
        """Show a piece of a model's answer at once. Raises OutputClosed, or Refused (client/output)."""
        if not text:
            return
        self._erase_progress()
        _write_answer(safe(text) if self._answer_on_screen else text)
        self._answered = True
        self._midline = not text.endswith("\n")

    def end_answer(self, *, complete: bool) -> None:
        """Finish the answer with a newline if it lacks one; of one cut short only if it has text at all."""
        self._erase_progress()
        if self._midline or (complete and not self._answered):
            _write_answer("\n")
        self._answered = self._midline = False

    def result(self, text: str) -> None:
        """Lines on stdout that are caldrix's own: a table, JSON, the help text."""
        self._erase_progress()
        _write_answer(safe(text) + "\n")

    def say(self, text: str) -> None:
        """A sentence on stderr. Further lines are indented: they cannot pass for sentences of their own."""
        self._erase_progress()
        if self._midline and self._answer_on_screen and self._messages_on_screen:
            _write_message("\n")
        _write_message(PREFIX + safe(text).replace("\n", "\n  ") + "\n")

    def progress(self, what: str, done: int, total: int, unit: str) -> None:
        """Redraw the progress line; nothing where stderr is no terminal that can redraw."""
        if not self._styled or self._midline:
            return
        if total:
            text = sentence("status/progress", what=what, percent=min(100, 100 * done // total))
        else:
            text = sentence("status/progress-open", what=what, done=done, unit=unit)
        line = safe(PREFIX + text).replace("\n", " ")[: _columns() - 1]
        if line != self._progress:
            _write_message(ERASE_LINE + line)
            self._progress = line

    def ask(self) -> str:
        """The next line of input without its end; EOFError after the last.

        Raises Refused: message/not-utf8 for a line that is no text, client/input.
        """
        if not self.interactive:
            return self._read_line()
        if self._styled and self._answer_on_screen:
            return _edit_line()
        _write_message(PROMPT)
        return self._read_line()

    def leave(self) -> None:
        """After a Ctrl-C or Ctrl-D, which the screen shows without a newline."""
        if self._messages_on_screen:
            _write_message("\n")

    def _erase_progress(self) -> None:
        if self._progress:
            _write_message(ERASE_LINE)
            self._progress = ""

    def _read_line(self) -> str:
        start = 0
        while (end := self._typed.find(b"\n", start)) < 0 and not self._input_ended:
            start = len(self._typed)
            data = _read_input()
            self._typed += data
            self._input_ended = not data
        if not self._typed:
            raise EOFError
        end = len(self._typed) if end < 0 else end + 1
        line = bytes(self._typed[:end])
        del self._typed[:end]
        try:
            return line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise Refused("message/not-utf8") from None


def _edit_line() -> str:
    """A line typed with the keys and the history of readline, where Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines once it is imported
    try:
        line = input(PROMPT)
        line.encode()
    except UnicodeError:
        raise Refused("message/not-utf8") from None
    return line


def _read_input() -> bytes:
    while True:
        try:
            return os.read(INPUT, READ_SIZE)
        except BlockingIOError:
            _wait(INPUT, select.POLLIN)
        except OSError as error:
            raise Refused("client/input", reason=error.strerror) from None


def _write_answer(text: str) -> None:
    try:
        _write(ANSWER, text)
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise Refused("client/output", reason=error.strerror) from None


def _write_message(text: str) -> None:
    """A stderr that is full, closed or gone must not cost the user the answer."""
    try:
        _write(MESSAGES, text)
    except OSError:
        return


def _write(descriptor: int, text: str) -> None:
    data = memoryview(text.encode(errors="backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            _wait(descriptor, select.POLLOUT)


def _wait(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll()


def _columns() -> int:
    """The width of the terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(MESSAGES).columns or 80
    except OSError:
        return 80
