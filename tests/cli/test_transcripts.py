"""Every `.test` file beside this one, run with the real command; README.md says how they are written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cli import COMMAND, Home, Result, new_home
from tests.support.daemon import kernel_cache
from tests.support.models import tiny
from tests.support.transcript import Transcript, daemon_of, differences, read, run

FILES = sorted(Path(__file__).parent.glob("*.test"))
DAEMON = {file.name: daemon_of(file) for file in FILES}
TRANSCRIPTS = [transcript for file in FILES for transcript in read(file)]

STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"


class Homes:
    """One home for each file; the command `caldrix` and the models are the same for all."""

    def __init__(self, stack: ExitStack, cache: Path, directory: Path) -> None:
        self.directory = directory
        self._stack = stack
        self._cache = cache
        self._made: dict[str, Home] = {}

    def of(self, file: str) -> Home:
        if file not in self._made:
            self._made[file] = self._stack.enter_context(new_home(self._cache))
        return self._made[file]

    def environment(self, file: str) -> dict[str, str]:
        found = self.of(file).environment
        found["PATH"] = f"{self.directory / 'bin'}:{found['PATH']}"
        if DAEMON[file] == "unreachable":
            found["XDG_RUNTIME_DIR"] = "/dev/null"
        return found


@pytest.fixture(scope="module")
def homes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, endless: str
) -> Iterator[Homes]:
    directory = tmp_path_factory.mktemp("transcripts")
    (directory / "bin").mkdir()
    command = directory / "bin" / "caldrix"
    command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    (directory / "tiny").symlink_to(tiny("tiny-llama"))
    (directory / "endless").symlink_to(endless)
    _with_template(directory / "base", None)
    _with_template(directory / "strict", STRICT)
    with ExitStack() as stack:
        yield Homes(stack, kernel_cache(request.config), directory)


def _with_template(directory: Path, change: str | None) -> None:
    """tiny-llama with other words before its chat template, or with none."""
    shutil.copytree(tiny("tiny-llama"), directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    template = config.pop("chat_template")
    if change is not None:
        config["chat_template"] = change + template
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
def test_a_transcript(homes: Homes, transcript: Transcript) -> None:
    result = run(transcript, homes.directory, homes.environment(transcript.file))
    found = differences(transcript, result)
    assert not found, "\n".join((str(transcript), *found))
    if DAEMON[transcript.file] != "running":
        home = homes.of(transcript.file)
        assert list((home.path / "run").iterdir()) == []
        assert not home.log.exists()


BLOCK = "# daemon: absent\n\n$ caldrix x\n> one\n> a...z\n> ...\n! said\n= 2\n"


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (Result(2, "one\naz\n", "said\n"), []),
        (Result(2, "one\na to z\nmore\nhalf a line", "said\n"), []),
        (Result(2, "one\na to y\n", "said\n"), ["> one", "> a to y"]),
        (Result(2, "two\naz\n", "said\n"), ["> two", "> az"]),
        (Result(2, "one\naz\n", "said\nmore\n"), ["! said", "! more"]),
        (Result(2, "one\naz\n", ""), ["! (nothing)"]),
        (Result(0, "one\naz\n", "said\n"), ["= 0"]),
        (Result(-15, "one\naz\n", "said\n"), ["= 143"]),
    ],
)
def test_what_is_otherwise_is_found(tmp_path: Path, result: Result, found: list[str]) -> None:
    (tmp_path / "x.test").write_text(BLOCK)
    assert daemon_of(tmp_path / "x.test") == "absent"
    (transcript,) = read(tmp_path / "x.test")
    assert differences(transcript, result) == found


@pytest.mark.parametrize(
    "text", ["caldrix x\n= 0\n", "$ caldrix x\n", "= 0\n", "$caldrix x\n= 0\n", "$ x\n= 0\n= 1\n"]
)
def test_a_block_that_is_no_transcript_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.test").write_text(f"# daemon: absent\n\n{text}")
    with pytest.raises(ValueError, match=r"x\.test:\d+"):
        read(tmp_path / "x.test")


def test_each_file_says_which_daemon_it_meets() -> None:
    assert set(DAEMON.values()) == {"unreachable", "absent", "running"}
