"""The golden vectors: `python -m tests.protocol.vectors` writes those that are missing and touches no other.

protocol/vectors/<message>-<major>.<minor>.json holds the values (bytes as {"hex": ...}), .msgpack beside it
the payload of the frame. <major>.<minor> is the protocol version that gave the message this form. Of messages
between the daemon and its workers, which are always of one version, only the present form is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from caldrix_protocol import messages as m
from caldrix_protocol.codec import encode, name_of
from caldrix_protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from tests.protocol.samples import SAMPLES

DIRECTORY = Path(__file__).parents[2] / "protocol" / "vectors"


def to_json(message: m.Message) -> dict[str, Any]:
    """The message as the values of its map, with bytes as {"hex": ...}."""
    return {"type": name_of(message)} | {name: _plain(value) for name, value in message._asdict().items()}


def from_json(value: Any) -> Any:
    """What msgpack is to hold for a JSON value of a vector."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, m.Timings):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value


def missing() -> list[m.Message]:
    """The samples of messages that have no vector with their present fields."""
    return [
        message
        for message in SAMPLES
        if {"type", *message._fields} not in map(fields_of, DIRECTORY.glob(f"{name_of(message)}-*.json"))
    ]


def write(message: m.Message) -> None:
    """A new vector of this protocol version. FileExistsError rather than another form of a released one."""
    stem = DIRECTORY / f"{name_of(message)}-{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    with stem.with_name(stem.name + ".json").open("x", encoding="utf-8") as file:
        json.dump(to_json(message), file, ensure_ascii=False, indent=2)
        file.write("\n")
    with stem.with_name(stem.name + ".msgpack").open("xb") as binary:
        binary.write(encode(message))


def fields_of(path: Path) -> set[str]:
    """The keys of one vector's map."""
    return set(json.loads(path.read_text("utf-8")))


if __name__ == "__main__":
    for sample in missing():
        write(sample)
