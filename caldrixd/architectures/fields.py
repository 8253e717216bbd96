"""Reads the fields of config.json: every value is typed, bounded and refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from caldrix_protocol.refusals import Refused

MAX_VOCABULARY = 1 << 21
MAX_HIDDEN = 1 << 16
MAX_INTERMEDIATE = 1 << 18
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_EOS_IDS = 64

_Value = TypeVar("_Value")


def excerpt(value: Any) -> str:
    """A JSON value as a refusal shows it: one short line of ASCII."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Fields:
    """A JSON object with typed readers. null counts as absent; `prefix` stands before names in refusals."""

    values: Mapping[str, Any]
    prefix: str = ""

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) is not int:
            raise self.refused("config/type", name, "an integer")
        if not low <= value <= high:
            raise self.refused("config/range", name, f"an integer from {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) not in (int, float):
            raise self.refused("config/type", name, "a number")
        if not low <= value <= high:  # also false for NaN
            raise self.refused("config/range", name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refused("config/type", name, "true or false")
        return value

    def word(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) is not str:
            raise self.refused("config/type", name, "text")
        return value

    def section(self, name: str) -> Fields | None:
        """An object as fields of its own; None for null or absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.refused("config/type", name, "an object")
        return Fields(value, f"{self.prefix}{name}.")

    def items(self, name: str, kind: type, expected: str, limit: int) -> tuple[Any, ...] | None:
        """A list of at most `limit` values of one type; None for null or absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is not list or len(value) > limit or any(type(item) is not kind for item in value):
            raise self.refused("config/type", name, expected)
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; absent is ()."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = value if type(value) is list else [value]
        if len(items) > MAX_EOS_IDS or any(type(item) is not int for item in items):
            raise self.refused("config/type", name, "a token id or a list of token ids")
        if not all(0 <= item < MAX_VOCABULARY for item in items):
            raise self.refused("config/range", name, f"at least 0 and below {MAX_VOCABULARY}")
        return tuple(dict.fromkeys(items))

    def unsupported(self, name: str) -> Refused:
        return Refused("config/unsupported", field=self.prefix + name, value=excerpt(self.values.get(name)))

    def _absent(self, name: str, default: _Value | None) -> _Value:
        if default is None:
            raise Refused("config/missing", field=self.prefix + name)
        return default

    def refused(self, code: str, name: str, expected: str) -> Refused:
        value = excerpt(self.values.get(name))
        return Refused(code, field=self.prefix + name, expected=expected, value=value)
