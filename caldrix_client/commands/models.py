"""`caldrix models`: what has a name, what a model would need, and what the cache holds."""

from __future__ import annotations

import os
from collections.abc import Iterator

from caldrix_client.channel import exchange
from caldrix_client.connect import connect
from caldrix_client.context import Context
from caldrix_client.environment import for_request, model_argument
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.parse import Models as Command
from caldrix_client.parse import load_fields, raise_unless_bounded
from caldrix_client.terminal import safe
from caldrix_protocol.messages import Known, Message, Models, Pin, Plan, Removal, Remove, Verdict
from caldrix_protocol.refusals import Refused, sentence
from caldrix_protocol.sizes import size

LIST_TITLES = ("ALIAS", "REPO", "REVISION", "CACHE", "LICENCE")
PIN_TITLES = ("ALIAS", "REPO", "COMMIT")
COMMIT_LENGTH = 40
SHORT = 12  # digits of a commit
YES = ("y", "yes")


def execute(command: Command, context: Context) -> int:
    """Status 0. Raises Refused, also for a plan of a model that does not fit."""
    {"list": _list, "plan": _plan, "rm": _remove, "pin": _pin}[command.action](command, context)
    return 0


def _ask(request: Message, context: Context) -> Iterator[Message]:
    """The events of a request that are not shown as they come."""
    with (
        connect(context.environment, context.started, outdated=context.outdated) as channel,
        Interrupts() as interrupts,
    ):
        for event in exchange(channel, request, interrupts):
            show(event, context.terminal)
            yield event
        if interrupts.count:
            raise KeyboardInterrupt


def _list(command: Command, context: Context) -> None:
    rows: list[tuple[str, ...]] = [LIST_TITLES]
    for event in _ask(Models(for_request(context.environment)), context):
        if type(event) is Known:
            rows.append(_row(event))
    context.terminal.result(table(rows))


def _row(known: Known) -> tuple[str, ...]:
    pinned = len(known.revision) == COMMIT_LENGTH
    revision = known.revision[:SHORT] if pinned else known.revision
    if known.alias and revision and not pinned:
        revision += " (unpinned)"
    held = f"{known.size / 1e6:.0f} MB" if known.size else "-"
    if known.state == "part":
        held += " (incomplete)"
    return known.alias or "-", known.repo, revision or "-", held, known.licence or "-"


def _pin(command: Command, context: Context) -> None:
    rows: list[tuple[str, ...]] = [PIN_TITLES]
    try:
        for event in _ask(Pin(for_request(context.environment)), context):
            if type(event) is Known:
                rows.append((event.alias, event.repo, event.revision))
    finally:
        if len(rows) > 1:
            context.terminal.result(table(rows))


def _plan(command: Command, context: Context) -> None:
    model, environment = model_argument(command.model), for_request(context.environment)
    request = Plan(model, environment, **load_fields(command))
    try:
        _show_verdict(request, context)
    except Refused as refused:
        raise_unless_bounded(refused, command)
        _show_verdict(request._replace(ctx=None), context)


def _show_verdict(request: Plan, context: Context) -> None:
    for event in _ask(request, context):
        if type(event) is Verdict:
            context.terminal.result(table(_figures(event)))


def _figures(verdict: Verdict) -> list[tuple[str, ...]]:
    """The sum first, then its parts."""
    fits = "fits" if verdict.needed <= verdict.free else "does not fit"
    longest = f"the largest that would fit is {verdict.largest_ctx}" if verdict.largest_ctx else "none fits"
    return [
        ("verdict", fits, f"on the {verdict.lane} lane"),
        ("context", f"{verdict.ctx} tokens", longest),
        ("memory", size(verdict.needed), f"{size(verdict.free)} are free"),
        ("  at once", size(verdict.together), _conversations(verdict.max_batch)),
        ("  weights", size(verdict.weights), "as the lane holds them"),
        ("  state", size(verdict.state), "of a full context"),
        ("  buffers", size(verdict.activations), "of a step"),
        ("  loading", size(verdict.passing), "before state and buffers, in their place"),
        ("  vocabulary", size(verdict.vocabulary), ""),
        ("  process", size(verdict.process), "of a worker without a model, and its encoder"),
        ("disk", size(verdict.disk), f"to come; {size(verdict.free_disk)} are free"),
    ]


def _conversations(count: int) -> str:
    return f"for {count} conversation{'' if count == 1 else 's, each with a full context'}"


def _remove(command: Command, context: Context) -> None:
    model, environment = model_argument(command.model), for_request(context.environment)
    terminal = context.terminal
    if not command.yes and not terminal.interactive:
        raise Refused("usage/no-terminal")
    found = _removal(Remove(model, environment), context)
    held = round(found.size / 1e6)
    if not command.yes:
        terminal.say(sentence(_removal_code(found.path), model=model, path=found.path, size=held))
        if not _confirmed(context):
            terminal.say(sentence("status/kept", model=model))
            return
    _removal(Remove(model, environment, really=True), context)
    terminal.say(sentence("status/removed", model=model, size=held))


def _removal_code(path: str) -> str:
    """The hub's library names a repo's directory so; any other is of the demo model, which has one form."""
    return "status/removal" if os.path.basename(path).startswith("models--") else "status/removal-demo"


def _confirmed(context: Context) -> bool:
    context.terminal.say(sentence("status/confirm"))
    try:
        return context.terminal.ask().strip().lower() in YES
    except EOFError:
        return False


def _removal(request: Remove, context: Context) -> Removal:
    found = [event for event in _ask(request, context) if type(event) is Removal]
    if not found:
        raise Refused("daemon/bad-frame", reason="done without removal")
    return found[0]


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell. No cell breaks its line."""
    shown = [[safe(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    return "\n".join(line.rstrip() for line in lines)
