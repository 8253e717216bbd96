from __future__ import annotations

import pytest

from caldrix_client import slash
from caldrix_protocol.refusals import MESSAGE, Refused


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/reset", slash.Reset()),
        ("/help  ", slash.Help()),
        ("hello", None),
        (" /reset is a word", None),
        ("", None),
    ],
)
def test_a_line_is_a_command_or_a_message(line: str, command: slash.Slash | None) -> None:
    assert type(slash.parse(line)) is type(command)


@pytest.mark.parametrize(
    ("line", "named"),
    [("/nope now", "/nope"), ("/reset it", "/reset it"), ("/", "/"), ("//", "//"), ("/Reset", "/Reset")],
)
def test_what_is_neither_is_refused_and_not_sent(line: str, named: str) -> None:
    with pytest.raises(Refused) as refused:
        slash.parse(line)
    assert refused.value.kind == MESSAGE
    assert refused.value.text.startswith(f"unknown command {named};")
