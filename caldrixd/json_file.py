"""Reads small files of a model directory without trusting them: sizes, JSON traps, odd file types."""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from caldrix_protocol.refusals import Refused

MAX_DIGITS = 400
_NUMBER = re.compile(r"\[Errno -?\d+\] ")
START = 64  # bytes of a file that tell what it is not
EMPTY = "it is empty: download it again"
CUT = "it was cut short: download it again"
_UNFINISHED = re.compile(r"[\w.+\\-]{0,6}")  # of a number, a name or an escape


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. OSError for whatever else stands there."""
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def read(file: BinaryIO, count: int) -> bytes:
    """Up to `count` bytes. OSError also where they would have to be waited for, as in some files of /proc."""
    data: bytes | None = file.read(count)
    if data is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a FIFO would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, limit: int, most: int | None = None) -> bytes:
    """The whole of a regular file of at most `limit` bytes, or its first `most`.

    Refused "config/unreadable", "config/too-big".
    """
    try:
        with open_regular(path) as file:
            data = read(file, limit + 1 if most is None else most)
            size = max(os.fstat(file.fileno()).st_size, len(data))
    except OSError as error:
        raise Refused("config/unreadable", file=path.name, reason=reason_of(error)) from None
    if size > limit:
        raise Refused("config/too-big", file=path.name, size=size, limit=limit)
    return data


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file. Refused "config/not-an-object" and what `read_bytes` refuses."""
    data = read_bytes(path, limit)
    try:
        value = parse(data)
    except ValueError as error:
        raise Refused("config/unreadable", file=path.name, reason=reason_of(error)) from None
    if type(value) is not dict:
        raise Refused("config/not-an-object", file=path.name)
    return value


def stands_for(start: bytes) -> str | None:
    """What a file that begins like this is, in place of itself: a download or a checkout went wrong."""
    if not start:
        return EMPTY
    if start.startswith(b"version "):
        return "it is a Git LFS pointer in place of the file: run git lfs pull where it was cloned"
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "it is a web page in place of the file: download it again"
    return None


def text_of(data: bytes) -> str:
    """UTF-8 as text. ValueError says why it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        ends_within = error.reason == "unexpected end of data"
        raise ValueError(CUT if ends_within else "it is not UTF-8 text") from None


def parse(data: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, only finite numbers, no lone surrogates. ValueError says why."""
    if reason := stands_for(data[:START]) or (None if data.strip() else EMPTY):
        raise ValueError(reason)
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark")
    try:
        value = json.loads(text_of(data), object_pairs_hook=_object, parse_int=_integer)
        _check(value, "the document")
    except json.JSONDecodeError as error:
        raise ValueError(_fault(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _fault(error: json.JSONDecodeError) -> str:
    """Whether a document only lacks its end, or where it is none."""
    end = error.doc[error.pos :].rstrip()
    stops = error.pos > 0 and error.msg != "Extra data" and _UNFINISHED.fullmatch(end)
    if stops or error.msg.startswith("Unterminated string"):
        return CUT
    return f"it is not JSON: line {error.lineno}, column {error.colno}"


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number in it has {len(digits)} digits")
    return int(digits)


def reason_of(error: BaseException, limit: int = 200) -> str:
    """One short line about a library's or the system's error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else without_number(str(error))
    return " ".join(text.split())[:limit] or type(error).__name__


def without_number(text: str) -> str:
    """What a library says of the system's errors, without their numbers."""
    return _NUMBER.sub("", text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        _check(name, "a name")
        if name in values:
            raise ValueError(f"{name[:60]} stands in it twice")
        _check(value, name[:60])
        values[name] = value
    return values


def _check(value: Any, name: str) -> None:
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds half of a surrogate pair") from None
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{ascii(name)[1:-1]} is not a finite number")
    elif type(value) is list:
        for item in value:
            _check(item, name)
