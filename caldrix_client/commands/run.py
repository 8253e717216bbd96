"""`caldrix run`: open a model, then answer one prompt or chat."""

from __future__ import annotations

import os

from caldrix_client import slash
from caldrix_client.answer import Speaker
from caldrix_client.channel import Channel, exchange
from caldrix_client.connect import connect
from caldrix_client.context import Context
from caldrix_client.conversation import Conversation, Packed, pack_raw
from caldrix_client.environment import absolute, for_request, require_text
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.parse import Run
from caldrix_client.terminal import Terminal
from caldrix_protocol.messages import Open, Opened
from caldrix_protocol.refusals import INTERRUPTED, MESSAGE, Refused, sentence

MAX_SYSTEM_FILE = 8 << 20


def execute(command: Run, context: Context) -> int:
    """Status 0, or 130 after Ctrl-C; 1 when a line of piped input could not be answered. Raises Refused."""
    if command.plain:
        context.terminal.be_plain()
    request = Open(
        _model(command.model),
        for_request(context.environment),
        backend=command.backend,
        ctx=command.bounded_ctx,
        dtype=command.dtype,
        threads=command.threads or 0,
        max_batch=command.max_batch or 8,
        cpu_isa=command.cpu_isa or "native",
        cpu_kernels=command.cpu_kernels or "auto",
    )
    system = None if command.system is None else _system(command.system)
    with connect(context.environment, context.started) as channel:
        speaker = Speaker(channel, _open(channel, request, context.terminal), command, context.terminal)
        if command.draft_model is not None:
            context.terminal.say(sentence("notice/no-speculation", draft=command.draft_model))
        _say_what_is_missing(speaker)
        conversation = Conversation(system)
        if command.prompt is None:
            return _chat(speaker, conversation)
        answer = speaker.answer(_packed(speaker, conversation, command.prompt))
        return INTERRUPTED if answer.interrupted else 0


def _chat(speaker: Speaker, conversation: Conversation) -> int:
    """Answer line by line until the input ends. A message that is refused does not end it."""
    terminal = speaker.terminal
    refused_any = False
    while True:
        try:
            line = _next_line(terminal)
            if line is None:
                return 1 if refused_any and not terminal.interactive else 0
            _take(line, speaker, conversation)
        except Refused as refused:
            if refused.kind != MESSAGE:
                raise
            terminal.say(refused.text)
            refused_any = True


def _next_line(terminal: Terminal) -> str | None:
    """None when the user leaves: at the end of input, or with Ctrl-C at the prompt."""
    try:
        return terminal.ask()
    except EOFError:
        pass
    except KeyboardInterrupt:
        if not terminal.interactive:
            raise
    if terminal.interactive:
        terminal.leave()
    return None


def _take(line: str, speaker: Speaker, conversation: Conversation) -> None:
    """Obey or answer one line of a chat; an empty one is nothing."""
    match slash.parse(line):
        case slash.Reset():
            conversation.clear()
            speaker.terminal.say(sentence("status/chat-reset"))
        case slash.Help():
            speaker.terminal.say(slash.HELP)
        case None if line.strip():
            answer = speaker.answer(_packed(speaker, conversation, line))
            conversation.drop(answer.done.dropped_turns)
            conversation.keep(line, answer.text)
            if answer.interrupted and not speaker.terminal.interactive:
                raise KeyboardInterrupt


def _packed(speaker: Speaker, conversation: Conversation, text: str) -> Packed:
    return pack_raw(text) if speaker.plain_text else conversation.pack(text)


def _open(channel: Channel, request: Open, terminal: Terminal) -> Opened:
    """Raises Refused, or KeyboardInterrupt when the user stopped the loading."""
    opened = None
    with Interrupts() as interrupts:
        try:
            for event in exchange(channel, request, interrupts):
                if type(event) is Opened:
                    opened = event
                else:
                    show(event, terminal)
        except Refused:
            if not interrupts.count:
                raise
        if interrupts.count:
            raise KeyboardInterrupt
    if opened is None:
        raise Refused("daemon/bad-frame", reason="done without opened")
    return opened


def _say_what_is_missing(speaker: Speaker) -> None:
    if speaker.opened.chat_template or speaker.command.raw:
        return
    speaker.terminal.say(sentence("notice/no-template"))
    if speaker.command.system is not None:
        speaker.terminal.say(sentence("notice/no-system"))


def _model(argument: str) -> str:
    """What the daemon is asked for: a directory by its absolute path, anything else as it was given."""
    require_text("the model argument", argument)
    if os.path.isdir(argument):
        return absolute(argument)
    if argument.startswith(("./", "../", "/", "~")):
        raise Refused("model/no-such-directory", path=argument)
    return argument


def _system(argument: str) -> str:
    """The system message: the argument, or after `@` a file, whose last newline does not count."""
    if not argument.startswith("@"):
        return argument
    if argument.startswith("@@"):
        return argument[1:]
    path = argument[1:]
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SYSTEM_FILE + 1)
    except OSError as error:
        raise Refused("usage/system-file", path=path, reason=error.strerror) from None
    if len(data) > MAX_SYSTEM_FILE:
        raise Refused("usage/system-file", path=path, reason=f"over {MAX_SYSTEM_FILE} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Refused("usage/prompt-utf8", what=path) from None
