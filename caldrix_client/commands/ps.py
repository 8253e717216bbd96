"""`caldrix ps`: the models caldrixd holds."""

from __future__ import annotations

from caldrix_client.channel import exchange
from caldrix_client.connect import attach
from caldrix_client.context import Context
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.terminal import safe
from caldrix_protocol.messages import Loaded, Ps
from caldrix_protocol.refusals import sentence

TITLES = ("MODEL", "LANE", "STATE", "PID", "SIZE", "CLIENTS", "IDLE")


def execute(context: Context) -> int:
    """A table with one row per model. Without a daemon no model is loaded; none is started to say so."""
    channel = attach(context.environment)
    if channel is None:
        context.terminal.say(sentence("daemon/not-running"))
        return 0
    rows: list[tuple[str, ...]] = [TITLES]
    with channel, Interrupts() as interrupts:
        for event in exchange(channel, Ps(), interrupts):
            if type(event) is Loaded:
                rows.append(_row(event))
            else:
                show(event, context.terminal)
        if interrupts.count:
            raise KeyboardInterrupt
    context.terminal.result(_table(rows))
    return 0


def _row(model: Loaded) -> tuple[str, ...]:
    return (
        safe(model.model).replace("\n", "\\n"),
        f"{model.lane} {model.variant}".rstrip(),
        model.state,
        str(model.pid),
        f"{model.size / 1e6:.0f} MB",
        str(model.leases),
        f"{model.idle_seconds:.0f} s",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
