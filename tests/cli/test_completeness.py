"""What docs/ says of the command line, some transcript shows: flags, refusals, statuses, messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from caldrix_protocol.options import is_accepted, options_of
from tests.cli.test_transcripts import DAEMON, TRANSCRIPTS
from tests.support.transcript import Transcript

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Messages that no command line leads to by itself, and where they are tested instead.
ELSEWHERE = {
    "--idle-unload must be seconds from 0 to 31536000, got <value>": "tests/daemon/test_start.py",
    "the conversation has <size> bytes; at most <limit> can be sent": "tests/client/test_conversation.py",
    "the prompt is empty and this model has no token to start from": "tests/text/test_prompt.py",
    "the prompt has the token id <token>; this model knows <count> tokens, from 0": (
        "tests/engine/test_engine.py"
    ),
    "this model has no chat template; a conversation cannot be sent to it": "tests/text/test_prompt.py",
    "the model computed a value that is not a finite number; its weights may be damaged": (
        "tests/daemon/test_workers.py"
    ),
    "<who> could not get <what>: it runs under <limits>; raise that and try again": (
        "tests/client/test_main.py"
    ),
    "an internal error ended caldrix: <reason>": "tests/client/test_main.py",
}


def section(page: str, title: str) -> str:
    """The text of a page between a heading and the next one of its level or above."""
    marks = title.partition(" ")[0]
    text = (DOCS / page).read_text("utf-8").partition(f"\n{title}\n")[2]
    assert text, title
    return re.split(rf"^#{{1,{len(marks)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def cells(page: str, title: str, *, table: int = 0) -> list[list[str]]:
    """The rows of a table of a section, without its head."""
    tables = re.findall(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", section(page, title), re.MULTILINE)
    lines = tables[table].splitlines()
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]


def messages(title: str) -> list[str]:
    blocks = re.findall(
        r"^```text\n(.*?)^```$", section("troubleshooting.md", title), re.MULTILINE | re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines() if line]


FLAGS = [re.findall(r"`(-[^` ]+)", row[0]) for row in cells("run.md", "## Flags")]
REFUSED = cells("run.md", "## Flags", table=1)
STATUSES = [int(row[0]) for row in cells("run.md", "## Exit status")]
EARLY = messages("## The command line")
LATE = messages("## While it answers")


def typing(flag: str) -> list[Transcript]:
    """The transcripts with a flag of caldrix run, or a flag and its value, on their command line."""
    words = re.compile(rf"caldrix run [^|;]*(?<![\w-]){re.escape(flag)}(?![\w-])")
    return [transcript for transcript in TRANSCRIPTS if words.search(transcript.command)]


def saying(text: str) -> list[Transcript]:
    """The transcripts with a line of stderr that is `text`, where `<words>` may be anything."""
    pattern = re.compile("caldrix: " + ".*".join(map(re.escape, re.split(r"<\w+>", text))))
    return [
        transcript for transcript in TRANSCRIPTS if any(pattern.fullmatch(line) for line in transcript.err)
    ]


@pytest.mark.parametrize("spellings", FLAGS, ids=lambda spellings: spellings[-1])
def test_every_flag_is_typed(spellings: list[str]) -> None:
    option = next(option for option in options_of("run") if option.name in spellings)
    for spelling in spellings:
        statuses = {transcript.status for transcript in typing(spelling)}
        assert statuses
        assert (0 in statuses) == is_accepted(option)


@pytest.mark.parametrize(("flag", "answer"), REFUSED, ids=lambda cell: cell)
def test_every_refused_flag_is_refused_in_its_words(flag: str, answer: str) -> None:
    found = [transcript for transcript in typing(flag.strip("`")) if transcript in saying(answer)]
    assert {(transcript.status, DAEMON[transcript.file]) for transcript in found} == {(2, "unreachable")}


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_is_shown(status: int) -> None:
    assert [transcript for transcript in TRANSCRIPTS if transcript.status == status]


def test_no_status_is_shown_that_is_not_documented() -> None:
    assert {transcript.status for transcript in TRANSCRIPTS} == set(STATUSES)


@pytest.mark.parametrize("message", [message for message in EARLY if message not in ELSEWHERE])
def test_a_mistake_is_refused_before_a_daemon_is_looked_for(message: str) -> None:
    assert [transcript for transcript in saying(message) if DAEMON[transcript.file] == "unreachable"]


@pytest.mark.parametrize("message", [message for message in LATE if message not in ELSEWHERE])
def test_what_is_said_while_a_model_answers(message: str) -> None:
    assert saying(message)


def test_what_is_held_elsewhere_is_still_said() -> None:
    assert ELSEWHERE.keys() <= {*EARLY, *LATE}
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []
