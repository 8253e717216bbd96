"""A function that runs on a thread of its own, one call behind the thread that calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Behind:
    """Two queues and no future: what an executor does for a call takes longer than telling a token."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._given: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._running = False
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, *arguments: Any) -> None:
        """Begin a call once the one before has ended. Raises what that one raised."""
        self.wait()
        self._running = True
        self._given.put(arguments)

    def wait(self) -> None:
        """Return when no call runs. Raises what it raised."""
        if self._running:
            error = self._ended.get()
            self._running = False
            if error is not None:
                raise error

    def _run(self) -> None:
        while True:
            arguments = self._given.get()
            try:
                self._function(*arguments)
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)
