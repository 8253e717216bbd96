"""Whatever a peer sends, the codec raises only BadFrame and a connection only ProtocolError."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldrix_protocol.codec import BadFrame, decode, encode
from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, ProtocolError
from caldrix_protocol.framing import frame
from tests.protocol.samples import SAMPLES, TABLES, table_of
from tests.protocol.test_connection import CONVERSATION, SCRIPTS, WORKER_CONVERSATION

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "x" * 600,
    "\x00",
    b"",
    b"\xff" * 40,
    [],
    [[[[[[[[[[]]]]]]]]]],
    {},
    {"type": "ps"},
    {"": {"": {"": {}}}},
    msgpack.ExtType(1, b"x"),
    msgpack.Timestamp(1, 2),
)


def decoded_or_refused(payload: bytes, table: dict[str, type[Any]]) -> None:
    """A message that decodes is a good one: it encodes and decodes to itself."""
    try:
        message = decode(payload, table)
    except BadFrame as error:
        reason = error.reason
    else:
        reason = ""
        assert decode(encode(message), table) == message
    assert reason.isprintable()


def flipped(payload: bytes, chance: random.Random) -> bytes:
    """The payload with a few bytes changed, cut out, repeated or put in."""
    data = bytearray(payload)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes((chance.randrange(256),))
            case 1:
                del data[at : at + chance.randint(1, 8)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 8)]
            case 3:
                data[at:at] = chance.choice(
                    (b"\xdd\x7f\xff\xff\xff", b"\xdf\x00\x10\x00\x00", b"\xc7\x00\xff", b"\xc1")
                )
            case 4:
                data[at : at + 1] = chance.choice(
                    (b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xcf" + b"\xff" * 8, b"\xc0")
                )
    return bytes(data)


def reshaped(body: Any, chance: random.Random) -> Any:
    """The value with one place in it replaced by an odd one, or a key lost, renamed or added."""
    if isinstance(body, dict) and body and chance.random() < 0.9:
        key = chance.choice(list(body))
        match chance.randrange(5):
            case 0:
                return {name: item for name, item in body.items() if name != key}
            case 1:
                return body | {chance.choice(("colour", "type", "fields", "blob")): chance.choice(ODD)}
            case 2:
                return body | {key: chance.choice(ODD)}
            case _:
                return body | {key: reshaped(body[key], chance)}
    if isinstance(body, list) and body and chance.random() < 0.9:
        at = chance.randrange(len(body))
        return [*body[:at], reshaped(body[at], chance), *body[at + 1 :]] * chance.choice((1, 1, 70))
    return chance.choice(ODD)


def mutants(seed: int, count: int) -> Iterator[tuple[bytes, dict[str, type[Any]]]]:
    chance = random.Random(seed)
    originals = [(encode(message), table_of(message)) for message in SAMPLES]
    for _ in range(count):
        payload, table = chance.choice(originals)
        if chance.random() < 0.5:
            yield flipped(payload, chance), table
        else:
            yield msgpack.packb(reshaped(msgpack.unpackb(payload), chance)), table


def check_mutants(seed: int, count: int) -> None:
    for payload, table in mutants(seed, count):
        try:
            decoded_or_refused(payload, table)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {payload.hex()}") from error


def test_mutated_messages() -> None:
    check_mutants(1, 20_000)


@pytest.mark.slow
def test_ten_million_mutated_messages() -> None:
    check_mutants(2, 10_000_000)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text("aé\0🗼", max_size=8)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200), st.sampled_from(list(TABLES.values())))
def test_any_bytes(payload: bytes, table: dict[str, type[Any]]) -> None:
    decoded_or_refused(payload, table)


@settings(max_examples=300)
@given(st.data())
def test_any_values_in_the_fields_of_any_message(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(list(TABLES.values())))
    name, cls = data.draw(st.sampled_from(list(table.items())))
    fields = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(cls._fields, VALUES)))
    decoded_or_refused(msgpack.packb({"type": name} | fields), table)


def heard(connection: Connection, data: bytes) -> bool:
    """Whether the connection still goes on after these bytes."""
    connection.receive_data(data)
    while True:
        try:
            event = connection.next_event()
        except ProtocolError as error:
            if error.fatal:
                assert connection.next_event() is CLOSED
                return False
            connection.send(SAMPLES[17])
            continue
        if event is NEED_DATA:
            return True
        if event is CLOSED:
            return False


def test_mutated_conversations() -> None:
    """Every frame of a conversation in turn gives way to mutants of it, with and without its right length."""
    chance = random.Random(3)
    for role, script in SCRIPTS.items():
        for place, (sender, message) in enumerate(script):
            if sender == role:
                continue
            for _ in range(40):
                connection = Connection(role)
                for earlier_sender, earlier in script[:place]:
                    if earlier_sender == role:
                        connection.send(earlier)
                    else:
                        assert heard(connection, frame(encode(earlier)))
                payload = encode(message)
                mutant = frame(flipped(payload, chance) or b"x")
                heard(connection, chance.choice((mutant, flipped(frame(payload), chance))))
    assert {role for role, _ in CONVERSATION + WORKER_CONVERSATION} == set(SCRIPTS)
