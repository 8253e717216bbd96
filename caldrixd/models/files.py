"""Which files of a model directory hold its weights, as the transformers library chooses them."""

from __future__ import annotations

import re
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_object, reason_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 16 << 20
MAX_FILES = 4096
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]{0,200}\.safetensors")


def weight_files(directory: Path) -> tuple[str, ...]:
    """model.safetensors alone, else the files of the index, else every *.safetensors file, sorted.

    Refused "model/no-safetensors" and "weights/index-...".
    """
    if (directory / SINGLE).exists():
        return (SINGLE,)
    if (directory / INDEX).exists():
        return _indexed(directory)
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise Refused("model/not-readable", path=directory, reason=reason_of(error)) from None
    if not names:
        raise Refused("model/no-safetensors", path=directory)
    if len(names) > MAX_FILES:
        raise Refused("weights/header", file=names[0], reason=f"it is one of {len(names)} weight files")
    return tuple(names)


def _indexed(directory: Path) -> tuple[str, ...]:
    table = read_object(directory / INDEX, MAX_INDEX).get("weight_map")
    if type(table) is not dict or any(type(name) is not str for name in table.values()):
        raise Refused("weights/index-invalid", file=INDEX, reason="weight_map is not an object of file names")
    names = sorted(set(table.values()))
    if not names:
        raise Refused("weights/index-names-none", file=INDEX)
    if len(names) > MAX_FILES:
        reason = f"it names {len(names)} files; at most {MAX_FILES} are read"
        raise Refused("weights/index-invalid", file=INDEX, reason=reason)
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise Refused("weights/index-name", file=INDEX, name=ascii(name)[:200])
    absent = [name for name in names if not (directory / name).exists()]
    if absent:
        shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        raise Refused("weights/index-absent", file=INDEX, names=shown)
    return tuple(names)
