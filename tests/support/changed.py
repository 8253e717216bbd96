"""Models that differ from a tiny one in some of their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A file's new contents, fields over those of a JSON file, or None to leave the file out.
Change = bytes | Mapping[str, Any] | None


def contents(directory: Path, changes: Mapping[str, Change]) -> dict[str, bytes]:
    """The files of a model by name, with changes. A field whose value is None is left out of its file."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "reference.json"}
    for name, change in changes.items():
        if change is None:
            files.pop(name, None)
        elif isinstance(change, bytes):
            files[name] = change
        else:
            fields = json.loads(files.get(name, b"{}")) | dict(change)
            kept = {field: value for field, value in fields.items() if value is not None}
            files[name] = json.dumps(kept).encode()
    return files


def changed(directory: Path, copy: Path, changes: Mapping[str, Change]) -> Path:
    """A copy of a model directory with changes."""
    copy.mkdir()
    for name, data in contents(directory, changes).items():
        (copy / name).write_bytes(data)
    return copy
