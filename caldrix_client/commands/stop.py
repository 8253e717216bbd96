"""`caldrix stop`: free what caldrixd holds, or end it."""

from __future__ import annotations

import os
import signal

from caldrix_client.channel import Channel, exchange
from caldrix_client.connect import attach, holder
from caldrix_client.context import Context
from caldrix_client.environment import absolute
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.parse import Stop as Command
from caldrix_protocol.address import find_address
from caldrix_protocol.messages import Stop
from caldrix_protocol.refusals import Refused, sentence

# What a daemon says, or does without a word, that was about to end anyway.
ENDING = ("daemon/stopping", "daemon/closed")


def execute(command: Command, context: Context) -> int:
    """Unload a model, all models, or end the daemon. With no daemon only a named model is refused."""
    if command.model == "":
        raise Refused("usage/model-needed", command="stop")
    try:
        channel = attach(context.environment)
    except Refused as refused:
        if command.daemon and refused.code == "daemon/version":
            return _terminate(context, refused)
        raise
    if channel is None:
        if command.model is not None:
            raise Refused("daemon/not-running")
        context.terminal.say(sentence("daemon/not-running"))
        return 0
    with channel:
        try:
            _ask(channel, Stop(_named(command.model), command.daemon), context)
        except Refused as refused:
            if not command.daemon or refused.code not in ENDING:
                raise
    if command.daemon:
        context.terminal.say(sentence("status/daemon-stopped"))
    return 0


def _ask(channel: Channel, request: Stop, context: Context) -> None:
    with Interrupts() as interrupts:
        for event in exchange(channel, request, interrupts):
            show(event, context.terminal)
        if interrupts.count:
            raise KeyboardInterrupt


def _terminate(context: Context, refused: Refused) -> int:
    """End a daemon of another protocol version, which no message can reach."""
    pid = holder(find_address(context.environment, os.geteuid()))
    if not pid:
        raise refused
    os.kill(pid, signal.SIGTERM)
    context.terminal.say(sentence("status/daemon-stopping", pid=pid))
    return 0


def _named(model: str | None) -> str | None:
    """A model as `ps` names it: a directory by its absolute path."""
    if model is not None and (os.path.isdir(model) or model.startswith(("./", "../", "/"))):
        return absolute(model)
    return model
