"""Checks for the values of message fields.

A check takes a decoded value and returns it in its final form (lists become tuples), or raises
`BadValue` with a sentence that names what was expected. Checks are values, so a message's
schema can be printed into SPEC.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]


class BadValue(ValueError):
    """A field's value is not what its schema allows."""


class Described:
    """A check with the sentence fragment that documents it."""

    __slots__ = ("check", "description")

    def __init__(self, description: str, check: Check) -> None:
        self.description = description
        self.check = check

    def __call__(self, value: Any) -> Any:
        return self.check(value)


def integer(low: int, high: int) -> Described:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise BadValue(f"must be an integer from {low} to {high}")
        return value

    return Described(f"integer, {low} to {high}", check)


def real(low: float, high: float) -> Described:
    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise BadValue("must be a number")
        number = float(value)
        if not low <= number <= high:
            raise BadValue(f"must be a finite number from {low:g} to {high:g}")
        return number

    return Described(f"number, {low:g} to {high:g}", check)


def above_zero(high: float) -> Described:
    """A number over 0."""
    inner = real(0.0, high).check

    def check(value: Any) -> float:
        number: float = inner(value)
        if not number:
            raise BadValue(f"must be a number over 0, at most {high:g}")
        return number

    return Described(f"number over 0, at most {high:g}", check)


def text(limit: int, *, least: int = 0) -> Described:
    """A string of at most `limit` bytes of UTF-8, and at least `least` characters."""

    def check(value: Any) -> str:
        if type(value) is not str:
            raise BadValue("must be text")
        if len(value) < least:
            raise BadValue("must not be empty")
        # A character takes at most four bytes: most strings need no encoding to be measured.
        if len(value) * 4 > limit and len(value.encode("utf-8", "surrogatepass")) > limit:
            raise BadValue(f"must be at most {limit} bytes of UTF-8")
        return value

    return Described(f"text, {least} to {limit} bytes" if least else f"text, at most {limit} bytes", check)


def binary(limit: int) -> Described:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > limit:
            raise BadValue(f"must be at most {limit} bytes")
        return value

    return Described(f"bytes, at most {limit}", check)


def flag() -> Described:
    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise BadValue("must be true or false")
        return value

    return Described("true or false", check)


def one_of(*names: str) -> Described:
    def check(value: Any) -> str:
        if value not in names or type(value) is not str:
            raise BadValue("must be one of " + ", ".join(names))
        return value

    return Described("one of " + ", ".join(name or "empty text" for name in names), check)


def any_of(description: str, inner: Mapping[type[Any], Described]) -> Described:
    """A value of one of several types, each with its own check."""

    def check(value: Any) -> Any:
        chosen = inner.get(type(value))
        if chosen is None:
            raise BadValue(f"must be {description}")
        return chosen.check(value)

    return Described(description, check)


def optional(inner: Described) -> Described:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return Described(f"nil or {inner.description}", check)


def list_of(inner: Described, limit: int, *, least: int = 0) -> Described:
    """A list of `least` to `limit` items; it becomes a tuple."""
    count = f"exactly {limit}" if least == limit else f"{least} to {limit}" if least else f"at most {limit}"
    check_item = inner.check

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or not least <= len(value) <= limit:
            raise BadValue(f"must be a list of {count} items")
        return tuple([check_item(item) for item in value])

    return Described(f"list of {count}: {inner.description}", check)


def map_of(inner: Described, limit: int) -> Described:
    """A map with short text keys and values that all pass `inner`."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > limit:
            raise BadValue(f"must be a map of at most {limit} entries")
        for key in value:
            if type(key) is not str or len(key) > 256:
                raise BadValue("must have text keys of at most 256 characters")
        return {key: inner(item) for key, item in value.items()}

    return Described(f"map of at most {limit} entries: {inner.description}", check)


def record(
    fields: dict[str, Described], *, strict: bool, defaults: Mapping[str, Any] | None = None
) -> Described:
    """A map with the named fields; a missing one takes its default, if it has one.

    `strict` refuses other fields, else they are dropped.
    """
    missing = defaults or {}

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise BadValue("must be a map")
        if strict and not fields.keys() >= value.keys():
            unknown = next(key for key in value if key not in fields)
            raise BadValue(f"has an unknown field {str(unknown)[:40]!r}")
        checked = {}
        for name, inner in fields.items():
            if name in value:
                try:
                    checked[name] = inner.check(value[name])
                except BadValue as error:
                    raise BadValue(f"{name} {error}") from None
            elif name in missing:
                checked[name] = missing[name]
            else:
                raise BadValue(f"lacks {name}")
        return checked

    inside = "; ".join(f"{name}: {inner.description}" for name, inner in fields.items())
    return Described("map {" + inside + "}", check)
