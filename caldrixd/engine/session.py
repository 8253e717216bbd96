"""One sequence while it is being answered, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from caldrix_protocol.refusals import Refused
from caldrixd.engine.cache import Slot
from caldrixd.engine.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Request:
    """Continue `prompt`. `ctx` bounds prompt and reply together, `max_tokens` the reply (None: only ctx).

    A token of `stop_ids` ends the reply. `threads` 0 means the lane's default. At most `max_batch`
    requests are answered at a time while this one is among them.
    """

    id: int
    prompt: tuple[int, ...]
    ctx: int
    max_tokens: int | None = None
    stop_ids: frozenset[int] = frozenset()
    dtype: str = "f32"
    threads: int = 0
    max_batch: int = 8
    sampling: Sampling = GREEDY


class Usage(NamedTuple):
    """Counts and seconds of one reply so far.

    `cached_tokens` of the prompt needed no prefill. `prefill_seconds` run from admission to the first
    token, `decode_seconds` from the first token to the last (reply_tokens - 1 steps),
    `first_token_seconds` from submission to the first token.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    reply_tokens: int = 0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0


class TokenEvent(NamedTuple):
    """A new token of a request, or its end, or both.

    `finish` is None while the reply goes on, then "stop" (the token is an end token), "length"
    (max_tokens or ctx reached), "cancelled" (no token) or "refused" (no token, `refused` says why).
    """

    id: int
    token: int | None
    finish: str | None
    usage: Usage
    refused: Refused | None = None


@dataclass
class Session:
    """A request that holds a slot. The slot holds `committed` of the `tokens` (prompt and reply).

    A snapshot is due when `mark` tokens are committed; 0: never.
    """

    request: Request
    slot: Slot
    tokens: list[int]
    committed: int
    cached: int
    submitted: float
    started: float
    mark: int = 0
    first: float | None = None
    last: float = 0.0

    @property
    def pending(self) -> int:
        """Tokens the slot lacks. Their last one's logits give the next token."""
        return len(self.tokens) - self.committed

    @property
    def runnable(self) -> int:
        """Pending tokens that the next step may hold: up to the mark where that is ahead."""
        return (self.mark if self.committed < self.mark else len(self.tokens)) - self.committed

    @property
    def reply_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def append(self, token: int, now: float) -> str | None:
        """Take the next token; the finish reason, if it is the last."""
        self.tokens.append(token)
        self.last = now
        if self.first is None:
            self.first = now
        if token in self.request.stop_ids:
            return "stop"
        if self.reply_tokens == self.request.max_tokens or len(self.tokens) == self.request.ctx:
            return "length"
        return None

    def usage(self, now: float) -> Usage:
        first = now if self.first is None else self.first
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            prefill_seconds=first - self.started,
            reply_tokens=self.reply_tokens,
            decode_seconds=0.0 if self.first is None else self.last - first,
            first_token_seconds=first - self.submitted,
        )
