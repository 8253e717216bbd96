"""What is entered in a chat: a message, or a line that begins with `/`, which is a command to the client.

A message of several lines and the content of a block are never a command.
"""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.blocks import QUOTES, content
from caldrix_protocol.options import near
from caldrix_protocol.refusals import Refused


class Say(NamedTuple):
    """A message to the model."""

    text: str


class Order(NamedTuple):
    """A command, a key of COMMANDS, and what stands after it."""

    name: str
    argument: str | None


class Command(NamedTuple):
    """`takes` is what may stand after the command ("": nothing); `refused` the row that refuses it."""

    takes: str
    doc: str
    refused: str | None = None


COMMANDS: dict[str, Command] = {
    "/reset": Command("", "clear the conversation (/clear too); settings stay"),
    "/undo": Command("", "take the last message and its answer back"),
    "/regen": Command("", "answer the last message again"),
    "/system": Command("TEXT|@FILE", "the system message from the next message on"),
    "/context": Command("", "how full the context is"),
    "/temperature": Command("T", "sample at this temperature"),
    "/top-k": Command("N", "keep only the N most likely tokens"),
    "/top-p": Command("P", "keep the most likely tokens that add up to P"),
    "/min-p": Command("M", "drop tokens below M times the most likely one"),
    "/repetition-penalty": Command("R", "make the last 64 tokens less likely"),
    "/seed": Command("N", "seed the random draw"),
    "/sampling": Command("", "show all six of these"),
    "/image": Command("PATH", "", "usage/not-available"),
    "/help": Command("", "show this list"),
    "/quit": Command("", "end the chat, as Ctrl-D does (/exit and /bye too)"),
}

SAME_AS = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset"}


def parse(entered: str) -> Say | Order:
    """What was entered. Raises Refused for a line that begins with `/` and is no command."""
    block = content(entered)
    if block is not None:
        return Say(block)
    if not entered.startswith("/") or "\n" in entered:
        return Say(entered)
    if entered.startswith("//"):
        return Say(entered[1:])
    typed, *rest = entered.split(None, 1)
    name = SAME_AS.get(typed, typed)
    argument = rest[0].strip() if rest else None
    command = COMMANDS.get(name)
    if command is None:
        raise _unknown(typed)
    if command.refused is not None:
        raise Refused(command.refused, what=name)
    if argument is not None and not command.takes:
        raise Refused("message/command-argument", command=typed, argument=argument)
    return Order(name, argument)


def help_text() -> str:
    """The list of the commands, and the rules of a chat."""
    spelled = {f"{name} {command.takes}".rstrip(): command for name, command in COMMANDS.items()}
    width = max(map(len, spelled)) + 2
    lines = [f"{words:{width}}{command.doc}" for words, command in spelled.items() if command.refused is None]
    return "\n".join(("the commands of a chat", *lines, RULES))


RULES = f"""\
A command with a value shows it when nothing follows; `off` is what is usual.
// begins a message with a slash. Lines between {QUOTES} and {QUOTES} are one message.
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat."""


def _unknown(typed: str) -> Refused:
    offered = [name for name, command in COMMANDS.items() if command.refused is None]
    nearest = near(typed, (*offered, *SAME_AS))
    if nearest is None:
        return Refused("message/unknown-command", command=typed)
    return Refused("message/misspelt-command", command=typed, nearest=nearest)
