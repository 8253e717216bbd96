"""`caldrix help`: the commands, and the flags from their records."""

from __future__ import annotations

import textwrap

from caldrix_client.context import Context
from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of

USAGE = """\
caldrix runs language models on your own machine.

  caldrix run <model> [flags]     chat with a model, or answer one prompt with -p
  caldrix ps                      list the models that are loaded
  caldrix stop [model|--daemon]   unload one model or all of them, or end caldrixd too
  caldrix doctor                  show which lanes can run here, and why the others cannot
  caldrix version                 print the version
  caldrix help                    print this text

<model> is a directory with config.json, tokenizer.json and *.safetensors, or `demo`. It comes first; flags
follow it, as `--flag value` or `--flag=value`. The answer goes to stdout, everything else to stderr.
"""
CHAT = """
In a chat, /reset clears the conversation, /help lists the commands, Ctrl-C stops an answer, and Ctrl-C or
Ctrl-D at the prompt ends the chat.

Exit status: 0 answered; 1 refused or failed, with the reason on stderr; 2 a mistake in the command line;
130 interrupted with Ctrl-C."""
INDENT = 6
# Title -> the command whose records follow it.
FLAGS = {"caldrix run": "run", "caldrix stop": "stop", "caldrixd, the daemon": "caldrixd"}


def execute(context: Context) -> int:
    lists = [_list(title, command) for title, command in FLAGS.items()]
    context.terminal.result("\n".join((USAGE, *lists)) + CHAT)
    return 0


def _list(title: str, command: str) -> str:
    flags = [_entry(option) for option in options_of(command) if is_accepted(option)]
    return "\n".join((f"Flags of {title}:", *flags)) + "\n"


def _entry(option: Option) -> str:
    spelled = ", ".join((*option.aliases, option.name))
    value = "" if option.metavar is None else f" {option.metavar}"
    default = "" if option.metavar is None else f" [{option.absent}]"
    text = textwrap.fill(
        option.doc + default, 100, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
    )
    return f"  {spelled}{value}\n{text}"
