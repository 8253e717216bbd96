"""Transcripts: a command line, what goes in, what comes out. tests/cli/README.md says how to write one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

from tests.support.cli import SECONDS, Result

ANYTHING = "..."
MARKS = "$<>!^="


class Transcript(NamedTuple):
    """One block of a `.test` file. `signal` is the name of the one that is sent once stdout has begun."""

    file: str
    line: int
    command: str
    typed: str
    out: list[str]
    err: list[str]
    signal: str | None
    status: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.command}"


def daemon_of(path: Path) -> str:
    """Which daemon the transcripts of a file meet, as its first line says: `# daemon: WORD`."""
    first = path.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("# daemon: ")


def read(path: Path) -> list[Transcript]:
    """All transcripts of a file, in its order. ValueError names the line that is none."""
    lines = path.read_text("utf-8").splitlines()
    found: list[Transcript] = []
    block: list[tuple[str, str]] = []
    for number, line in enumerate([*lines, ""], 1):
        mark, space, text = line[:1], line[1:2], line[2:]
        if mark in ("", "#"):
            if block:
                found.append(_transcript(path, number - len(block), block))
            block = []
        elif mark in MARKS and space in ("", " "):
            block.append((mark, text))
        else:
            raise ValueError(f"{path.name}:{number}: {line}")
    return found


def _transcript(path: Path, number: int, block: list[tuple[str, str]]) -> Transcript:
    said = {mark: [text for each, text in block if each == mark] for mark in MARKS}
    if not said["$"] or len(said["="]) != 1 or len(said["^"]) > 1:
        raise ValueError(f"{path.name}:{number}: needs a command and one status")
    return Transcript(
        path.name,
        number,
        "\n".join(said["$"]),
        "".join(f"{line}\n" for line in said["<"]),
        said[">"],
        said["!"],
        said["^"][0] if said["^"] else None,
        int(said["="][0]),
    )


def run(transcript: Transcript, directory: Path, environment: dict[str, str]) -> Result:
    """Run the command line in `directory`; the status of a pipeline is that of its last part that failed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        ("bash", "-o", "pipefail", "-c", transcript.command),
        cwd=directory,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    begun = b""
    with process:
        deadline = threading.Timer(SECONDS, process.kill)
        deadline.start()
        try:
            if transcript.signal is not None:
                assert process.stdout is not None
                begun = os.read(process.stdout.fileno(), 1)
                process.send_signal(signal.Signals[f"SIG{transcript.signal}"])
            out, err = process.communicate(transcript.typed.encode())
        finally:
            deadline.cancel()
    return Result(process.returncode, (begun + out).decode(), err.decode())


def differences(transcript: Transcript, result: Result) -> list[str]:
    """What the command did otherwise than the transcript says."""
    found = []
    for mark, lines, text in ((">", transcript.out, result.out), ("!", transcript.err, result.err)):
        if not re.fullmatch(_pattern(lines), text, re.DOTALL):
            found += [f"{mark} {line}" for line in text.splitlines()] or [f"{mark} (nothing)"]
    status = result.status if result.status >= 0 else 128 - result.status
    if status != transcript.status:
        found.append(f"= {status}")
    return found


def _pattern(lines: list[str]) -> str:
    """A regular expression for a stream: `...` is anything in a line, and alone any number of lines."""
    patterns = []
    for line in lines:
        if line == ANYTHING:
            patterns.append("(?:[^\n]*(?:\n|\\Z))*?")
        else:
            patterns.append("[^\n]*".join(map(re.escape, line.split(ANYTHING))) + "\n")
    return "".join(patterns)
