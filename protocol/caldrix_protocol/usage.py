"""Flags as help shows them, and the daemon's own help."""

from __future__ import annotations

import textwrap

from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of

WIDTH = 100
INDENT = 6
DAEMON = """\
usage: caldrixd [flags]

caldrixd keeps models loaded and answers `caldrix`, which starts it when none runs. It stays in the
foreground and writes its log to stderr. SIGTERM ends it after the running answers, a second one at once."""
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
    flags = [_entry(option) for option in options_of(command or title) if is_accepted(option)]
    return "\n".join((f"Flags of {title}:", *flags))


def _entry(option: Option) -> str:
    spelled = ", ".join((*option.aliases, option.name))
    value = "" if option.metavar is None else f" {option.metavar}"
    default = "" if option.metavar is None else f" [{option.absent}]"
    text = textwrap.fill(
        option.doc + default, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
    )
    return f"  {spelled}{value}\n{text}"
