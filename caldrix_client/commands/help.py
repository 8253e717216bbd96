"""`caldrix help`: the commands, and the flags from their records."""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.context import Context
from caldrix_client.parse import Help, unknown, unknown_of_models
from caldrix_protocol.refusals import Refused
from caldrix_protocol.usage import list_flags


class Command(NamedTuple):
    """How a command is written after its name, and what it does."""

    spelled: str
    doc: str


COMMANDS: dict[str, Command] = {
    "run": Command("<model> [flags]", "chat with a model, or answer a prompt (-p)"),
    "pull": Command("<model> [flags]", "download a model for later"),
    "models": Command("[list|plan|rm|pin]", "list models, see what one needs, remove it"),
    "ps": Command("", "list the models that are loaded"),
    "stop": Command("[model|--daemon]", "unload one model or all, or end caldrixd"),
    "doctor": Command("", "show which lanes can run here, or why not"),
    "completion": Command("bash|zsh|fish", "print the completion script of a shell"),
    "version": Command("", "print the version"),
    "help": Command("[command]", "print this text, or that of one command"),
}
MODELS: dict[str, Command] = {
    "models list": Command("", "list aliases and the cache (the default)"),
    "models plan": Command("<model> [flags]", "say what a model needs, and if it fits"),
    "models rm": Command("<model> [flags]", "remove a model from the cache"),
    "models pin": Command("", "pin the aliases of a source checkout"),
}
USAGE = "caldrix runs language models on your own machine."
MODEL = """\
<model> is a directory with config.json, tokenizer.json and *.safetensors;
`demo`; or a repo of the Hugging Face hub as owner/name, owner/name@revision or
an alias (`caldrix models list` shows those). It comes first; flags follow it,
as `--flag value` or `--flag=value`."""
CHAT = """\
The answer goes to stdout, everything else to stderr.

In a chat, /help lists the commands, Ctrl-C stops an answer, and Ctrl-C or
Ctrl-D at the prompt ends the chat.

Exit status: 0 answered; 1 refused or failed, with the reason on stderr; 2 a
mistake in the command line; 129 its terminal was closed; 130 interrupted with
Ctrl-C; 141 nobody reads the answer; 143 SIGTERM."""
PROGRAM = "caldrixd"
TOPICS = (*COMMANDS, *MODELS, PROGRAM)
# Whose flags are listed, and under which title.
FLAGS = {
    **{name: f"caldrix {name}" for name in ("run", "pull", "models plan", "models rm", "stop")},
    PROGRAM: "caldrixd, the daemon",
}
OF_A_MODEL = ("run", "pull", "models", "models plan", "models rm")


def execute(command: Help, context: Context) -> int:
    """Raises Refused (usage/unknown-command, usage/misspelt-command, usage/models-command,
    usage/takes-no-arguments) for a topic that is no command.
    """
    context.terminal.result("\n\n".join(_all() if command.topic is None else _of(command.topic)))
    return 0


def flags_of(topic: str) -> list[str]:
    """Those of FLAGS that a topic is about: itself, and what begins with its name."""
    return [name for name in FLAGS if f"{name} ".startswith(f"{topic} ")]


def _all() -> list[str]:
    return [USAGE, _listed(COMMANDS), MODEL, *_lists(list(FLAGS)), CHAT]


def _of(topic: str) -> list[str]:
    if topic not in TOPICS:
        raise _unknown(topic)
    command = {**COMMANDS, **MODELS}.get(topic)
    parts = [] if command is None else [f"{_written(topic, command)}: {command.doc}"]
    if topic == "models":
        parts.append(_listed(MODELS))
    if topic in OF_A_MODEL:
        parts.append(MODEL)
    parts += _lists(flags_of(topic))
    return [*parts, CHAT] if topic == "run" else parts


def _unknown(topic: str) -> Refused:
    known = max((name for name in TOPICS if topic.startswith(f"{name} ")), key=len, default=None)
    if known is None:
        return unknown(topic, TOPICS)
    rest = topic.removeprefix(f"{known} ")
    if known == "models":
        return unknown_of_models(rest)
    return Refused("usage/takes-no-arguments", command=f"help {known}", argument=rest)


def _lists(names: list[str]) -> list[str]:
    return [list_flags(FLAGS[name], name) for name in names]


def _written(name: str, command: Command) -> str:
    return f"caldrix {name} {command.spelled}".rstrip()


def _listed(commands: dict[str, Command]) -> str:
    written = {_written(name, command): command.doc for name, command in commands.items()}
    width = max(map(len, written))
    return "\n".join(f"  {line:{width}}  {doc}" for line, doc in written.items())
