"""What looking at a lane brought."""

from __future__ import annotations

from dataclasses import dataclass

from caldrix_protocol.refusals import Refused


@dataclass(frozen=True)
class Finding:
    """Why the lane cannot be used, and what else was seen, as sentences.

    A glance that is `complete` says all there is; otherwise a probe in a child process says more.
    """

    reasons: tuple[Refused, ...] = ()
    details: tuple[str, ...] = ()
    complete: bool = False
