"""Every connection that a process of caldrix tries, whatever comes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from tests.support.cli import IMPORTS

# Python runs it at the start of each process that finds it, and the path to it is handed down to all.
_HOOK = """
import json, os, sys

def tell(event, what):
    line = json.dumps([event, sys.orig_argv, what]) + "\\n"
    descriptor = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def hook(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if isinstance(arguments[-1], tuple):  # a path is an address on this machine
            tell(event, str(arguments[-1]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        tell(event, str(arguments[0]))

tell("start", "")
sys.addaudithook(hook)
"""


class Tried(NamedTuple):
    """One try: "socket.connect" or the look-up of a name, the command line of who tried, and the address."""

    event: str
    command: tuple[str, ...]
    address: str


class Sockets:
    """A record of what the processes do that have `environment`."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "sockets"
        hooks = directory / "hooks"
        hooks.mkdir()
        (hooks / "sitecustomize.py").write_text(_HOOK.format(log=str(self._log)))
        self.environment = {"PYTHONPATH": os.pathsep.join((str(hooks), IMPORTS))}

    def _read(self) -> list[Tried]:
        rows = map(json.loads, self._log.read_text().splitlines())
        return [Tried(event, tuple(command), address) for event, command, address in rows]

    def tried(self) -> list[Tried]:
        return [row for row in self._read() if row.event != "start"]

    def watched(self, module: str) -> bool:
        """Whether a process of a module was recorded at all."""
        return any(module in row.command for row in self._read())
