"""Messages of several lines: a block begins with three quotation marks at the start of a line and ends with
three at the end of one."""

from __future__ import annotations

QUOTES = '"""'


def opens(line: str) -> bool:
    """Whether a block begins with this line and goes on after it."""
    return line.startswith(QUOTES) and content(line) is None


def closes(line: str) -> bool:
    """Whether a block that is open ends with this line."""
    return line.rstrip().endswith(QUOTES)


def unfinished(entered: str) -> bool:
    """Whether what was entered so far is a block that is open."""
    first, *more = entered.split("\n")
    return opens(first) and not any(map(closes, more))


def content(entered: str) -> str | None:
    """What stands in a block, the line ends beside its marks apart; None for what is no block."""
    entered = entered.rstrip()
    if not entered.startswith(QUOTES) or not entered.endswith(QUOTES) or len(entered) < 2 * len(QUOTES):
        return None
    return entered[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")
