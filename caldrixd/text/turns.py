"""Conversations as data: plain text turns, exchanges, and the changes a prompt may need."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One message; `role` is "system", "user" or "assistant"."""

    role: str
    text: str

    def message(self) -> dict[str, str]:
        return {"role": self.role, "content": self.text}


def text_of(content: Sequence[Mapping[str, Any]]) -> str:
    """The joined text of content parts ({type: "text", text})."""
    return "".join(part["text"] for part in content)


def turns_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Messages as requests carry them: {role, content: parts}."""
    return tuple(Turn(message["role"], text_of(message["content"])) for message in messages)


def fold_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The system texts, then a blank line, at the top of the first user turn; no system turn is left."""
    system = [turn.text for turn in turns if turn.role == "system"]
    others = [turn for turn in turns if turn.role != "system"]
    top = "\n\n".join(system)
    for index, turn in enumerate(others):
        if turn.role == "user":
            others[index] = replace(turn, text=f"{top}\n\n{turn.text}")
            return tuple(others)
    return (Turn("user", top), *others)


def exchanges(turns: Sequence[Turn]) -> list[int]:
    """How many turns each exchange has: a user turn and what answers it. System turns belong to none."""
    sizes: list[int] = []
    for turn in turns:
        if turn.role == "system":
            continue
        if turn.role == "user" or not sizes:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


def drop_oldest(turns: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    """Without the first `count` turns that are not system turns."""
    kept: list[Turn] = []
    for turn in turns:
        if turn.role != "system" and count > 0:
            count -= 1
        else:
            kept.append(turn)
    return tuple(kept)


@dataclass(frozen=True)
class Shield:
    """Stand-ins for what must not be read as an added token: `marker` finds them, group 1 is the index."""

    turns: tuple[Turn, ...]
    marker: re.Pattern[str]
    originals: tuple[str, ...]


def shield(
    turns: Sequence[Turn], added_tokens: re.Pattern[str], special_tokens: re.Pattern[str]
) -> Shield | None:
    """Replace added tokens that users or the system text wrote; None where there are none.

    Of replies only special tokens are replaced: no such token has a text in one, so these were spelled out.
    The stand-in is a number between two private-use characters that occur nowhere in the turns.
    """
    patterns = [special_tokens if turn.role == "assistant" else added_tokens for turn in turns]
    if not any(pattern.search(turn.text) for turn, pattern in zip(turns, patterns, strict=True)):
        return None
    used = set().union(*(turn.text for turn in turns))
    begin, end = [chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used][:2]
    originals: list[str] = []

    def stand_in(match: re.Match[str]) -> str:
        originals.append(match[0])
        return f"{begin}{len(originals) - 1}{end}"

    shielded = tuple(
        replace(turn, text=pattern.sub(stand_in, turn.text))
        for turn, pattern in zip(turns, patterns, strict=True)
    )
    return Shield(shielded, re.compile(f"{begin}([0-9]+){end}"), tuple(originals))
