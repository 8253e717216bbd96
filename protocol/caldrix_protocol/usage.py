"""Flags as help shows them, and the daemon's own help."""

from __future__ import annotations

import textwrap

from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of

WIDTH = 79
INDENT = 6
DAEMON = """\
usage: caldrixd [flags]

caldrixd keeps models loaded and answers `caldrix`, which starts it when none
runs. It stays in the foreground and writes its log to stderr. SIGTERM ends it
after the running answers, a second one at once."""
OTHERS = """\
  -h, --help
      print this text
  --version
      print the version"""


def daemon_help() -> str:
    """What `caldrixd --help` prints."""
    return f"{DAEMON}\n\n{list_flags('caldrixd')}\n{OTHERS}"


def list_flags(title: str, command: str | None = None) -> str:
    """The flags that a command accepts (by default the one the title names), each with what it does."""
    accepted = [option for option in options_of(command or title) if is_accepted(option)]
    bracketed = any(option.metavar is not None for option in accepted)
    head = f"Flags of {title}{', with [what holds without them]' if bracketed else ''}:"
    return "\n".join((head, *map(_entry, accepted)))


def _entry(option: Option) -> str:
    spelled = ", ".join((*option.aliases, option.name))
    value = "" if option.metavar is None else f" {option.metavar}"
    default = "" if option.metavar is None else f" [{option.absent}]"
    indent = " " * INDENT
    text = textwrap.fill(
        option.doc + default, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return f"  {spelled}{value}\n{text}"
