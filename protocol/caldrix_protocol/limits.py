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
# What could not be had, and the limits that may be why.
_CAUSES = {
    errno.EMFILE: ("another open file", ("-n",)),
    errno.ENFILE: ("another open file", ()),
    errno.EAGAIN: ("another process", ("-u",)),
    errno.ENOMEM: ("more memory", MEMORY),
}
_NO_THREAD = "can't start new thread"
OTHERS = "the limits of its service or container"


def exhausted(error: BaseException, who: str) -> Refused | None:
    """Refused "daemon/limit" when `error` says that a limit stood in the way of `who`; else None."""
    if isinstance(error, MemoryError):
        what, flags = _CAUSES[errno.ENOMEM]
    elif isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        what, flags = "another thread", ("-u", "-v")
    elif isinstance(error, OSError) and error.errno in _CAUSES:
        what, flags = _CAUSES[error.errno]
    else:
        return None
    limits = in_force(*flags)
    if flags is MEMORY and not limits:
        return None
    return Refused("daemon/limit", who=who, what=what, limits=limits or OTHERS)


def in_force(*flags: str) -> str:
    """Those limits that are set, as ulimit is told them: "ulimit -v 400000"; empty when none is."""
    values = {flag: resource.getrlimit(_LIMITS[flag][0])[0] // _LIMITS[flag][1] for flag in flags}
    return " and ".join(f"ulimit {flag} {value}" for flag, value in values.items() if value >= 0)
