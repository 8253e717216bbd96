"""Streaming: whole characters only, and joined pieces equal the decoding of all ids at every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caldrixd.text.detokenize import WINDOW, Detokenizer, Stops
from caldrixd.text.tokenizer import Tokenizer

EMOJI = "a 😀👩‍👩‍👧 漢字 é e\u0301 ab  hi\n"


def stream(decoder: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    pieces = [detokenizer.add(id_) for id_ in ids]
    return [*pieces, detokenizer.finish()]


@pytest.fixture(params=["byte_level", "byte_fallback"])
def decoder(request: pytest.FixtureRequest) -> Tokenizer:
    loaded: Tokenizer = request.getfixturevalue(request.param)
    return loaded


def test_every_cut_of_a_text_with_emoji(decoder: Tokenizer) -> None:
    ids = decoder.encode(EMOJI, add_special=False)
    assert any("\ufffd" in decoder.decode(ids[:cut]) for cut in range(len(ids)))
    for cut in range(len(ids) + 1):
        pieces = stream(decoder, ids[:cut])
        assert "".join(pieces) == decoder.decode(ids[:cut])
        assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(stream(decoder, ids)) == EMOJI


def test_a_character_comes_with_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("😀x", add_special=False)
    assert stream(byte_level, ids) == ["", "", "😀", "x", ""]
    assert stream(byte_level, ids[:2]) == ["", "", "\ufffd"]


def test_leading_spaces_are_those_of_the_whole_text(decoder: Tokenizer) -> None:
    for text in (" a", "  a", "a", " ", "a b", " hi hi"):
        ids = decoder.encode(text, add_special=False)
        for start in range(len(ids)):
            for end in range(start, len(ids) + 1):
                assert "".join(stream(decoder, ids[start:end])) == decoder.decode(ids[start:end])


def test_a_run_of_bytes_that_turns_out_to_be_none_is_decoded_as_a_whole(byte_fallback: Tokenizer) -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff"]
    assert stream(byte_fallback, ids) == ["", "", "", "\ufffd\ufffd\ufffd"]
    letter = byte_fallback.encode("<think>a", add_special=False)[-1]
    assert "".join(stream(byte_fallback, [*ids[:2], letter])) == byte_fallback.decode([*ids[:2], letter])


def test_special_tokens_and_unknown_ids_are_silent(decoder: Tokenizer) -> None:
    ids = decoder.encode(" hi ab", add_special=False)
    mixed = [1, ids[0], 2, 100_000, *ids[1:], 2, 0]
    assert "".join(stream(decoder, mixed)) == decoder.decode(mixed) == decoder.decode(ids)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(ids=st.lists(st.integers(0, 280), max_size=3 * WINDOW))
def test_random_ids_stream_to_their_decoding(decoder: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(decoder, ids)) == decoder.decode(ids)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.text(max_size=60))
def test_random_texts_stream_to_themselves(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special=False)
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == byte_level.decode(ids)
    if "<" not in text:
        assert "".join(pieces) == text


class Counted:
    """A tokenizer that counts how many ids it is asked to decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.count = 0
        self.is_silent = inner.is_silent
        self.is_byte = inner.is_byte

    def decode(self, ids: Sequence[int]) -> str:
        self.count += len(ids)
        return self.inner.decode(ids)


def test_a_long_reply_costs_a_fixed_number_of_ids_a_token(decoder: Tokenizer) -> None:
    counted = Counted(decoder)
    ids = decoder.encode("ab hi " * 1000, add_special=False)
    detokenizer = Detokenizer(counted)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == decoder.decode(ids)
    assert counted.count <= WINDOW * len(ids)


def shown(stops: Stops, pieces: Sequence[str]) -> list[str]:
    """What each piece brings, and the end, as long as no stop text was found."""
    given = []
    for piece in pieces:
        given.append(stops.add(piece))
        if stops.found:
            return given
    return [*given, stops.finish()]


def cuts(text: str) -> Iterator[list[str]]:
    """A text in every pair of two pieces, and character by character."""
    yield list(text)
    for cut in range(len(text) + 1):
        yield [text[:cut], text[cut:]]


@pytest.mark.parametrize(
    ("texts", "text", "result"),
    [
        (("DEFGHIJ",), "ABCDEFGHIJKLM", "ABC"),
        (("DEFGHIJ",), "ABCDEFGHI", None),
        (("aab",), "aaaab.", "aa"),
        (("abab",), "abaabab", "aba"),
        (("b", "abc"), "abc", "a"),
        (("abc", "bc"), "abc", ""),
        (("abcde", "cd"), "abcde", "ab"),
        (("x",), "", None),
        (("é",), "café.", "caf"),
        (("\n\n",), "a\nb\n", None),
        (("\n\n",), "a\n\nb", "a"),
        ((), "abc", None),
    ],
)
def test_a_stop_text_ends_the_reply_before_it_however_it_is_cut(
    texts: tuple[str, ...], text: str, result: str | None
) -> None:
    for pieces in cuts(text):
        stops = Stops(texts)
        given = "".join(shown(stops, pieces))
        assert (given, stops.found) == (text if result is None else result, result is not None)


def test_only_what_may_begin_a_stop_text_is_held() -> None:
    stops = Stops(("DEFGHIJ",))
    assert shown(stops, ["ABC", "D", "E", "F", "X", "D", "EFG"]) == [
        "ABC",
        "",
        "",
        "",
        "DEFX",
        "",
        "",
        "DEFG",
    ]
    assert shown(Stops(("DEFGHIJ",)), ["ABC", "D", "EFGH", "IJK"]) == ["ABC", "", "", ""]


def test_a_stop_text_that_is_the_text_of_a_special_token_is_found_where_it_is_spelled_out(
    byte_fallback: Tokenizer,
) -> None:
    """The token itself has no text, so it does not end a reply by it; nor does it split another stop text."""
    said, end = byte_fallback.encode("hi ab", add_special=False), 2
    assert "</s>" not in byte_fallback.decode([end])
    spelled = [3 + byte for byte in b"</s>"]
    for ids, stop, result in (
        ([*said, end, *said], "</s>", None),
        ([*said, *spelled, *said], "</s>", byte_fallback.decode(said)),
        ([*said[:1], end, *said[1:], end], "hi a", ""),
    ):
        stops = Stops((stop,))
        given = "".join(shown(stops, stream(byte_fallback, ids)))
        assert (given, stops.found) == (
            byte_fallback.decode(ids) if result is None else result,
            result is not None,
        )


def test_nothing_comes_after_a_stop_text() -> None:
    stops = Stops(("b",))
    assert [stops.add("ab"), stops.add("c"), stops.finish()] == ["a", "", ""]


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    texts=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_are_found_as_in_the_whole(pieces: list[str], texts: list[str]) -> None:
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(texts))] if texts else []
    stops = Stops(tuple(texts))
    given = "".join(shown(stops, pieces))
    if not ends:
        assert (given, stops.found) == (text, False)
    else:
        longest = max(len(stop) for stop in texts if text[: ends[0]].endswith(stop))
        assert (given, stops.found) == (text[: ends[0] - longest], True)
