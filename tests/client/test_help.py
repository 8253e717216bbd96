"""`caldrix help`: every flag that can be given is in it. And `caldrix version`."""

from __future__ import annotations

import pytest

from caldrix_client.commands.help import COMMANDS, MODELS, PROGRAM, USAGE, flags_of
from caldrix_client.parse import ACTIONS
from caldrix_protocol.option import Option
from caldrix_protocol.options import OPTIONS, is_accepted, options_of
from caldrix_protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, VERSION
from tests.support.cli import Home


def shown(text: str, option: Option) -> bool:
    return f"  {option.name}" in text or f", {option.name}" in text


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",), ("-h",)])
def test_help_names_every_flag(home: Home, arguments: tuple[str, ...]) -> None:
    result = home.caldrix(*arguments)
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(USAGE)
    for option in OPTIONS:
        assert shown(result.out, option) == is_accepted(option)
    assert max(map(len, result.out.splitlines())) < 80


@pytest.mark.parametrize("topic", [*COMMANDS, *MODELS, PROGRAM])
def test_help_of_a_command_names_its_flags_alone(home: Home, topic: str) -> None:
    result = home.caldrix("help", *topic.split())
    assert (result.status, result.err) == (0, "")
    own = [option for command in flags_of(topic) for option in options_of(command)]
    for option in OPTIONS:
        assert shown(result.out, option) == (option in own and is_accepted(option))


def test_help_of_models_lists_what_it_does(home: Home) -> None:
    assert list(MODELS) == [f"models {action}" for action in ACTIONS]
    shown = home.caldrix("help", "models").out
    for name, command in MODELS.items():
        assert f"\n  caldrix {name} " in shown
        assert f"  {command.doc}\n" in shown


def test_version(home: Home) -> None:
    shown = f"caldrix {VERSION} (protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})\n"
    assert home.caldrix("version") == (0, shown, "")
