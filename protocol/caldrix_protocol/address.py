"""Where the socket, the state and the caches of one user are. Client and daemon both ask here, so they agree.

It looks at directories and makes them, as no other module of this package does (`build` only looks). It
imports the standard library only, because it is on the path of every warm run.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import NamedTuple

from caldrix_protocol.refusals import Refused

USUAL_PARENT = "/run/user"
SOCKET_PATH_LIMIT = {"linux": 107, "darwin": 103}  # bytes that fit sun_path with its NUL
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SHARED = stat.S_IRWXG | stat.S_IRWXO


class Address(NamedTuple):
    """Absolute paths of one user's daemon. A living daemon holds `lock`, its starter `start_lock`."""

    directory: str
    socket: str
    lock: str
    start_lock: str


def find_address(environment: Mapping[str, str], uid: int, platform: str = sys.platform) -> Address:
    """The address for this user: in XDG_RUNTIME_DIR, else /run/user/UID (Linux), else under the state home.

    An XDG_RUNTIME_DIR that is relative or does not exist counts as unset. Creates nothing. Raises Refused
    (socket/...) for a directory that others own or can write to, and for a path too long for a socket.
    """
    directory = _runtime_directory(environment, uid, platform)
    address = Address(
        directory,
        os.path.join(directory, "caldrixd.sock"),
        os.path.join(directory, "caldrixd.lock"),
        os.path.join(directory, "start.lock"),
    )
    limit = SOCKET_PATH_LIMIT.get(platform, 103)
    length = len(os.fsencode(address.socket))
    if length > limit:
        raise Refused("socket/path-too-long", path=address.socket, length=length, limit=limit)
    if os.path.lexists(directory):
        _check_private(directory, uid)
    return address


def ensure_directory(address: Address) -> None:
    """Make the runtime directory (mode 0700) or check the one that is there. Raises Refused (socket/...)."""
    try:
        os.makedirs(os.path.dirname(address.directory), mode=0o700, exist_ok=True)
        os.mkdir(address.directory, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise Refused("socket/directory-missing", path=address.directory, reason=error.strerror) from None
    _check_private(address.directory, os.geteuid())


def state_directory(environment: Mapping[str, str]) -> str:
    """Where the log lives: XDG_STATE_HOME/caldrix, else ~/.local/state/caldrix. Not created."""
    return _home_directory(environment, "XDG_STATE_HOME", ".local/state")


def cache_directory(environment: Mapping[str, str]) -> str:
    """Where models and compiled kernels live: XDG_CACHE_HOME/caldrix, else ~/.cache/caldrix. Not created."""
    return _home_directory(environment, "XDG_CACHE_HOME", ".cache")


def _runtime_directory(environment: Mapping[str, str], uid: int, platform: str) -> str:
    named = environment.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(named) and (found := _status(named)) is not None:
        if not stat.S_ISDIR(found.st_mode):
            raise Refused("socket/directory-link", path=named)
        if found.st_uid != uid:
            raise Refused("socket/directory-owner", path=named)
        if found.st_mode & _SHARED_WRITE:
            raise Refused("socket/directory-mode", path=named)
        return os.path.join(named, "caldrix")
    if platform == "linux":
        usual = os.path.join(USUAL_PARENT, str(uid))
        found = _status(usual)
        if (
            found is not None
            and stat.S_ISDIR(found.st_mode)
            and found.st_uid == uid
            and not found.st_mode & _SHARED
        ):
            return os.path.join(usual, "caldrix")
    return os.path.join(state_directory(environment), "run")


def _status(path: str) -> os.stat_result | None:
    """The directory a path leads to, links followed; None if it leads nowhere we can see."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _check_private(directory: str, uid: int) -> None:
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise Refused("socket/directory-missing", path=directory, reason=error.strerror) from None
    if not stat.S_ISDIR(found.st_mode):
        raise Refused("socket/directory-link", path=directory)
    if found.st_uid != uid:
        raise Refused("socket/directory-owner", path=directory)
    if found.st_mode & _SHARED:
        raise Refused("socket/directory-mode", path=directory)


def _home_directory(environment: Mapping[str, str], variable: str, below_home: str) -> str:
    named = environment.get(variable, "")
    if os.path.isabs(named):
        return os.path.join(named, "caldrix")
    return os.path.join(_home(environment), below_home, "caldrix")


def _home(environment: Mapping[str, str]) -> str:
    named = environment.get("HOME", "")
    if os.path.isabs(named):
        return named
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise Refused("socket/no-home") from None
