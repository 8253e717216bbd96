"""tokenizer_config.json: special tokens by name, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caldrixd.json_file import read_object

FILE = "tokenizer_config.json"
MAX_BYTES = 16 << 20


def read_config(directory: Path) -> dict[str, Any]:
    """The object of a model directory; an empty one where there is no such file."""
    path = directory / FILE
    return read_object(path, MAX_BYTES) if path.exists() else {}


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """A `..._token` field: a text, or an object with the text as `content`."""
    value = config.get(name)
    if type(value) is dict:
        value = value.get("content")
    return value if type(value) is str else None
