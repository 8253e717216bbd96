"""`caldrix run`: open a model, then answer one prompt or chat."""

from __future__ import annotations

import os
import signal

from caldrix_client.answer import Speaker
from caldrix_client.channel import Channel, exchange
from caldrix_client.connect import connect
from caldrix_client.context import Context
from caldrix_client.conversation import Conversation
from caldrix_client.environment import for_request, model_argument
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts, heed
from caldrix_client.parse import Run, load_fields, raise_unless_bounded
from caldrix_client.terminal import Terminal
from caldrix_protocol.address import state_directory
from caldrix_protocol.messages import Open, Opened
from caldrix_protocol.refusals import INTERRUPTED, Refused, sentence

STDIN = "-"  # the prompt that stands for standard input


def execute(command: Run, context: Context) -> int:
    """Status 0, or 130 after Ctrl-C; 1 when a line of piped input could not be answered. Raises Refused."""
    heed(signal.SIGTERM)
    if command.plain:
        context.terminal.be_plain()
    if command.quiet:
        context.terminal.be_quiet()
    request = Open(
        model_argument(command.model),
        for_request(context.environment),
        **load_fields(command),
    )
    system = None if command.system is None else _system(command.system)
    prompt = _prompt(command, context.terminal)
    with connect(context.environment, context.started, outdated=context.outdated) as channel:
        opened = _open_bounded(channel, request, command, context.terminal)
        speaker = Speaker(channel, opened, command, context.terminal)
        if command.draft_model is not None:
            context.terminal.say(sentence("notice/no-speculation", draft=command.draft_model))
        _say_what_is_missing(speaker)
        conversation = Conversation(system)
        if prompt is None:
            return _chat(speaker, conversation, context, request)
        answer = speaker.answer(prompt, conversation, command.sampling)
        return INTERRUPTED if answer.interrupted else 0


def _chat(speaker: Speaker, conversation: Conversation, context: Context, request: Open) -> int:
    from caldrix_client.chat import Chat

    def again() -> Speaker:
        channel = connect(context.environment, context.started, outdated=context.outdated)
        opened = _open_bounded(channel, request, speaker.command, context.terminal)
        return speaker._replace(channel=channel, opened=opened)

    unwanted = context.environment.get("CALDRIX_NO_HISTORY", "0") not in ("", "0")
    if context.terminal.interactive and not unwanted and not speaker.command.no_history:
        from caldrix_client.history import History

        context.terminal.remember(History(os.path.join(state_directory(context.environment), "history")))
    context.terminal.hint(sentence("status/chat"))
    return Chat(speaker, conversation, again).run()


def _system(argument: str) -> str:
    from caldrix_client.system_message import system_message

    return system_message(argument)


def _prompt(command: Run, terminal: Terminal) -> str | None:
    """The prompt, read from stdin or with it appended where that was asked for; None for a chat.

    Raises Refused: usage/stdin-empty, usage/prompt-utf8, client/input-too-long.
    """
    if command.prompt != STDIN and not command.stdin:
        return command.prompt
    try:
        text = terminal.read_all().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Refused("usage/prompt-utf8", what="standard input") from None
    if not text:
        raise Refused("usage/stdin-empty", flag="--stdin" if command.stdin else f"-p {STDIN}")
    return f"{command.prompt}\n\n{text}" if command.stdin else text


def _open_bounded(channel: Channel, request: Open, command: Run, terminal: Terminal) -> Opened:
    """Open with a context within --max-context."""
    try:
        return _open(channel, request, terminal)
    except Refused as refused:
        raise_unless_bounded(refused, command)
    return _open(channel, request._replace(ctx=None), terminal)


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
