"""Builds the prompt ids of a request: template, tokenizer, and what to do when it does not fit."""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.text.template import ChatTemplate
from caldrixd.text.tokenizer import Tokenizer
from caldrixd.text.turns import Turn, drop_oldest, exchanges, fold_system, shield, text_of, turns_of

# A text with more bytes than this, for each token of the context or at all, is too long without a count.
BYTES_PER_TOKEN = 256
MAX_BYTES = 6 << 20
BEGUN = re.compile(r"<think>\s*\Z")


@dataclass(frozen=True)
class Notice:
    """A row of the refusal table and its fields."""

    code: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """`dropped_turns` counts the oldest turns left out, system turns apart (they always stay).

    `begun` is the beginning of the reply that the template wrote: `<think>` and what follows it, or nothing.
    """

    ids: tuple[int, ...]
    dropped_turns: int = 0
    notices: tuple[Notice, ...] = ()
    begun: str = ""


def build(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    turns: Sequence[Mapping[str, Any]] | None = None,
    raw: Sequence[Mapping[str, Any]] | None = None,
    ctx: int,
    max_tokens: int | None = None,
    thinking: bool | None = None,
) -> Prompt:
    """The prompt of a conversation (`turns`) or of plain text (`raw`, content parts); one of them is given.

    `thinking` asks the template for a reply with or without it; None for what it does by itself.
    Refused "message/too-long", "message/empty", "message/no-template", "template/..." or "tokenizer/...".
    """
    if turns is None:
        return _raw_prompt(tokenizer, text_of(raw or ()), ctx)
    if template is None:
        raise Refused("message/no-template")
    if not turns:
        raise Refused("message/empty")
    room = _answer_room(ctx, max_tokens)
    return _Conversation(tokenizer, template, ctx, room, thinking).prompt(turns_of(turns))


def _answer_room(ctx: int, max_tokens: int | None) -> int:
    """Tokens kept free for the answer while older turns can make room for it."""
    return min(ctx // 4 if max_tokens is None else max_tokens, ctx // 2)


def _raw_prompt(tokenizer: Tokenizer, text: str, ctx: int) -> Prompt:
    if not _countable(text, ctx):
        raise Refused("message/too-long", tokens=f"over {ctx}", ctx=ctx)
    ids = tokenizer.encode(text, add_special=True)
    if not ids and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id]
    return Prompt(_checked(ids, ctx))


def _countable(text: str, ctx: int) -> bool:
    return len(text.encode("utf-8", "surrogatepass")) <= min(BYTES_PER_TOKEN * ctx, MAX_BYTES)


def _checked(ids: Sequence[int], ctx: int) -> tuple[int, ...]:
    if not ids:
        raise Refused("message/empty")
    if len(ids) >= ctx:
        raise Refused("message/too-long", tokens=len(ids), ctx=ctx)
    return tuple(ids)


@dataclass(frozen=True)
class _Encoded:
    """`ids` is None where the text is far too long; `folded`: the system text went into a user turn."""

    ids: list[int] | None = None
    folded: bool = False
    begun: str = ""


@dataclass(frozen=True)
class _Conversation:
    tokenizer: Tokenizer
    template: ChatTemplate
    ctx: int
    room: int
    thinking: bool | None

    def prompt(self, turns: tuple[Turn, ...]) -> Prompt:
        sizes = exchanges(turns)
        # Turns dropped by leaving out the first 0, 1, ... exchanges; the last one always stays.
        drops = [sum(sizes[:count]) for count in range(max(1, len(sizes)))]
        tried: dict[int, _Encoded] = {}

        def fits(drop: int) -> bool:
            tried[drop] = self._encoded(drop_oldest(turns, drop))
            ids = tried[drop].ids
            return drop == drops[-1] or (ids is not None and len(ids) <= self.ctx - self.room)

        drop = drops[0] if fits(drops[0]) else drops[bisect.bisect_left(drops, True, 1, key=fits)]
        encoded = tried[drop]
        if encoded.ids is None:
            raise Refused("message/too-long", tokens=f"over {self.ctx}", ctx=self.ctx)
        notices = [Notice("notice/system-in-user", {})] if encoded.folded else []
        if drop:
            notices.append(Notice("notice/dropped-turns", {"count": drop}))
        return Prompt(_checked(encoded.ids, self.ctx), drop, tuple(notices), encoded.begun)

    def _encoded(self, turns: Sequence[Turn]) -> _Encoded:
        if not _countable("".join(turn.text for turn in turns), self.ctx):
            return _Encoded()
        shielded = shield(turns, self.tokenizer.added_tokens, self.tokenizer.special_tokens)
        text, folded = self._render(turns if shielded is None else shielded.turns)
        if not _countable(text, self.ctx):
            return _Encoded(folded=folded)
        begun = BEGUN.search(text)
        if shielded is None:
            ids = self.tokenizer.encode_templated(text)
        else:
            ids = self.tokenizer.encode_templated(text, shielded.marker, shielded.originals)
        return _Encoded(ids, folded, begun[0] if begun else "")

    def _render(self, turns: Sequence[Turn]) -> tuple[str, bool]:
        """The text, and whether the system text went into a user turn."""
        try:
            return self.template.render([turn.message() for turn in turns], self.thinking), False
        except Refused as refused:
            if refused.code != "template/raised" or not any(turn.role == "system" for turn in turns):
                raise
            folded = [turn.message() for turn in fold_system(turns)]
            return self.template.render(folded, self.thinking), True
