"""What is entered in a chat: a message, or a line that begins with `/`, which is a command to the client.

A message of several lines and the content of a block are never a command.
"""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.blocks import QUOTES, content
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
    "/reset": Command("", "clear the conversation; the system message and the sampling stay"),
    "/undo": Command("", "take the last message and its answer back"),
    "/regen": Command("", "answer the last message again"),
    "/system": Command("TEXT|@FILE", "the system message from the next message on"),
    "/context": Command("", "how full the context is"),
    "/temperature": Command("T", "sample at this temperature"),
    "/top-k": Command("N", "keep only the N most likely tokens"),
    "/top-p": Command("P", "keep the most likely tokens whose probability adds up to P"),
    "/min-p": Command("M", "drop tokens below M times the most likely one's probability"),
    "/repetition-penalty": Command("R", "make the last 64 tokens less likely"),
    "/seed": Command("N", "seed the random draw"),
    "/sampling": Command("", "show all six of these"),
    "/image": Command("PATH", "", "usage/not-available"),
    "/help": Command("", "show this list"),
    "/quit": Command("", "end the chat, as Ctrl-D does; /exit does it too"),
}

SAME_AS = {"/exit": "/quit"}


def parse(entered: str) -> Say | Order:
    """What was entered. Raises Refused for a line that begins with `/` and is no command."""
    block = content(entered)
    if block is not None:
        return Say(block)
    if not entered.startswith("/") or "\n" in entered:
        return Say(entered)
    if entered.startswith("//"):
        return Say(entered[1:])
    name, *rest = entered.split(None, 1)
    name = SAME_AS.get(name, name)
    argument = rest[0].strip() if rest else None
    command = COMMANDS.get(name)
    if command is None:
        raise Refused("message/unknown-command", command=name, nearest=_nearest(name))
    if command.refused is not None:
        raise Refused(command.refused, what=name)
    if argument is not None and not command.takes:
        raise Refused("message/command-argument", command=name, argument=argument)
    return Order(name, argument)


def help_text() -> str:
    """The list of the commands, and the rules of a chat."""
    spelled = {f"{name} {command.takes}".rstrip(): command for name, command in COMMANDS.items()}
    width = max(map(len, spelled)) + 2
    lines = [f"{words:{width}}{command.doc}" for words, command in spelled.items() if command.refused is None]
    return "\n".join(("the commands of a chat", *lines, RULES))


RULES = f"""\
A command with a value takes `off` to go back to what is usual, and shows the value when nothing follows it.
// begins a message with a slash. Lines between {QUOTES} and {QUOTES} are one message.
Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D ends the chat."""


def _nearest(name: str) -> str:
    from difflib import get_close_matches  # only for a mistake: it costs more than this module

    offered = [known for known, command in COMMANDS.items() if command.refused is None]
    return (get_close_matches(name.lower(), offered, 1, 0.5) or ["/help"])[0]
