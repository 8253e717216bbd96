"""The events that look the same in every command."""

from __future__ import annotations

from caldrix_client.terminal import Terminal
from caldrix_protocol.messages import Message, Notice, Progress, Status

ONCE = {"notice/system-in-user"}  # true of every answer of a chat


def show(event: Message, terminal: Terminal) -> None:
    """Print a status, a notice or progress; other events are the caller's."""
    if type(event) is Notice and event.code in ONCE:
        terminal.say_once(event.text)
    elif type(event) is Notice:
        terminal.say(event.text)
    elif type(event) is Status:
        terminal.status(event.text)
    elif type(event) is Progress:
        terminal.progress(event.what, event.done, event.total, event.unit)
