"""What the limits of this process have to do with a failure, as far as it can be known."""

from __future__ import annotations

import errno
import resource

from caldrix_protocol.refusals import Refused

# Flag of ulimit -> the limit, and the bytes or pieces of its unit.
_LIMITS = {
    "-v": (resource.RLIMIT_AS, 1024),
    "-d": (resource.RLIMIT_DATA, 1024),
    "-u": (resource.RLIMIT_NPROC, 1),
    "-n": (resource.RLIMIT_NOFILE, 1),
}
MEMORY = ("-v", "-d")
_THREAD = 0  # its error has no number
_NO_THREAD = "can't start new thread"
_NO_LIBRARY = "Too many open files"
_NO_FILE = (errno.EMFILE, errno.ENFILE)
# What could not be had, by the system's error, and the limits that may be why.
_CAUSES = {
    errno.EMFILE: ("another open file", ("-n",)),
    errno.ENFILE: ("another open file", ()),
    errno.EAGAIN: ("another process", ("-u",)),
    errno.ENOMEM: ("more memory", MEMORY),
    _THREAD: ("another thread", ("-u", "-v")),
}
OTHERS = "the limits of its service or container"
# The exit status of a process that a limit ended is this and the number of the system's error.
_ENDED = 100


def exhausted(error: BaseException, who: str) -> Refused | None:
    """Refused "daemon/limit" when `error` says that a limit stood in the way of `who`; else None."""
    return _refused(_cause(error), who)


def behind(refused: Refused, who: str) -> Refused:
    """The refusal of the limit that `refused` was made of, or `refused` itself.

    Where no file can be opened any more, what could not be read says nothing about it.
    """
    error: BaseException | None = refused
    while error is not None and _cause(error) not in _NO_FILE:
        error = error.__context__
    return refused if error is None else exhausted(error, who) or refused


def exit_status(error: BaseException) -> int:
    """Of a process that `error` ends; `of_status` knows it where a limit is why."""
    cause = _cause(error)
    return 1 if cause is None or _refused(cause, "") is None else _ENDED + cause


def of_status(status: int, who: str) -> Refused | None:
    """What `exhausted` said in a process with the limits of this one, by its exit status."""
    return _refused(status - _ENDED, who)


def _cause(error: BaseException) -> int | None:
    """A key of _CAUSES."""
    if isinstance(error, BaseExceptionGroup):
        return _cause(error.exceptions[0])
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return _THREAD
    if isinstance(error, OSError) and error.errno in _CAUSES:
        return error.errno
    # The error of a library that cannot be opened has no number.
    unopened = isinstance(error, (ImportError, OSError)) and str(error).endswith(_NO_LIBRARY)
    return errno.EMFILE if unopened else None


def _refused(cause: int | None, who: str) -> Refused | None:
    if cause not in _CAUSES:
        return None
    what, flags = _CAUSES[cause]
    limits = in_force(*flags)
    if flags is MEMORY and not limits:
        return None
    return Refused("daemon/limit", who=who, what=what, limits=limits or OTHERS)


def in_force(*flags: str) -> str:
    """Those limits that are set, as ulimit is told them: "ulimit -v 400000"; empty when none is."""
    values = {flag: resource.getrlimit(_LIMITS[flag][0])[0] // _LIMITS[flag][1] for flag in flags}
    return " and ".join(f"ulimit {flag} {value}" for flag, value in values.items() if value >= 0)
