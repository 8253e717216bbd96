"""`caldrix help`: the commands, and the flags from their records."""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.context import Context
from caldrix_client.parse import Help, unknown
from caldrix_protocol.usage import list_flags


class Command(NamedTuple):
    """How a command is written after its name, and what it does."""

    spelled: str
    doc: str


COMMANDS: dict[str, Command] = {
    "run": Command("<model> [flags]", "chat with a model, or answer one prompt with -p"),
    "pull": Command("<model> [flags]", "download a model for later"),
    "models": Command("list|plan|rm|pin", "list models, say what one would need, remove one, pin the aliases"),
    "ps": Command("", "list the models that are loaded"),
    "stop": Command("[model|--daemon]", "unload one model or all of them, or end caldrixd too"),
    "doctor": Command("", "show which lanes can run here, and why the others cannot"),
    "completion": Command("bash|zsh|fish", "print what lets this shell complete command lines"),
    "version": Command("", "print the version"),
    "help": Command("[command]", "print this text, or the part of one command"),
}
USAGE = "caldrix runs language models on your own machine."
MODEL = """\
<model> is a directory with config.json, tokenizer.json and *.safetensors; `demo`; or a repo of the Hugging
Face hub as owner/name, owner/name@revision or an alias (`caldrix models list` shows those). It comes first;
flags follow it, as `--flag value` or `--flag=value`."""
CHAT = """\
The answer goes to stdout, everything else to stderr.

In a chat, /help lists the commands, Ctrl-C stops an answer, and Ctrl-C or Ctrl-D at the prompt ends the chat.

Exit status: 0 answered; 1 refused or failed, with the reason on stderr; 2 a mistake in the command line;
129 its terminal was closed; 130 interrupted with Ctrl-C; 141 nobody reads the answer; 143 SIGTERM."""
WIDTH = 32  # of a command as it is written, in the list of them
PROGRAM = "caldrixd"
# Topic -> title -> the command whose records follow it.
FLAGS = {
    "run": {"caldrix run": "run"},
    "pull": {"caldrix pull": "pull"},
    "models": {"caldrix models plan": "models plan", "caldrix models rm": "models rm"},
    "stop": {"caldrix stop": "stop"},
    PROGRAM: {"caldrixd, the daemon": "caldrixd"},
}
# What is said of a topic before its flags, and after them.
BEFORE = {"run": [MODEL], "pull": [MODEL], "models": [MODEL]}
AFTER = {"run": [CHAT]}


def execute(command: Help, context: Context) -> int:
    """Raises Refused (usage/unknown-command, usage/misspelt-command) for a topic that is no command."""
    context.terminal.result("\n\n".join(_all() if command.topic is None else _of(command.topic)))
    return 0


def _all() -> list[str]:
    lists = [list_flags(title, name) for titles in FLAGS.values() for title, name in titles.items()]
    return [USAGE, _commands(), MODEL, *lists, CHAT]


def _of(topic: str) -> list[str]:
    names = (*COMMANDS, PROGRAM)
    if topic not in names:
        raise unknown(topic, names)
    command = COMMANDS.get(topic)
    head = [] if command is None else [f"{_written(topic, command)}: {command.doc}"]
    lists = [list_flags(title, name) for title, name in FLAGS.get(topic, {}).items()]
    return [*head, *BEFORE.get(topic, ()), *lists, *AFTER.get(topic, ())]


def _written(name: str, command: Command) -> str:
    return f"caldrix {name} {command.spelled}".rstrip()


def _commands() -> str:
    written = {_written(name, command): command.doc for name, command in COMMANDS.items()}
    return "\n".join(f"  {line:{WIDTH}}  {doc}" for line, doc in written.items())
