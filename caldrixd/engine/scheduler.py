"""Which rows step next.

Every session that lacks one token gets its row in every step. The others share as many rows as fit into
the seconds of a step, so that a long prompt never stalls a running reply.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from caldrixd.engine.pace import Pace
from caldrixd.engine.session import Session
from caldrixd.lanes.lane import Rows

# Seconds a step aims at: beside a running reply, and where only a newcomer would wait for its end.
REPLY_SECONDS = 0.15
PROMPT_SECONDS = 0.5


@dataclass(frozen=True)
class Share:
    """The next `count` pending tokens of one session."""

    session: Session
    count: int

    @property
    def completes(self) -> bool:
        """Whether the step gives this session's next token."""
        return self.count == self.session.pending


@dataclass(frozen=True)
class Batch:
    """One step: sessions of one dtype. `threads`: the most any asked for; 0, the default, if any did."""

    dtype: str
    threads: int
    shares: tuple[Share, ...]

    @property
    def kind(self) -> tuple[str, int]:
        """Steps of one kind go at one pace."""
        return self.dtype, self.threads

    def rows(self) -> Rows:
        slots: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        wanted: list[int] = []
        for share in self.shares:
            session = share.session
            end = session.committed + share.count
            slots += [session.slot.number] * share.count
            positions += range(session.committed, end)
            tokens += session.tokens[session.committed : end]
            if share.completes:
                wanted.append(len(tokens) - 1)
        return Rows(slots, positions, tokens, wanted)


def schedule(sessions: Collection[Session], pace: Pace, *, chunk: int, max_rows: int) -> list[Batch]:
    """A batch for each dtype in use, with at most `chunk` prompt rows and `max_rows` in all.

    Sessions come oldest first; there are fewer than `max_rows`.
    """
    groups: dict[str, list[Session]] = {}
    for session in sessions:
        groups.setdefault(session.request.dtype, []).append(session)
    replying = any(session.pending == 1 for session in sessions)
    seconds = (REPLY_SECONDS if replying else PROMPT_SECONDS) / max(1, len(groups))
    return [_batch(dtype, group, pace, seconds, chunk, max_rows) for dtype, group in groups.items()]


def _batch(
    dtype: str, sessions: Sequence[Session], pace: Pace, seconds: float, chunk: int, max_rows: int
) -> Batch:
    asked = [session.request.threads for session in sessions]
    threads = max(asked) if all(asked) else 0
    replying = [session for session in sessions if session.pending == 1]
    prefilling = [session for session in sessions if session.pending > 1]
    shares = [Share(session, 1) for session in replying]
    if prefilling:
        budget = pace.rows(
            (dtype, threads),
            seconds,
            beside=[session.committed for session in replying],
            first=max(session.committed for session in prefilling),
            most=min(chunk, max_rows - len(replying)),
        )
        counts = split([session.runnable for session in prefilling], budget)
        shares += [Share(session, count) for session, count in zip(prefilling, counts, strict=True) if count]
    return Batch(dtype, threads, tuple(shares))


def split(wants: Sequence[int], budget: int) -> list[int]:
    """Give each its equal part of `budget` but no more than it wants; odd rows go to the earliest.

    What one leaves is shared by the others: sum(result) == min(budget, sum(wants)).
    """
    given = [0] * len(wants)
    left = min(budget, sum(wants))
    while left:
        hungry = [i for i, want in enumerate(wants) if given[i] < want]
        part = max(1, left // len(hungry))
        for i in hungry:
            rows = min(part, wants[i] - given[i], left)
            given[i] += rows
            left -= rows
    return given
