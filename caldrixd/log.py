"""The daemon's and its children's log: one line an event on stderr.

No prompt and no reply text is ever logged. An unexpected exception is logged as its type and the
places it passed, without its message, since a message may quote what the user typed.
"""

from __future__ import annotations

import logging
import secrets
import traceback
import unicodedata


def escape(text: str) -> str:
    """`text` on one line: control and format characters become backslash escapes."""
    return "".join(
        character if unicodedata.category(character)[0] != "C" else ascii(character)[1:-1]
        for character in text
    )


class OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


def start(name: str) -> None:
    """Send this process's log to stderr, each line marked with `name` and the process id."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(f"%(asctime)s {name}[%(process)d] %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def describe(error: BaseException) -> str:
    """The type of `error` and where it was raised, innermost last; for an OSError also what it says.

    Of a group it is the first one's.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    places = " > ".join(
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    )
    message = f" ({error.strerror})" if isinstance(error, OSError) else ""
    return f"{type(error).__name__}{message} at {places or 'an unknown place'}"


def incident(error: BaseException) -> str:
    """Log an unexpected exception and return the id under which the log has it."""
    name = secrets.token_hex(4)
    logging.error("incident %s: %s", name, describe(error))
    return name
