"""Signals. Ctrl-C while a request is under way: the first is counted, the second ends the program at once.

Outside a `with Interrupts()` block Ctrl-C is Python's own KeyboardInterrupt. SIGTERM is Terminated anywhere,
SIGHUP where the terminal's modes are changed.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALLED = 128  # a shell reports a program that died of signal n as this plus n


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came. An event loop lets this kind through, as it does KeyboardInterrupt."""


def heed(number: int) -> bool:
    """From here on the signal raises Terminated: the terminal is left in order. False if it is ignored."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    signal.signal(number, _terminate)
    return True


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(SIGNALLED + number)


class Interrupts:
    """`count` Ctrl-Cs so far; `descriptor` becomes readable with each (-1 where SIGINT is ignored)."""

    __slots__ = ("_handler", "_wakeup", "_writer", "count", "descriptor")

    def __init__(self) -> None:
        self.count = 0
        self.descriptor = -1

    def __enter__(self) -> Interrupts:
        self._handler: Any = signal.getsignal(signal.SIGINT)
        if self._handler in (signal.SIG_IGN, None):
            return self
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor < 0:
            return
        signal.signal(signal.SIGINT, self._handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._writer)
        self.descriptor = -1

    def clear(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        try:
            os.read(self.descriptor, 64)
        except BlockingIOError:
            return

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
