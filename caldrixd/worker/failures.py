"""What a user reads of a worker's failures. Imports little: it is needed when all else cannot be imported."""

from __future__ import annotations

import errno

from caldrix_protocol import limits
from caldrix_protocol.connection import as_refusal
from caldrix_protocol.messages import Load, Refusal
from caldrix_protocol.refusals import Refused
from caldrixd import log


def refusal_for(error: BaseException, wanted: Load) -> Refusal:
    """The sentence for any exception."""
    who = f"the worker process of {wanted.model}"
    if isinstance(error, Refused):
        return as_refusal(limits.behind(error, who))
    found = limits.exhausted(error, who)
    if found is not None:
        return as_refusal(found)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return as_refusal(Refused("worker/out-of-memory", model=wanted.model))
    return as_refusal(Refused("daemon/internal", id=log.incident(error)))


def broken_installation(error: ImportError, wanted: Load) -> Refusal:
    """The sentence for a worker that cannot import its parts; the last line is a library's reason."""
    if (found := limits.exhausted(error, f"the worker process of {wanted.model}")) is not None:
        return as_refusal(found)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[-1].removeprefix("Original error was: ")
    memory = limits.in_force(*limits.MEMORY)
    if memory:
        return as_refusal(Refused("worker/limited", model=wanted.model, reason=reason, limits=memory))
    return as_refusal(Refused("worker/did-not-start", reason=reason))
