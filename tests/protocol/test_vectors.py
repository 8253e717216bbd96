"""Every message of every released version keeps its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from caldrix_protocol.codec import decode, encode, name_of
from tests.protocol import vectors
from tests.protocol.samples import SAMPLES, TABLES

JSON_FILES = sorted(vectors.DIRECTORY.glob("*.json"))
NAMES = sorted({name for table in TABLES.values() for name in table})


def tables_with(name: str) -> list[dict[str, type[Any]]]:
    return [table for table in TABLES.values() if name in table]


def version_of(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in path.stem.rsplit("-", 1)[1].split("."))


def newest(name: str) -> Path:
    """The newest vector of a message, which has the message's present fields."""
    return max((path for path in JSON_FILES if path.stem.rsplit("-", 1)[0] == name), key=version_of)


@pytest.mark.parametrize("name", NAMES)
def test_every_message_has_a_vector_with_all_its_fields(name: str) -> None:
    cls = tables_with(name)[0][name]
    assert vectors.fields_of(newest(name)) == {"type", *cls._fields}


def test_every_vector_is_of_a_message_and_has_both_files() -> None:
    assert {path.stem.rsplit("-", 1)[0] for path in JSON_FILES} == set(NAMES)
    assert [path.with_suffix(".msgpack") for path in JSON_FILES] == sorted(
        vectors.DIRECTORY.glob("*.msgpack")
    )


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.stem)
def test_a_vector_decodes_to_its_values(path: Path) -> None:
    body = vectors.from_json(json.loads(path.read_text("utf-8")))
    payload = path.with_suffix(".msgpack").read_bytes()
    assert msgpack.unpackb(payload) == body
    for table in tables_with(body["type"]):
        message = decode(payload, table)
        assert type(message) is table[body["type"]]
        present = vectors.to_json(message)
        assert {key: vectors.from_json(present[key]) for key in body} == body


@pytest.mark.parametrize("name", NAMES)
def test_a_message_encodes_to_its_newest_vector(name: str) -> None:
    path = newest(name)
    body = vectors.from_json(json.loads(path.read_text("utf-8")))
    message = decode(msgpack.packb(body), tables_with(name)[0])
    assert encode(message) == path.with_suffix(".msgpack").read_bytes()


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_samples_leave_no_field_at_its_default(message: Any) -> None:
    same = {name for name, value in message._field_defaults.items() if getattr(message, name) == value}
    assert same <= {"raw", "model", "unit"}


def test_a_released_vector_is_never_written_again() -> None:
    (newest_form,) = (message for message in SAMPLES if name_of(message) == "open")
    with pytest.raises(FileExistsError):
        vectors.write(newest_form)
