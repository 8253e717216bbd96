"""The header of a safetensors file, checked against the file's real size before any byte is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import CUT, parse, read, reason_of, stands_for

MAX_HEADER = 8 << 20
MAX_DIMENSIONS = 8
MAX_NAME = 512

# Bytes of one item; a dtype that is not here has no size to check, and no plan takes it.
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a header. `begin` and `end` are byte offsets into the file's data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BinaryIO, name: str, size: int) -> tuple[int, dict[str, Entry]]:
    """Offset of the data section, and the tensors by name. `size` is the file's.

    Refused "weights/header" or "weights/truncated".
    """
    prefix = read(file, 8)
    if reason := stands_for(prefix):
        _refuse(name, reason)
    if len(prefix) < 8:
        _refuse(name, CUT)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        _refuse(name, f"its header claims {length} bytes; at most {MAX_HEADER} are read")
    start = 8 + length
    data = read(file, length)
    if size < start or len(data) < length:
        raise Refused("weights/truncated", file=name, expected=start, size=size)
    if not data.startswith(b"{"):
        _refuse(name, "its header does not start with {")
    try:
        table = parse(data)
    except ValueError as error:
        _refuse(name, f"its header cannot be read: {reason_of(error)}")
    if type(table) is not dict:
        _refuse(name, "its header is not a JSON object")
    _check_metadata(name, table.pop("__metadata__", None))
    entries = {tensor: _entry(name, tensor, value) for tensor, value in table.items()}
    _check_cover(name, entries, start, size)
    return start, entries


def _refuse(name: str, reason: str) -> NoReturn:
    raise Refused("weights/header", file=name, reason=reason)


def _check_metadata(name: str, value: Any) -> None:
    if value is None:
        return
    if type(value) is not dict or any(type(item) is not str for item in value.values()):
        _refuse(name, "__metadata__ is not an object of texts")


def _entry(name: str, tensor: str, value: Any) -> Entry:
    shown = ascii(tensor)[:80]
    if not tensor or len(tensor) > MAX_NAME or not tensor.isprintable():
        _refuse(name, f"the tensor name {shown} is empty, too long or not printable")
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(name, f"{shown} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or len(dtype) > 16 or not dtype.isascii() or not dtype.isprintable():
        _refuse(name, f"the dtype of {shown} is not a name")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        _refuse(name, f"the shape of {shown} is not a list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(name, f"the data_offsets of {shown} are not two rising offsets")
    items = 1
    for extent in shape:
        items *= extent
    begin, end = offsets
    if dtype in _ITEM_BYTES and items * _ITEM_BYTES[dtype] != end - begin:
        _refuse(name, f"the shape of {shown} takes {items * _ITEM_BYTES[dtype]} bytes, not {end - begin}")
    return Entry(dtype, tuple(shape), begin, end)


def _counts(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_cover(name: str, entries: dict[str, Entry], start: int, size: int) -> None:
    """Tensors lie one after the other and fill the file: no overlap, no hole, nothing behind."""
    position = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps another" if entry.begin < position else "leaves a hole before it"
            _refuse(name, f"{ascii(tensor)[:80]} {kind}")
        position = entry.end
    if start + position > size:
        raise Refused("weights/truncated", file=name, expected=start + position, size=size)
    if start + position < size:
        _refuse(name, f"{size - start - position} bytes follow its last tensor")
