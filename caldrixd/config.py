"""What the daemon was told: by its arguments, and by its environment, which is read here only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.address import Address, cache_directory, find_address
from caldrix_protocol.environment import INHERITED
from caldrix_protocol.version import VERSION


@dataclass(frozen=True)
class Activation:
    """What a service manager handed over: how many sockets it opened for us, and where it listens for news.

    `watchdog_seconds` 0 means that it expects no sign of life.
    """

    sockets: int = 0
    notify: str = ""
    watchdog_seconds: float = 0.0


@dataclass(frozen=True)
class Config:
    """Seconds and bytes, unless said otherwise. `environment` is what child processes get.

    `build` is the code this daemon runs, see find_build.
    """

    address: Address
    cache_directory: Path
    environment: Mapping[str, str]
    idle_unload: float
    build: str = VERSION
    activation: Activation = Activation()
    drain_seconds: float = 10.0
    socket_check_seconds: float = 5.0
    frame_seconds: float = 30.0
    client_queue: int = 4 << 20
    fetch_seconds: float = 30.0  # how long a host may be silent in a download


def read(
    environment: Mapping[str, str], *, uid: int, pid: int, idle_unload: float, build: str = VERSION
) -> Config:
    """The configuration of the process `pid` of user `uid`. Refused "socket/...", see find_address."""
    return Config(
        address=find_address(environment, uid),
        cache_directory=Path(cache_directory(environment)),
        environment={name: environment[name] for name in INHERITED if name in environment},
        activation=_activation(environment, pid),
        idle_unload=idle_unload,
        build=build,
    )


def _activation(environment: Mapping[str, str], pid: int) -> Activation:
    """The variables of sd_listen_fds(3) and sd_notify(3), as far as they are meant for `pid`."""
    ours = environment.get("LISTEN_PID") == str(pid)
    watched = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    return Activation(
        sockets=_number(environment.get("LISTEN_FDS")) if ours else 0,
        notify=environment.get("NOTIFY_SOCKET", ""),
        watchdog_seconds=_number(environment.get("WATCHDOG_USEC")) / 1e6 if watched else 0.0,
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0
