"""The user's terminal: the only place that writes to it, and that reads lines from it.

The answer goes to stdout, everything else to stderr. What a model or a file name says is shown with its
control characters made visible, so that it cannot act on a terminal; an answer into a pipe is left as it is.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from caldrix_protocol.refusals import Refused, sentence

if TYPE_CHECKING:  # what only some runs need is imported by them
    from caldrix_client.editing import Editor
    from caldrix_client.history import History
    from caldrix_client.meter import Meter

INPUT = 0
ANSWER = 1
MESSAGES = 2
PREFIX = "caldrix: "
ERASE_LINE = "\r\x1b[K"
DIM = "\x1b[2m"
NOT_DIM = "\x1b[22m"
PROMPT = "> "
CONTINUED = ". "  # before the further lines of a message
READ_SIZE = 1 << 16
MAX_INPUT = 64 << 20  # bytes of one message; no request carries more

_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they change the order of what follows
_VISIBLE = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _OVERRIDES}


def safe(text: str) -> str:
    """The text with what could steer a terminal written as escapes; tab and newline stay."""
    return text.translate(_VISIBLE)


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


class Terminal:
    """Writes to descriptors 1 and 2, reads messages from descriptor 0. `term` is the value of TERM.

    The prompt is shown where a person sees it: on stderr if that is a terminal, else on stdout.
    """

    def __init__(self, term: str) -> None:
        self.interactive = os.isatty(INPUT)
        self._answer_on_screen = os.isatty(ANSWER)
        self._messages_on_screen = os.isatty(MESSAGES)
        self._screen = MESSAGES if self._messages_on_screen else ANSWER if self._answer_on_screen else None
        self._term = term
        self._styled = term not in ("", "dumb")
        self._quiet = False
        self._said: set[str] = set()
        self._meter: Meter | None = None
        self._progress = ""  # the line that is drawn and will be erased
        self._answered = False  # the answer that is under way has text
        self._midline = False  # and its last line has not ended
        self._typed = bytearray()
        self._input_ended = False
        self._history: History | None = None
        self._editor: Editor | None = None

    def be_plain(self) -> None:
        """From here on no progress line and no line editing."""
        self._styled = False

    def be_quiet(self) -> None:
        """From here on no status lines and no progress line."""
        self._quiet = True

    def remember(self, history: History) -> None:
        """Let the editing keys find what was typed in earlier chats, and later ones what is typed in this."""
        self._history = history

    def answer(self, text: str, *, dim: bool = False) -> None:
        """Show a piece of a model's answer at once, `dim` where the screen can do that.

        Raises OutputClosed, or Refused (client/output).
        """
        if not text:
            return
        self.clear()
        self._answered = True  # before the write: a signal may come at once after it
        self._midline = not text.endswith("\n")
        shown = safe(text) if self._answer_on_screen else text
        _write_answer(f"{DIM}{shown}{NOT_DIM}" if dim and self._answer_on_screen and self._styled else shown)

    def end_answer(self, *, complete: bool) -> None:
        """Finish the answer with a newline if it lacks one; of one cut short only if it has text at all."""
        self.clear()
        if self._midline or (complete and not self._answered):
            _write_answer("\n")
        self._answered = self._midline = False

    def result(self, text: str) -> None:
        """Lines on stdout that are caldrix's own: a table, JSON, the help text."""
        self.clear()
        _write_answer(safe(text) + "\n")

    def say(self, text: str) -> None:
        """A sentence on stderr. Further lines are indented: they cannot pass for sentences of their own."""
        self.clear()
        if self._midline and self._answer_on_screen and self._messages_on_screen:
            _write_message("\n")
        _write_message(PREFIX + safe(text).replace("\n", "\n  ") + "\n")

    def say_once(self, text: str) -> None:
        """A sentence on stderr, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def status(self, text: str) -> None:
        """A sentence on stderr that nobody misses who asked for quiet."""
        if not self._quiet:
            self.say(text)

    def hint(self, text: str) -> None:
        """A status line for a person who types and sees it."""
        if self.interactive and self._messages_on_screen:
            self.status(text)

    def progress(self, what: str, done: int, total: int, unit: str) -> None:
        """Redraw the progress line; nothing where stderr is no terminal that can redraw."""
        if not self._messages_on_screen or not self._styled or self._quiet or self._midline:
            return
        if self._meter is None:
            from caldrix_client.meter import Meter

            self._meter = Meter()
        text = self._meter.text(what, done, total, unit, time.monotonic())
        line = safe(PREFIX + text).replace("\n", " ")[: _columns() - 1]
        if line != self._progress:
            # First, so that a signal in between leaves nothing on the screen.
            self._progress = line
            _write_message(ERASE_LINE + line)

    def ask(self) -> str:
        """The next thing entered: a line of input without its end, or the lines of a block.

        EOFError after the last. Raises Refused: message/not-utf8, message/unclosed-block, client/input,
        client/input-too-long.
        """
        from caldrix_client import blocks

        self.clear()
        if self.interactive and self._styled and self._screen is not None:
            return self._edited(self._screen)
        try:
            entered = self._line(PROMPT)
            if blocks.opens(entered):
                entered += self._block()
        except (EOFError, KeyboardInterrupt, SystemExit):
            if self.interactive:
                self.leave()
            raise
        return _text(entered)

    def read_all(self) -> bytes:
        """All of stdin. Raises Refused (client/input, client/input-too-long)."""
        while not self._input_ended:
            self._read_more()
        return bytes(self._typed)

    def leave(self) -> None:
        """After a Ctrl-C or Ctrl-D, which the screen shows without a newline."""
        if self._screen is not None:
            _write_quietly(self._screen, "\n")

    def clear(self) -> None:
        """Take the progress line away."""
        if self._progress:
            _write_message(ERASE_LINE)
            self._progress = ""

    def _edited(self, screen: int) -> str:
        """A message typed with editing keys and history. A history that cannot be used is said once."""
        if self._editor is None:
            from caldrix_client.editing import Editor

            self._editor = Editor(screen, self._term, PROMPT, CONTINUED, self._earlier())
        try:
            entered = _text(self._editor.ask())
        except SystemExit:
            self.leave()
            raise
        if self._history is not None and entered.strip():
            try:
                self._history.keep(entered)
            except OSError as error:
                self._forget(self._history, error)
        return entered

    def _earlier(self) -> list[str]:
        if self._history is None:
            return []
        try:
            return self._history.entries()
        except OSError as error:
            self._forget(self._history, error)
            return []

    def _forget(self, history: History, error: OSError) -> None:
        self.say(sentence("notice/history", path=history.path, reason=error.strerror))
        self._history = None

    def _block(self) -> str:
        """The further lines of a block, whole even if it will be refused: none of them is a message."""
        from caldrix_client import blocks

        lines = [""]
        size = 0
        while not blocks.closes(lines[-1]):
            try:
                lines.append(self._line(CONTINUED))
            except EOFError:
                raise Refused("message/unclosed-block") from None
            size += len(lines[-1])
            _check_size(size)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        """One line of input; bytes that are no UTF-8 as lone surrogates. EOFError after the last."""
        if self.interactive and self._screen is not None:
            _write_quietly(self._screen, prompt)
        start = 0
        while (end := self._typed.find(b"\n", start)) < 0 and not self._input_ended:
            start = len(self._typed)
            self._read_more()
        if not self._typed:
            raise EOFError
        end = len(self._typed) if end < 0 else end + 1
        line = bytes(self._typed[:end])
        del self._typed[:end]
        return line.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")

    def _read_more(self) -> None:
        data = _read_input()
        self._typed += data
        self._input_ended = not data
        _check_size(len(self._typed))


def _check_size(size: int) -> None:
    if size > MAX_INPUT:
        raise Refused("client/input-too-long", limit=MAX_INPUT)


def _text(entered: str) -> str:
    try:
        entered.encode()
    except UnicodeEncodeError:
        raise Refused("message/not-utf8") from None
    return entered


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
    _write_quietly(MESSAGES, text)


def _write_quietly(descriptor: int, text: str) -> None:
    """A stderr that is full, closed or gone must not cost the user the answer."""
    try:
        _write(descriptor, text)
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
