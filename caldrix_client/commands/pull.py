"""`caldrix pull`: fetch a model, or convert it, for later."""

from __future__ import annotations

from caldrix_client.channel import exchange
from caldrix_client.connect import connect
from caldrix_client.context import Context
from caldrix_client.environment import for_request, model_argument
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.parse import Pull as Command
from caldrix_protocol.messages import Pull
from caldrix_protocol.refusals import Refused


def execute(command: Command, context: Context) -> int:
    """Status 0 when the model is complete. Raises Refused, or KeyboardInterrupt."""
    if command.plain:
        context.terminal.be_plain()
    if command.quiet:
        context.terminal.be_quiet()
    request = Pull(model_argument(command.model), for_request(context.environment))
    with (
        connect(context.environment, context.started, outdated=context.outdated) as channel,
        Interrupts() as interrupts,
    ):
        try:
            for event in exchange(channel, request, interrupts):
                show(event, context.terminal)
        except Refused:
            if not interrupts.count:
                raise
        if interrupts.count:
            raise KeyboardInterrupt
    return 0
