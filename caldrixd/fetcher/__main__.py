"""The fetcher process: fetches one model into a cache and tells of it in event frames on stdout.

The last frame is `done` or `refused`. End of file on stdin means the daemon is gone or no longer wants the
model: the fetch stops and removes what it began.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from caldrix_protocol import codec, framing
from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import Done, Message
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import demo


def main(arguments: list[str]) -> int:
    """`demo CACHE_DIRECTORY`; the exit status is 0 when the last frame was sent."""
    kind, cache = arguments
    if kind != demo.ALIAS:
        raise ValueError(f"unknown kind of fetch {kind!r}")
    with _frames() as output:

        def send(message: Message) -> None:
            output.write(framing.frame(codec.encode(message)))
            output.flush()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
        try:
            demo.fetch(Path(cache), os.environ, send)
            send(Done())
        except Refused as refused:
            send(as_refusal(refused))
        except (KeyboardInterrupt, BrokenPipeError):
            return 1
    return 0


def _frames() -> BinaryIO:
    """stdout for frames alone: what a library prints goes to stderr, the daemon's log."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def _interrupt_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
