"""`caldrix version`."""

from __future__ import annotations

from caldrix_client.context import Context
from caldrix_protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, VERSION


def execute(context: Context) -> int:
    context.terminal.result(f"caldrix {VERSION} (protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR})")
    return 0
