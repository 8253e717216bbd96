"""Lines of a chat that begin with `/`: commands to the client, never sent to a model."""

from __future__ import annotations

from typing import NamedTuple

from caldrix_protocol.refusals import Refused

HELP = """\
the commands of a chat
/reset  clear the conversation
/help   show this list
A message that begins with / needs a space before it.
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat."""


class Reset(NamedTuple):
    """Clear the conversation."""


class Help(NamedTuple):
    """List the commands."""


Slash = Reset | Help
COMMANDS: dict[str, Slash] = {"/reset": Reset(), "/help": Help()}


def parse(line: str) -> Slash | None:
    """The command of a line; None for a message to the model. Raises Refused for what is no command."""
    if not line.startswith("/"):
        return None
    words = " ".join(line.split())
    if words not in COMMANDS:
        first = words.split()[0]
        raise Refused("message/unknown-command", command=words if first in COMMANDS else first)
    return COMMANDS[words]
