"""`caldrix doctor`: what each lane can do on this machine."""

from __future__ import annotations

from caldrix_client.channel import exchange
from caldrix_client.connect import connect
from caldrix_client.context import Context
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_protocol.messages import Doctor, Lane
from caldrix_protocol.refusals import Refused


def execute(context: Context) -> int:
    """One line per lane. Raises Refused (lane/none-usable) after them when no lane is usable."""
    lanes: list[Lane] = []
    with (
        connect(context.environment, context.started, outdated=context.outdated) as channel,
        Interrupts() as interrupts,
    ):
        for event in exchange(channel, Doctor(), interrupts):
            if type(event) is Lane:
                lanes.append(event)
                context.terminal.result(_line(event))
            else:
                show(event, context.terminal)
        if interrupts.count:
            raise KeyboardInterrupt
    if not any(lane.usable for lane in lanes):
        reasons = "\n".join(f"{lane.name}: {'; '.join(lane.reasons)}" for lane in lanes)
        raise Refused("lane/none-usable", reasons=reasons)
    return 0


def _line(lane: Lane) -> str:
    verdict = "usable" if lane.usable else "no"
    said = lane.details if lane.usable else lane.reasons
    parts = [f"{lane.name}: {verdict}" + (f" ({'; '.join(said)})" if said else "")]
    parts.append(f"images on {lane.name}: {'yes' if lane.images else 'no'}")
    parts.append(f"speculation={'yes' if lane.speculation else 'no'}")
    return "; ".join(parts)
