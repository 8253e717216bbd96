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
    ("line", "named"),
    [("/nope now", "/nope"), ("/", "/"), ("/Reset", "/Reset"), ("/helpme", "/helpme")],
)
def test_what_is_neither_is_refused_and_not_sent(line: str, named: str) -> None:
    with pytest.raises(Refused) as refused:
        slash.parse(line)
    assert refused.value.kind == MESSAGE
    assert refused.value.text.startswith(f"unknown command {named}; the nearest is /")


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


@pytest.mark.parametrize("entered", ["/quit", "/exit"])
def test_what_ends_a_chat(entered: str) -> None:
    assert slash.parse(entered) == slash.Order("/quit", None)
