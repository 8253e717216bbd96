"""A message typed with editing keys: the only module with the line-editing library, imported late.

Enter sends the message, also one of several lines that was pasted; inside an open block it begins a new line.
Alt-Enter begins a new line anywhere. Tab completes the chat's commands.
"""

from __future__ import annotations

import asyncio
import os
import signal

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from caldrix_client.blocks import unfinished
from caldrix_client.interrupts import heed
from caldrix_client.slash import COMMANDS

INPUT = 0
USUAL_SIZE = os.terminal_size((80, 24))


class Editor:
    """Reads from descriptor 0 and draws on the descriptor `screen`, a terminal. `term` is TERM."""

    def __init__(self, screen: int, term: str, prompt: str, continued: str, entries: list[str]) -> None:
        keyboard = open(INPUT, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the chat
        output = Vt100_Output(
            open(screen, "w", encoding="utf-8", closefd=False),  # noqa: SIM115
            lambda: _size(screen),
            term=term,
            default_color_depth=ColorDepth.DEPTH_1_BIT,
            enable_cpr=False,  # it would ask where the cursor is, and complain where nothing answers
        )
        self._session: PromptSession[str] = PromptSession(
            prompt,
            multiline=True,
            prompt_continuation=continued,
            key_bindings=_keys(),
            history=InMemoryHistory(entries),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            enable_suspend=True,
            input=Vt100Input(keyboard),
            output=output,
        )

    def ask(self) -> str:
        """What was entered; bytes that are no UTF-8 as lone surrogates. EOFError, or KeyboardInterrupt."""
        heeded = heed(signal.SIGHUP)
        try:
            return self._session.prompt(set_exception_handler=False, pre_run=_pass_over_faults)
        finally:
            if heeded:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _pass_over_faults() -> None:
    """A key that the library cannot obey does nothing; it would show a traceback and wait for Enter."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def enter(event: KeyPressEvent) -> None:
        if unfinished(event.current_buffer.text):
            event.current_buffer.newline(copy_margin=False)
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add(Keys.Vt100MouseEvent)
    def ignore(event: KeyPressEvent) -> None:
        """No mouse is asked for; what looks like one is a colour that came with pasted text."""

    return keys


def _size(screen: int) -> Size:
    """Of the terminal; what is usual where it does not say."""
    try:
        columns, rows = os.get_terminal_size(screen)
    except OSError:
        columns = rows = 0
    return Size(rows=rows or USUAL_SIZE.lines, columns=columns or USUAL_SIZE.columns)
