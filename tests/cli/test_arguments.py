"""Argument errors as data: the words, the status, and that no daemon is started for them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from caldrix_client.commands.help import USAGE
from caldrix_protocol.options import is_accepted, options_of
from caldrix_protocol.version import VERSION
from tests.support.cli import Home


class Transcript(NamedTuple):
    arguments: list[str]
    err: str
    status: int


def transcripts() -> list[Transcript]:
    blocks = Path(__file__).with_name("arguments.txt").read_text().split("\n\n")[1:]
    return [_transcript(block.splitlines()) for block in blocks]


def _transcript(lines: list[str]) -> Transcript:
    command, *said, status = lines
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "caldrix"
    return Transcript(
        arguments, "".join(line.removeprefix("! ") + "\n" for line in said), int(status.removeprefix("= "))
    )


@pytest.mark.parametrize("transcript", transcripts(), ids=lambda transcript: shlex.join(transcript.arguments))
def test_a_transcript(home: Home, transcript: Transcript) -> None:
    result = home.caldrix(*transcript.arguments)
    assert result == (transcript.status, "", transcript.err)
    assert list((home.path / "run").iterdir()) == []
    assert not home.log.exists()


def test_version(home: Home) -> None:
    for spelling in ("version", "--version"):
        assert home.caldrix(spelling) == (0, f"caldrix {VERSION} (protocol 1.1)\n", "")


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",), ("run", "--help")])
def test_help_names_every_flag(home: Home, arguments: tuple[str, ...]) -> None:
    result = home.caldrix(*arguments)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(USAGE)
    for command in ("run", "stop", "caldrixd"):
        for option in options_of(command):
            shown = f"  {option.name}" in result.out or f", {option.name}" in result.out
            assert shown == is_accepted(option)
    assert max(map(len, result.out.splitlines())) <= 110


def test_an_argument_that_is_no_text_is_refused(home: Home) -> None:
    result = home.caldrix("run", "demo", "-p", "caf\udce9")
    assert result == (2, "", "caldrix: -p is not valid UTF-8\n")
    result = home.caldrix("run", "caf\udce9", "-p", "x")
    assert result == (2, "", "caldrix: the model argument is not valid UTF-8\n")
