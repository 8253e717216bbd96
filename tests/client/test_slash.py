from __future__ import annotations

import pytest

from caldrix_client import blocks, slash
from caldrix_protocol.refusals import MESSAGE, Refused
from tests.support.cli import ROOT


@pytest.mark.parametrize(
    ("entered", "meant"),
    [
        ("/reset", slash.Order("/reset", None)),
        ("/help  ", slash.Order("/help", None)),
        ("/seed\t 5 ", slash.Order("/seed", "5")),
        ("/system be brief, please", slash.Order("/system", "be brief, please")),
        ("hello", slash.Say("hello")),
        (" /reset is a word", slash.Say(" /reset is a word")),
        ("//reset", slash.Say("/reset")),
        ("//", slash.Say("/")),
        ("", slash.Say("")),
        ("/reset\nand more", slash.Say("/reset\nand more")),
        ("// a comment\ncode();", slash.Say("// a comment\ncode();")),
        ('"""/reset"""', slash.Say("/reset")),
        ('"""\na\n\nb\n"""', slash.Say("a\n\nb")),
        ('"""a\nb""" ', slash.Say("a\nb")),
        ('"""', slash.Say('"""')),
        ('""""""', slash.Say("")),
    ],
)
def test_what_is_entered_is_a_command_or_a_message(entered: str, meant: slash.Say | slash.Order) -> None:
    assert slash.parse(entered) == meant
    assert type(slash.parse(entered)) is type(meant)


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("/nope now", None),
        ("/", None),
        ("/=?", None),
        ("/set", None),
        ("/save", None),
        ("/imagee x", None),
        ("/Reset", "/reset"),
        ("/helpme", "/help"),
        ("/temp 1", "/temperature"),
        ("/top_p 1", "/top-p"),
        ("/cls", None),
        ("/claer", "/clear"),
        ("/quti", "/quit"),
    ],
)
def test_what_is_neither_is_refused_and_not_sent(line: str, nearest: str | None) -> None:
    with pytest.raises(Refused) as refused:
        slash.parse(line)
    assert refused.value.kind == MESSAGE
    near = "" if nearest is None else f"the nearest is {nearest}, "
    assert refused.value.text == (
        f"unknown command {line.split()[0]}; {near}/help lists all, and // begins a message with a slash"
    )


@pytest.mark.parametrize(
    ("entered", "open_"),
    [
        ('"""', True),
        ('"""a', True),
        ('"""a\nb', True),
        ('"""a"""', False),
        ('"""a\nb"""', False),
        ('"""\n"""', False),
        ('"""""', True),
        ('a """', False),
        (' """', False),
        ("", False),
    ],
)
def test_a_block_is_open_until_its_last_line(entered: str, open_: bool) -> None:
    assert blocks.unfinished(entered) is open_
    first, *more = entered.split("\n")
    assert (blocks.opens(first) and not any(map(blocks.closes, more))) is open_


def test_every_command_stands_in_the_documentation() -> None:
    page = (ROOT / "docs/run.md").read_text("utf-8").split("## Chat")[1].split("\n## ")[0]
    table = "".join(line for line in page.splitlines() if line.startswith("| `/"))
    for name, command in slash.COMMANDS.items():
        takes = command.takes.replace("|", "\\|")
        assert f"`{f'{name} {takes}'.rstrip()}`" in table


@pytest.mark.parametrize("entered", ["/quit", "/exit", "/bye"])
def test_what_ends_a_chat(entered: str) -> None:
    assert slash.parse(entered) == slash.Order("/quit", None)
