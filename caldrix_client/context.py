"""What every command gets beside its own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from caldrix_client.terminal import Terminal
from caldrix_protocol.refusals import sentence


class Context(NamedTuple):
    """The user's environment, as main read it, and the terminal."""

    environment: Mapping[str, str]
    terminal: Terminal

    def started(self, pid: int) -> None:
        """Say that this command had to start the daemon."""
        self.terminal.status(sentence("status/daemon-started", pid=pid))

    def outdated(self, pid: int) -> None:
        """Say that the daemon runs other code than this command, and is in use."""
        self.terminal.say(sentence("notice/other-build", pid=pid))
