"""What a flag is, and the checks that turn the text after one into its value.

A check takes the text as it was typed and returns the value, or raises `Refused` with a row of refusals.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from caldrix_protocol.refusals import USAGE, Refused

MAX_SECONDS = 31_536_000
MAX_FLOAT = 1.7976931348623157e308
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_STOP = 1024  # bytes of one stop text
MAX_STOPS = 16
MOST_DIGITS = 400  # of a number that is read; one that needs more is none that anybody means
UNITS = {"": 1, "m": 1 << 20, "g": 1 << 30}


class Option(NamedTuple):
    """One flag of the commands `commands`.

    `metavar` None: a switch, whose value is True when given. `check` turns the text after the flag into its
    value or raises Refused with a row of kind `kind`. `refused` names the row that refuses the flag on sight,
    whatever its value; `later` the one that refuses it when its value and its neighbours are right, for what
    it asks for does not exist yet. A flag that may be given `many` times has its values in a tuple. `absent`
    says in words what happens without the flag.
    """

    name: str
    metavar: str | None
    check: Callable[[str], Any]
    default: Any
    absent: str
    doc: str
    aliases: tuple[str, ...] = ()
    kind: str = USAGE
    commands: tuple[str, ...] = ("run",)
    refused: str | None = None
    later: str | None = None
    many: int = 1

    @property
    def key(self) -> str:
        """The name of its value: `--max-tokens` is `max_tokens`."""
        return self.name.lstrip("-").replace("-", "_")


def words(what: str) -> Callable[[str], str]:
    """Text as given; refused if the bytes on the command line were not UTF-8."""

    def check(text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("usage/prompt-utf8", what=what) from None
        return text

    return check


def some_words(flag: str) -> Callable[[str], str]:
    """The same, but not empty."""

    def check(text: str) -> str:
        if not text:
            raise Refused("usage/needs-value", flag=flag)
        return words(flag)(text)

    return check


def prompt(text: str) -> str:
    if not text:
        raise Refused("usage/empty-prompt")
    return words("-p")(text)


def stop(text: str) -> str:
    """A text that ends a reply."""
    if not 0 < len(words("--stop")(text).encode()) <= MAX_STOP:
        raise Refused("usage/stop", limit=MAX_STOP)
    return text


def think(text: str) -> bool:
    if text not in ("on", "off"):
        raise Refused("usage/think", value=text)
    return text == "on"


def integer(code: str, high: int, low: int = 1) -> Callable[[str], int]:
    """A decimal integer from `low` to `high`, refused with the row `code`."""

    def check(text: str) -> int:
        number = _whole(text)
        if number is None or not low <= number <= high:
            raise Refused(code, value=text)
        return number

    return check


def one_of(code: str, names: tuple[str, ...]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise Refused(code, value=text)
        return text

    return check


def backend(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text == "host":
            raise Refused("usage/backend-host")
        return one_of("usage/backend", names)(text)

    return check


def idle_seconds(text: str) -> float:
    """Seconds as a decimal number without an exponent."""
    parts = text.split(".")
    plain = text.isascii() and len(text) < 20 and len(parts) <= 2 and all(part.isdigit() for part in parts)
    if not plain or float(text) > MAX_SECONDS:
        raise Refused("usage/idle-unload", value=text)
    return float(text)


def batch(numbers: tuple[int, ...]) -> Callable[[str], int]:
    def check(text: str) -> int:
        if text not in map(str, numbers):
            raise Refused("run/max-batch", value=text)
        return int(text)

    return check


def byte_count(text: str) -> int:
    """A positive number of bytes; m and g stand for MiB and GiB."""
    unit = text[-1:] if text[-1:] in UNITS else ""
    number = _whole(text.removesuffix(unit))
    if not number:
        raise Refused("run/weight-budget", value=text)
    return number * UNITS[unit]


def switch(text: str) -> NoReturn:
    raise TypeError("a switch has no text to check")


# --- the knobs of sampling --------------------------------------------------------------------------
# Their rows name the flag in the field `name`, so that a chat can refuse in its own words.


def temperature(text: str) -> float:
    return _real("usage/temperature", "--temperature", text, lambda number: number >= 0)


def top_k(text: str) -> int:
    return _count("--top-k", text, MAX_TOP_K)


def top_p(text: str) -> float:
    return _real("usage/top-p", "--top-p", text, lambda number: 0 < number <= 1)


def min_p(text: str) -> float:
    return _real("usage/min-p", "--min-p", text, lambda number: 0 <= number <= 1)


def repetition_penalty(text: str) -> float:
    return _real("usage/repetition-penalty", "--repetition-penalty", text, lambda number: number > 0)


def seed(text: str) -> int:
    return _count("--seed", text, MAX_SEED)


def _real(code: str, name: str, text: str, fits: Callable[[float], bool]) -> float:
    number = _decimal(text)
    if number is None or not fits(number):
        raise Refused(code, name=name, value=text)
    return number


def _count(name: str, text: str, high: int) -> int:
    number = _whole(text)
    if number is None or number > high:
        raise Refused("usage/count", name=name, value=text, limit=str(high))
    return number


def _whole(text: str) -> int | None:
    """A number of decimal digits and nothing else; None for another text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _decimal(text: str) -> float | None:
    """A finite decimal number, with an exponent or without; None for another text."""
    if len(text) > MOST_DIGITS or not set(text) <= set("0123456789.eE+-"):
        return None
    try:
        number = float(text) + 0.0  # the sum has no negative zero
    except ValueError:
        return None
    return number if -MAX_FLOAT <= number <= MAX_FLOAT else None
