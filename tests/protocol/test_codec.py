"""One message at a time: what decodes, and everything that is refused with a reason."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgpack
import pytest

from caldrix_protocol import messages as m
from caldrix_protocol.codec import BadFrame, Encoded, TooNew, decode, encode, encoded_delta, name_of
from tests.protocol.samples import SAMPLES, TABLES, table_of

PART = {"type": "text", "text": "hi"}
GENERATE: dict[str, Any] = {"type": "generate", "handle": 1, "raw": [PART]}
OPEN: dict[str, Any] = {"type": "open", "model": "demo", "environment": {}}


def pack(body: Any) -> bytes:
    data: bytes = msgpack.packb(body)
    return data


def reason(body: Any, table: dict[str, type[Any]] = m.REQUESTS) -> str:
    with pytest.raises(BadFrame) as caught:
        decode(body if isinstance(body, bytes) else pack(body), table)
    return caught.value.reason


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_round_trip(message: Any) -> None:
    again = decode(encode(message), table_of(message))
    assert type(again) is type(message)
    assert again == message


def test_to_an_older_version_only_what_it_knows_is_said() -> None:
    plain = {"type": "open", "model": "demo", "environment": {}}
    assert msgpack.unpackb(encode(m.Open("demo", {}), 0)) == plain
    assert msgpack.unpackb(encode(m.Open("demo", {}, ctx=64), 0)) == plain | {"ctx": 64}
    assert encode(m.Ps(), 0) == encode(m.Ps())
    for change in ({"max_batch": 1}, {"cpu_isa": "x86-64-v3"}, {"cpu_kernels": "c"}):
        with pytest.raises(TooNew):
            encode(m.Open("demo", {}, **change), 0)


@pytest.mark.parametrize("message", [*SAMPLES, m.Delta("", ()), m.Delta("é" * 70_000, (1,))], ids=name_of)
def test_a_delta_and_nothing_else_is_known_by_how_it_begins(message: Any) -> None:
    payload = encode(message)
    found = encoded_delta(payload)
    if type(message) is not m.Delta:
        assert found is None
        return
    assert found == Encoded("delta", payload)
    assert (name_of(found), encode(found)) == ("delta", payload)


def test_a_delta_is_the_same_for_every_minor_version() -> None:
    """So it can go on to a client of any version as a worker has encoded it."""
    assert m.Delta not in m.SINCE
    assert encode(m.Delta("hi", (1,)), 0) == encode(m.Delta("hi", (1,)))


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_buffer_of_any_kind_decodes(message: Any) -> None:
    payload = encode(message)
    table = table_of(message)
    assert decode(bytearray(payload), table) == decode(memoryview(payload), table) == message


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_table_without_the_type_refuses_it(message: Any) -> None:
    for table in TABLES.values():
        if type(message) not in table.values():
            assert "unknown type" in reason(encode(message), table)


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_missing_field_takes_its_default_or_is_refused(message: Any) -> None:
    table = table_of(message)
    for field in message._fields:
        body = msgpack.unpackb(encode(message))
        del body[field]
        if name_of(message) == "generate" and field == "turns":
            assert "exactly one" in reason(body)
        elif name_of(message) == "stop" and field == "daemon":
            assert "if_idle with daemon only" in reason(body)
        elif field in message._field_defaults:
            expected = message._replace(**{field: message._field_defaults[field]})
            assert decode(pack(body), table) == expected
        else:
            assert reason(body, table).endswith(f"lacks {field}")


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_an_unknown_field_is_refused_in_requests_and_dropped_from_events(message: Any) -> None:
    body = msgpack.unpackb(encode(message)) | {"colour": "red"}
    for table in (table for table in TABLES.values() if type(message) in table.values()):
        strict = table in (m.REQUESTS, m.TO_WORKER) and type(message) is not m.Hello
        if strict:
            assert "unknown field 'colour'" in reason(body, table)
        else:
            assert decode(pack(body), table) == message


def test_nested_records_follow_the_same_rule() -> None:
    assert "unknown field" in reason({**GENERATE, "raw": [PART | {"bold": True}]})
    done = {"type": "done", "timings": {"reply_tokens": 3, "colour": "red"}}
    assert decode(pack(done), m.EVENTS) == m.Done(timings=m.Timings(reply_tokens=3))


def test_the_largest_values_pass() -> None:
    body = {**GENERATE, "handle": 2**63 - 1, "max_tokens": 2**63 - 1}
    assert decode(pack(body), m.REQUESTS).max_tokens == 2**63 - 1
    knobs = {
        "temperature": sys.float_info.max,
        "top_k": 2**31 - 1,
        "top_p": 1,
        "min_p": 1.0,
        "repetition_penalty": sys.float_info.max,
        "seed": 2**64 - 1,
    }
    sampled = decode(pack(GENERATE | knobs), m.REQUESTS)
    assert {name: getattr(sampled, name) for name in knobs} == knobs
    ids = tuple(range(5000, 5000 + (1 << 20)))
    assert decode(encode(m.Done(ids=ids)), m.EVENTS).ids == ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"handle": -1}, "handle must be an integer from 0"),
        ({"handle": 2**63}, "handle must be an integer"),
        ({"handle": True}, "handle must be an integer"),
        ({"handle": 1.0}, "handle must be an integer"),
        ({"handle": None}, "handle must be an integer"),
        ({"handle": "1"}, "handle must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"max_tokens": 2**63}, "max_tokens must be an integer"),
        ({"max_tokens": math.nan}, "max_tokens must be an integer"),
        *(
            ({"temperature": value}, "temperature must be a")
            for value in (-0.5, math.nan, math.inf, -math.inf, True, "1", None, -(2**63))
        ),
        ({"top_k": -1}, "top_k must be an integer from 0"),
        ({"top_k": 2**31}, "top_k must be an integer"),
        ({"top_k": 1.0}, "top_k must be an integer"),
        *(
            ({"top_p": value}, "top_p must be a")
            for value in (0, 0.0, -0.0, -0.1, 1.0000001, math.nan, math.inf, "1")
        ),
        *(({"min_p": value}, "min_p must be a") for value in (-0.1, 1.1, math.nan, None)),
        *(
            ({"repetition_penalty": value}, "repetition_penalty must be a")
            for value in (0, -1, math.nan, math.inf, False)
        ),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"stop": "x"}, "stop must be a list"),
        ({"stop": [""]}, "stop must not be empty"),
        ({"stop": ["x" * 1025]}, "stop must be at most 1024 bytes"),
        ({"stop": ["x"] * 17}, "stop must be a list of at most 16"),
        ({"stop": [b"x"]}, "stop must be text"),
        ({"raw": None}, "exactly one of turns and raw"),
        ({"raw": [PART], "turns": []}, "exactly one of turns and raw"),
        ({"raw": "hi"}, "raw must be a list"),
        ({"raw": [PART] * 65}, "raw must be a list of at most 64"),
        ({"raw": [{"type": "text"}]}, "raw lacks text"),
        ({"raw": [{"type": "image", "text": "x"}]}, "type must be one of text"),
        ({"raw": [{"type": "text", "text": "x", "blob": 1}]}, "unknown field 'text'"),
        ({"raw": [[]]}, "raw must be a map"),
        ({"raw": None, "turns": [{"role": "tool", "content": []}]}, "role must be one of"),
        ({"raw": None, "turns": [{"role": ["user"], "content": []}]}, "role must be one of"),
        ({"raw": None, "turns": [{"role": "user"}]}, "lacks content"),
        ({"raw": None, "turns": [{"role": "user", "content": []}] * 4097}, "at most 4096"),
    ],
)
def test_values_of_generate(changes: dict[str, Any], words: str) -> None:
    assert words in reason({**GENERATE, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "m" * 4097}, "model must be at most 4096 bytes"),
        ({"model": "é" * 2049}, "model must be at most 4096 bytes"),
        ({"model": b"demo"}, "model must be text"),
        ({"backend": "host"}, "backend must be one of auto, hip, metal, cpu"),
        ({"ctx": 0}, "ctx must be"),
        ({"ctx": 2**31}, "ctx must be"),
        ({"dtype": "f16"}, "dtype must be one of"),
        ({"threads": 4097}, "threads must be"),
        ({"max_batch": 0}, "max_batch must be an integer from 1 to 8"),
        ({"max_batch": 9}, "max_batch must be"),
        ({"cpu_isa": "x86-64"}, "cpu_isa must be one of native, x86-64-v2"),
        ({"cpu_kernels": "cc"}, "cpu_kernels must be one of auto, numba, c"),
        ({"environment": {"A": 1}}, "environment must be text"),
        (
            {"environment": {f"K{number}": "" for number in range(33)}},
            "environment must be a map of at most 32",
        ),
        ({"environment": {"K" * 257: ""}}, "keys of at most 256"),
        ({"environment": []}, "environment must be a map"),
    ],
)
def test_values_of_open(changes: dict[str, Any], words: str) -> None:
    assert words in reason({**OPEN, **changes})


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -0.5, 1e13, 2**64 - 1, True, "1"])
def test_times_must_be_finite_and_in_range(seconds: Any) -> None:
    assert "must be a" in reason({"type": "done", "timings": {"load_seconds": seconds}}, m.EVENTS)


def test_an_integer_stands_for_a_whole_number_of_seconds() -> None:
    message = decode(pack({"type": "done", "timings": {"load_seconds": 2}}), m.EVENTS)
    assert message.timings.load_seconds == 2.0
    assert type(message.timings.load_seconds) is float


@pytest.mark.parametrize("version", [[], [1], [1, 0, 0], [1, -1], [1, 65536], "1.0", [1.0, 0]])
def test_a_version_is_two_small_integers(version: Any) -> None:
    assert "protocol must be" in reason({"type": "hello", "protocol": version, "version": "0", "pid": 1})


def test_stop_takes_a_model_or_the_daemon() -> None:
    assert "not both" in reason({"type": "stop", "model": "demo", "daemon": True})


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "not one msgpack value"),
        (b"\xc0", "not a map"),
        (b"\x93\x01\x02\x03", "not a map"),
        (b"\x81\xa4type", "not one msgpack value"),
        (pack({"type": "ps"}) + b"\xc0", "not one msgpack value"),
        (pack({}), "unknown type None"),
        (pack({"type": 3}), "unknown type 3"),
        (pack({"type": ["ps"]}), "unknown type"),
        (pack({"type": "PS"}), "unknown type 'PS'"),
        (b"\x82\xa4type\xa2ps\xa4type\xa2ps", "given twice"),
        (b"\x82\xa4type\xa2ps\x01\x02", "not one msgpack value"),
        (b"\x82\xa4type\xa2ps\xc4\x01a\x02", "not text"),
        (b"\x82\xa4type\xa2ps\x80\x02", "not one msgpack value"),
        (b"\x81\xa4type\xa2\xff\xfe", "not one msgpack value"),
        (b"\xc1", "not one msgpack value"),
        (b"\xdf\xff\xff\xff\xff", "not one msgpack value"),
        (b"\xdd\xff\xff\xff\xff", "not one msgpack value"),
        (b"\xdb\xff\xff\xff\xff", "not one msgpack value"),
        (b"\xc9\xff\xff\xff\xff\x01", "not one msgpack value"),
        (b"\x91" * 600 + b"\xc0", "not a map"),
        (b"\x91" * 4000 + b"\xc0", "not one msgpack value"),
    ],
)
def test_bytes_that_are_no_message(payload: bytes, words: str) -> None:
    assert words in reason(payload)
    assert words in reason(payload, m.EVENTS)


@pytest.mark.parametrize(
    "extension",
    [
        msgpack.ExtType(5, b"x"),
        msgpack.ExtType(5, b""),
        msgpack.Timestamp(0, 0),
        msgpack.Timestamp(2**40, 1),
    ],
)
def test_extension_types_are_refused_even_where_fields_are_dropped(extension: Any) -> None:
    for field in ("code", "colour"):
        body = {"type": "status", "code": "a", "text": "b", "fields": {}} | {field: extension}
        assert "xt" in reason(body, m.EVENTS)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_dropped_field_may_be_eight_levels_deep_with_its_message() -> None:
    assert decode(pack({"type": "done", "colour": nested(7)}), m.EVENTS) == m.Done()
    assert "deeper than 8" in reason({"type": "done", "colour": nested(8)}, m.EVENTS)
    assert "deeper than 8" in reason({"type": "done", "colour": {"a": nested(7)}}, m.EVENTS)


def test_a_claim_of_many_items_allocates_nothing() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
            reason(b"\x81\xa4type" + head + b"\x7f\xff\xff\xff" + b"\x00" * 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_name_that_is_not_utf8_is_sent_escaped() -> None:
    message = m.Status("status/directory", "read from /m\udcff", {"path": "/m\udcff"})
    again = decode(encode(message), m.EVENTS)
    assert again == m.Status("status/directory", "read from /m\\udcff", {"path": "/m\\udcff"})


def test_what_cannot_be_encoded_says_so() -> None:
    with pytest.raises(OverflowError):
        encode(m.Abort(2**64))
    with pytest.raises(TypeError):
        encode(m.Delta(object()))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        encode(m.Timings())
