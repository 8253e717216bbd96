"""What a field of config.json must not be, and how each kind of field refuses it."""

from __future__ import annotations

from typing import Any

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models import gate
from tests.models.conftest import ModelDirectory

MISSING = object()
HUGE = 2**63
NAN = float("nan")

BAD_INTEGER = {
    "8": "config/type",
    True: "config/type",
    1.5: "config/type",
    1e308: "config/type",
    0: "config/range",
    -1: "config/range",
    HUGE: "config/range",
    NAN: "config/unreadable",
}
BAD_REAL = {
    "1": "config/type",
    True: "config/type",
    -1: "config/range",
    0: "config/range",
    HUGE: "config/range",
    1e308: "config/range",
    NAN: "config/unreadable",
}
BAD_FLAG = {"true": "config/type", 0: "config/type", 1.5: "config/type", NAN: "config/unreadable"}
BAD_IDS = {
    "2": "config/type",
    False: "config/type",
    1e308: "config/type",
    -1: "config/range",
    HUGE: "config/range",
    NAN: "config/unreadable",
}
ABSENT = (None, MISSING)


def show(value: Any) -> str:
    return "missing" if value is MISSING else repr(value)[:20]


def refusal(model: ModelDirectory, field: str, value: Any, **others: Any) -> Refused:
    """What the gate says to one field of this value (or absent), beside `others`."""
    if value is MISSING:
        model.configure(without=(field,), **others)
    else:
        model.configure(**{**others, field: value})
    with pytest.raises(Refused) as caught:
        gate.read_spec(model.path)
    return caught.value
