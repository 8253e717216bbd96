"""Conversations: exchanges, dropping the oldest, folding the system text, shielding special tokens."""

from __future__ import annotations

import re

from caldrixd.text.turns import Turn, drop_oldest, exchanges, fold_system, shield, turns_of

SYSTEM, USER, ANSWER = "system", "user", "assistant"
NOTHING = re.compile("(?!)")


def turns(*pairs: tuple[str, str]) -> tuple[Turn, ...]:
    return tuple(Turn(role, text) for role, text in pairs)


def test_parts_are_joined() -> None:
    content = ({"type": "text", "text": " a"}, {"type": "text", "text": "b "})
    assert turns_of([{"role": USER, "content": content}]) == turns((USER, " ab "))


def test_exchanges_begin_with_a_user_turn() -> None:
    assert exchanges(()) == []
    assert exchanges(turns((SYSTEM, "s"))) == []
    assert exchanges(turns((SYSTEM, "s"), (USER, "a"), (ANSWER, "b"), (USER, "c"))) == [2, 1]
    assert exchanges(turns((ANSWER, "a"), (USER, "b"), (ANSWER, "c"), (ANSWER, "d"))) == [1, 3]
    assert exchanges(turns((USER, "a"), (USER, "b"))) == [1, 1]


def test_system_turns_are_never_dropped() -> None:
    whole = turns((SYSTEM, "s"), (USER, "a"), (ANSWER, "b"), (USER, "c"), (SYSTEM, "t"), (USER, "d"))
    assert drop_oldest(whole, 0) == whole
    assert drop_oldest(whole, 2) == turns((SYSTEM, "s"), (USER, "c"), (SYSTEM, "t"), (USER, "d"))
    assert drop_oldest(whole, 9) == turns((SYSTEM, "s"), (SYSTEM, "t"))


def test_the_system_text_moves_to_the_top_of_the_first_user_turn() -> None:
    assert fold_system(turns((SYSTEM, "s"), (USER, "a"), (ANSWER, "b"), (USER, "c"))) == turns(
        (USER, "s\n\na"), (ANSWER, "b"), (USER, "c")
    )
    assert fold_system(turns((SYSTEM, "s"), (SYSTEM, "t"), (USER, "a"))) == turns((USER, "s\n\nt\n\na"))
    assert fold_system(turns((SYSTEM, "s"), (ANSWER, "b"))) == turns((USER, "s"), (ANSWER, "b"))


def test_a_shield_stands_in_for_what_users_wrote() -> None:
    tokens = re.compile(re.escape("<end>") + "|" + re.escape("<e"))
    special = re.compile(re.escape("<e"))
    assert shield(turns((USER, "a < b"), (ANSWER, "<b>")), tokens, special) is None
    shielded = shield(turns((SYSTEM, "<e"), (USER, "a<end>b<end>"), (ANSWER, "<b>")), tokens, special)
    assert shielded is not None
    assert shielded.originals == ("<e", "<end>", "<end>")
    assert shielded.turns[2].text == "<b>"
    restored = [
        shielded.marker.sub(lambda match: shielded.originals[int(match[1])], turn.text)
        for turn in shielded.turns
    ]
    assert restored == ["<e", "a<end>b<end>", "<b>"]


def test_of_a_reply_only_special_tokens_are_shielded() -> None:
    tokens, special = re.compile("<end>|<b>"), re.compile("<end>")
    assert shield(turns((ANSWER, "<b>")), tokens, special) is None
    shielded = shield(turns((ANSWER, "<b><end>")), tokens, special)
    assert shielded is not None
    assert shielded.originals == ("<end>",)


def test_a_stand_in_cannot_be_forged() -> None:
    first = "".join(map(chr, range(0xF0000, 0xF0004)))
    shielded = shield(turns((USER, f"\U000f00000\U000f0001{first}<end>")), re.compile("<end>"), NOTHING)
    assert shielded is not None
    assert len(shielded.marker.findall(shielded.turns[0].text)) == 1
