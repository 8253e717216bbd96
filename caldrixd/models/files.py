"""Which files of a model directory hold its weights, as the transformers library chooses them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from caldrix_protocol.formats import kind_of
from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_object, reason_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model."
MAX_ADAPTER_CONFIG = 1 << 20
MAX_INDEX = 16 << 20
MAX_FILES = 4096
BASE = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]{0,200}\.safetensors")


def weight_files(directory: Path) -> tuple[str, ...]:
    """The weight files of a model directory, see `choose`. Refused also "model/not-readable"."""
    try:
        names = os.listdir(directory)
        # Without the file that a link has lost, another would be taken for the whole model.
        lost = sorted(filter(lambda name: _is_lost(directory / name), names))
    except OSError as error:
        raise Refused("model/not-readable", path=directory, reason=reason_of(error)) from None
    names = sorted({*names} - {*lost})
    if SINGLE in lost or (lost and INDEX not in names and SINGLE not in names):
        path = directory / (SINGLE if SINGLE in lost else lost[0])
        raise Refused("model/not-readable", path=path, reason=os.strerror(errno.ENOENT))
    return choose(directory, names)


def _is_lost(path: Path) -> bool:
    return path.name.endswith((".safetensors", INDEX)) and not path.exists()


def choose(directory: Path, names: Collection[str]) -> tuple[str, ...]:
    """model.safetensors alone, else the files of the index, else every *.safetensors file, sorted.

    `names` are the model's files; only the index is read, in `directory`. Refused "model/no-safetensors",
    "model/other-weights", "model/adapter" and "weights/index-...".
    """
    if SINGLE in names:
        return (SINGLE,)
    if INDEX in names:
        return _indexed(directory, names)
    weights = sorted(filter(_is_weights, names))
    if not weights or adapter(names):
        raise without_weights(directory, names)
    if len(weights) > MAX_FILES:
        raise Refused("weights/header", file=weights[0], reason=f"it is one of {len(weights)} weight files")
    for name in weights:
        if not _FILE_NAME.fullmatch(name):
            raise Refused("weights/header", file=ascii(name)[:200], reason="its name is not a bare file name")
    return tuple(weights)


def adapter(names: Collection[str]) -> str | None:
    """The file of an adapter, where a model has no other weights that are read."""
    if ADAPTER_CONFIG not in names or any(_is_weights(name) and ADAPTER not in name for name in names):
        return None
    return min((name for name in names if name.startswith(ADAPTER)), default=None)


def foreign(names: Collection[str]) -> tuple[str, str] | None:
    """A file of weights that is not read and what it is, where there is none that is."""
    if any(map(_is_weights, names)):
        return None
    return next(((name, kind) for name in sorted(names) if (kind := kind_of(name))), None)


def base_of(directory: Path) -> str:
    """What the adapter in a directory is for, as far as its adapter_config.json says so."""
    try:
        name = read_object(directory / ADAPTER_CONFIG, MAX_ADAPTER_CONFIG).get("base_model_name_or_path")
    except Refused:
        name = None
    return name if type(name) is str and BASE.fullmatch(name) else "its base model"


def without_weights(directory: Path, names: Collection[str]) -> Refused:
    """Why a directory with files of these names, none of them a model's weights, is refused."""
    if file := adapter(names):
        return Refused("model/adapter", path=directory, file=file, base=base_of(directory))
    if other := foreign(names):
        return Refused("model/other-weights", path=directory, file=other[0], kind=other[1])
    return Refused("model/no-safetensors", path=directory)


def _is_weights(name: str) -> bool:
    return fnmatchcase(name, "[!.]*.safetensors") and "/" not in name


def _indexed(directory: Path, present: Collection[str]) -> tuple[str, ...]:
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
    twins = {name.casefold(): name for name in names}
    if other := next((name for name in names if twins[name.casefold()] != name), None):
        reason = f"it names {other} and {twins[other.casefold()]}, which are one file on some disks"
        raise Refused("weights/index-invalid", file=INDEX, reason=reason)
    absent = [name for name in names if name not in present]
    if absent:
        shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        raise Refused("weights/index-absent", file=INDEX, names=shown)
    return tuple(names)
