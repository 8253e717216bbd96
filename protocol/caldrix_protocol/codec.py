"""Messages to bytes and back: one msgpack map per message, with the key "type" and the fields.

`decode` holds every rule about a single message; nothing that a peer can send makes it raise
anything but `BadFrame`, or allocate much more than the frame's own size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from msgpack import packb, unpackb
from msgpack.exceptions import UnpackException

from caldrix_protocol import messages
from caldrix_protocol.messages import SINCE, Done, Hello, Message, checks
from caldrix_protocol.schema import BadValue, record
from caldrix_protocol.version import PROTOCOL_MINOR

MAX_DEPTH = 8
MAX_LIST = 1 << 20
MAX_MAP = 1 << 10

_TABLES = (
    messages.REQUESTS,
    messages.EVENTS,
    messages.TO_WORKER,
    messages.FROM_WORKER,
    messages.FROM_FETCHER,
)
_NAMES: dict[type[Any], str] = {cls: name for table in _TABLES for name, cls in table.items()}

# `hello` travels before either side knows the other's version, so it tolerates fields it does not know.
_STRICT = {*messages.REQUESTS.values(), *messages.TO_WORKER.values()} - {Hello}
_READERS = {
    cls: record(checks(cls), strict=cls in _STRICT, defaults=cls._field_defaults).check for cls in _NAMES
}
_KNOWN = {cls: frozenset(cls._fields) for cls in _NAMES}


class TooNew(ValueError):
    """A message says what a peer of an older minor version has no field for."""


class BadFrame(ValueError):
    """A frame that is not a message of the expected table; `reason` completes "the frame ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Encoded(NamedTuple):
    """A message that somebody else has encoded: its name, and the payload that goes on as it is."""

    name: str
    payload: bytes


# How every encoded delta begins: a map of its three keys, "type" before the others.
_DELTA = b"\x83\xa4type\xa5delta"


def encoded_delta(payload: bytes) -> Encoded | None:
    """The delta that `payload` holds, which is the same for all versions; None for any other message.

    Its text and ids are not looked at: whom it goes to decodes it.
    """
    return Encoded("delta", payload) if payload.startswith(_DELTA) else None


def name_of(message: Message) -> str:
    """The message's "type" on the wire. KeyError for anything that is no message."""
    return message.name if type(message) is Encoded else _NAMES[type(message)]


def encode(message: Message, minor: int = PROTOCOL_MINOR) -> bytes:
    """The payload of one frame, without its length, for a peer of the minor version `minor`. Raises TooNew.

    Values are not checked against the schema: the receiver does that. A lone surrogate (a byte of a file name
    that is not UTF-8) becomes its escape. OverflowError or TypeError for a value msgpack cannot hold.
    """
    payload: bytes
    cls = type(message)
    if cls is Encoded:
        payload = message.payload
        return payload
    body = {"type": _NAMES[cls]}
    body.update(zip(cls._fields, message, strict=True))
    if minor < PROTOCOL_MINOR and cls in SINCE:
        _leave_out(body, cls, minor)
    if cls is Done:
        body["timings"] = message.timings._asdict()
    try:
        payload = packb(body)
    except UnicodeEncodeError:
        payload = packb(body, unicode_errors="backslashreplace")
    return payload


def _leave_out(body: dict[str, Any], cls: type[Any], minor: int) -> None:
    """Drop what is at its default: it may be newer than the peer, and goes without saying."""
    for name, default in cls._field_defaults.items():
        if body[name] == default:
            del body[name]
    newer = [name for name, since in SINCE[cls].items() if since > minor and name in body]
    if newer:
        raise TooNew(newer[0])


def decode(payload: bytes | bytearray | memoryview, table: dict[str, type[Any]]) -> Message:
    """The message in one frame's payload.

    `table` is one of messages.REQUESTS, EVENTS, TO_WORKER and FROM_WORKER. Lists become tuples; missing
    fields take their defaults; unknown ones are refused in requests and dropped from events. Raises BadFrame
    and nothing else.
    """
    body = _unpack(payload)
    name = body.pop("type", None)
    cls = table.get(name) if type(name) is str else None
    if cls is None:
        raise BadFrame(f"has an unknown type {name!r:.60}")
    if cls not in _STRICT and not _KNOWN[cls].issuperset(body):
        _check_unknown(cls, body)
    try:
        message = cls(**_READERS[cls](body))
        rule = messages.RULES.get(cls)
        if rule is not None:
            rule(message)
    except BadValue as error:
        raise BadFrame(f"is not a valid {name}: {error}") from None
    return message


def _unpack(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    try:
        body = unpackb(
            payload,
            object_pairs_hook=_unique_keys,
            ext_hook=_refuse_extension,
            max_array_len=min(len(payload), MAX_LIST),
            max_map_len=min(len(payload), MAX_MAP),
            max_ext_len=0,
        )
    except BadFrame:
        raise
    except (ValueError, UnpackException, MemoryError) as error:
        raise BadFrame(f"is not one msgpack value: {type(error).__name__} {error!s:.80}".rstrip()) from None
    if type(body) is not dict:
        raise BadFrame("is not a map")
    return body


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise BadFrame("holds a map with a key given twice")
    for key in body:
        if type(key) is not str:
            raise BadFrame("holds a map with a key that is not text")
    return body


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise BadFrame(f"holds the extension type {code}")


def _check_unknown(cls: type[Any], body: dict[str, Any]) -> None:
    """Fields that are dropped keep the depth limit too; the schema bounds the depth of known ones."""
    for key, value in body.items():
        if key not in cls._fields:
            _check_depth(value, 2)


def _check_depth(value: Any, depth: int) -> None:
    if type(value) not in (dict, list):
        return
    if depth > MAX_DEPTH:
        raise BadFrame(f"is nested deeper than {MAX_DEPTH} levels")
    for item in value.values() if type(value) is dict else value:
        _check_depth(item, depth + 1)
