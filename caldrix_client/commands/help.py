"""`caldrix help`: the commands, and the flags from their records."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from caldrix_client.context import Context
from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of


class Command(NamedTuple):
    """How a command is written after its name, and what it does."""

    spelled: str
    doc: str


COMMANDS: dict[str, Command] = {
    "run": Command("<model> [flags]", "chat with a model, or answer one prompt with -p"),
    "pull": Command("<model> [flags]", "download a model for later"),
    "models": Command("list|plan|rm|pin", "list models, say what one would need, remove one from the cache"),
    "ps": Command("", "list the models that are loaded"),
    "stop": Command("[model|--daemon]", "unload one model or all of them, or end caldrixd too"),
    "doctor": Command("", "show which lanes can run here, and why the others cannot"),
    "completion": Command("bash|zsh|fish", "print what lets this shell complete command lines"),
    "version": Command("", "print the version"),
    "help": Command("", "print this text"),
}
USAGE = "caldrix runs language models on your own machine."
MODEL = """\
<model> is a directory with config.json, tokenizer.json and *.safetensors, or `demo`. It comes first; flags
follow it, as `--flag value` or `--flag=value`. The answer goes to stdout, everything else to stderr."""
CHAT = """\
In a chat, /help lists the commands, Ctrl-C stops an answer, and Ctrl-C or Ctrl-D at the prompt ends the chat.

Exit status: 0 answered; 1 refused or failed, with the reason on stderr; 2 a mistake in the command line;
130 interrupted with Ctrl-C; 141 nobody reads the answer; 143 ended by SIGTERM."""
WIDTH = 32  # of a command as it is written, in the list of them
INDENT = 6
# Title -> the command whose records follow it.
FLAGS = {
    "caldrix run": "run",
    "caldrix models plan": "models plan",
    "caldrix models rm": "models rm",
    "caldrix stop": "stop",
    "caldrixd, the daemon": "caldrixd",
}


def execute(context: Context) -> int:
    lists = [_list(title, command) for title, command in FLAGS.items()]
    context.terminal.result("\n\n".join((USAGE, _commands(), MODEL, *lists, CHAT)))
    return 0


def _commands() -> str:
    written = {f"caldrix {name} {command.spelled}": command.doc for name, command in COMMANDS.items()}
    return "\n".join(f"  {line:{WIDTH}}  {doc}" for line, doc in written.items())


def _list(title: str, command: str) -> str:
    flags = [_entry(option) for option in options_of(command) if is_accepted(option)]
    return "\n".join((f"Flags of {title}:", *flags))


def _entry(option: Option) -> str:
    spelled = ", ".join((*option.aliases, option.name))
    value = "" if option.metavar is None else f" {option.metavar}"
    default = "" if option.metavar is None else f" [{option.absent}]"
    text = textwrap.fill(
        option.doc + default, 100, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
    )
    return f"  {spelled}{value}\n{text}"
