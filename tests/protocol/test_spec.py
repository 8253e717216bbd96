"""SPEC.md says what the code does: every field, every state, every limit, and a session in bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol import address, codec, connection, framing
from caldrix_protocol import messages as m
from caldrix_protocol.codec import decode, encode
from caldrix_protocol.connection import NEED_DATA, Connection
from caldrix_protocol.version import FEATURES, PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.protocol import vectors
from tests.protocol.samples import TABLES

SPEC = (Path(__file__).parents[2] / "protocol" / "SPEC.md").read_text("utf-8")
MESSAGES = {name: cls for table in TABLES.values() for name, cls in table.items()}


def section(name: str) -> str:
    """The text under one message's heading."""
    found = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert found, f"SPEC.md has no section for {name}"
    return found[1]


def rows_of(cls: type[Any]) -> list[str]:
    """The table rows that describe the fields of one message."""
    return [
        f"| `{name}` | {check.description} | {default_of(cls, name)} |"
        for name, check in m.checks(cls).items()
    ]


def default_of(cls: type[Any], name: str) -> str:
    if name not in cls._field_defaults:
        return "required"
    default = cls._field_defaults[name]
    return "all zero" if isinstance(default, m.Timings) else f"`{json.dumps(default)}`"


def test_the_title_names_the_version() -> None:
    assert SPEC.startswith(f"# The caldrix protocol, version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}\n")
    for feature in FEATURES:
        assert f"Feature `{feature}`:" in SPEC


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_field_of_a_message_is_described(name: str) -> None:
    rows = rows_of(MESSAGES[name])
    if name == "done":
        rows += rows_of(m.Timings)
    described = [line for line in section(name).split("\n") if line.startswith("| `")]
    assert described == rows
    assert rows or "No fields." in section(name)


def test_no_section_is_about_a_message_that_does_not_exist() -> None:
    assert sorted(re.findall(r"^### `(.*)`$", SPEC, re.MULTILINE)) == sorted(MESSAGES)


def test_internal_messages_are_marked_as_such() -> None:
    before, internal = SPEC.split("## Between the daemon and its workers (internal)")
    inside = set(re.findall(r"^### `(.*)`$", internal, re.MULTILINE))
    assert inside == (set(m.TO_WORKER) | set(m.FROM_WORKER) | set(m.FROM_FETCHER)) - set(m.EVENTS)
    assert set(re.findall(r"^### `(.*)`$", before, re.MULTILINE)) == set(m.REQUESTS) | set(m.EVENTS)


def moves(cell: str) -> dict[str, str]:
    """`a`, `b`: `state`; `c`: `other` as a map of message to state."""
    found: dict[str, str] = {}
    if cell != "nothing":
        for group in cell.split("; "):
            names, state = group.split(": ")
            found |= dict.fromkeys(names.replace("`", "").split(", "), state.strip("`"))
    return found


@pytest.mark.parametrize(
    ("header", "left", "right", "table"),
    [
        ("| State | Client may send | Daemon may send |", "client", "daemon", connection.SOCKET_TABLE),
        ("| State | Daemon may send | Worker may send |", "parent", "worker", connection.WORKER_TABLE),
    ],
)
def test_the_state_tables(header: str, left: str, right: str, table: dict[str, Any]) -> None:
    lines = SPEC.split(header)[1].split("\n\n")[0].strip().split("\n")[1:]
    written = {}
    for line in lines:
        state, ours, theirs = (cell.strip() for cell in line.strip("|").split("|"))
        written[state.strip("`")] = {left: moves(ours), right: moves(theirs)}
    assert written == {
        state: {left: row.get(left, {}), right: row.get(right, {})} for state, row in table.items()
    }


@pytest.mark.parametrize(
    "words",
    [
        f"a frame of any message but those below | at most {framing.MAX_CONTROL} |",
        f"a `blob` or `done` frame | at most {framing.MAX_BULK} ",
        f"all `blob` data of one request | at most {connection.MAX_BLOB_SUM} ",
        f"nested deeper than {codec.MAX_DEPTH} levels",
        f"more than {codec.MAX_LIST} items",
        f"more than {codec.MAX_MAP} entries",
        f"at most {address.SOCKET_PATH_LIMIT['linux']} bytes on Linux",
        f"{address.SOCKET_PATH_LIMIT['darwin']} elsewhere",
    ],
)
def test_the_limits(words: str) -> None:
    assert words in SPEC.replace("\n", " ")


def session() -> list[tuple[str, dict[str, Any], bytes]]:
    """Who sends, the values and the frame of each message of the worked session."""
    text = SPEC.split("## A session, byte by byte")[1].split("```text\n")[1].split("```")[0]
    steps = []
    for step in re.split(r"\n(?=client|daemon)", text.strip()):
        first, *rest = step.split("\n")
        sender, values = first.split(" ", 1)
        steps.append((sender, json.loads(values), bytes.fromhex("".join(rest))))
    return steps


def test_the_session_in_bytes() -> None:
    ends: dict[str, Connection] = {"client": Connection("client"), "daemon": Connection("daemon")}
    for sender, values, data in session():
        receiver = ends["daemon" if sender == "client" else "client"]
        table = m.REQUESTS if sender == "client" else m.EVENTS
        message = decode(data[framing.HEADER :], table)
        assert vectors.to_json(message) == values
        assert framing.frame(encode(message)) == data
        assert ends[sender].send(message) == data
        receiver.receive_data(data)
        assert receiver.next_event() == message
        assert receiver.next_event() is NEED_DATA
    assert ends["client"].state == ends["daemon"].state == connection.READY
    assert len(session()) > 10
