"""Whatever an expected failure carries, it can be sent to the client and says the same there."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caldrix_protocol import messages as m
from caldrix_protocol.codec import decode, encode
from caldrix_protocol.connection import as_refusal
from caldrix_protocol.framing import MAX_CONTROL
from caldrix_protocol.refusals import EXIT_STATUS, MAX_VALUE, ROWS, Refused

VALUES: tuple[Any, ...] = (
    None,
    True,
    2**63,
    -(2**70),
    float("nan"),
    float("inf"),
    np.int64(7),
    np.float32(0.5),
    Path("/a/b\udcff"),
    "{braces}",
    "line\nline",
    "🗼" * 100_000,
    OSError("x" * 100_000),
)


def fields_of(code: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(ROWS[code].text) if name}


@pytest.mark.parametrize("code", [code for code, row in ROWS.items() if row.kind in EXIT_STATUS])
def test_every_refusal_arrives_whatever_its_values(code: str) -> None:
    for value in VALUES:
        refused = Refused(code, **dict.fromkeys(fields_of(code), value))
        payload = encode(as_refusal(refused))
        assert len(payload) < MAX_CONTROL
        assert decode(payload, m.EVENTS) == m.Refusal(code, refused.kind, refused.text, refused.fields)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "got 7"),
        (0.5, "got 0.5"),
        (True, "got True"),
        (2**64, "got 18446744073709551616"),
        (float("nan"), "got nan"),
        (np.int64(7), "got 7"),
        (Path("/a"), "got /a"),
        ("/m\udcff", "got /m\\udcff"),
        ("", 'got ""'),
        (" \n", 'got " \n"'),
        ("é" * MAX_VALUE, "got " + "é" * MAX_VALUE),
        ("é" * (MAX_VALUE + 1), "got " + "é" * MAX_VALUE + "…"),
    ],
)
def test_a_value_is_said_as_python_says_it_and_not_at_any_length(value: Any, words: str) -> None:
    assert Refused("run/dtype", value=value).text == f"--dtype must be f32 or bf16, {words}"


def test_numbers_stay_numbers_for_programs() -> None:
    fields = Refused("run/memory", model="demo", needed=7, free=1.5, ctx=np.int64(3)).fields
    assert fields == {"model": "demo", "needed": 7, "free": 1.5, "ctx": "3"}
    assert [type(value) for value in fields.values()] == [str, int, float, str]
