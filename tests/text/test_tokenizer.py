"""tokenizer.json: ids equal to the library's, its failures as refusals, special tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from caldrix_protocol.refusals import MESSAGE, RUN, Refused
from caldrixd.spec import ModelSpec
from caldrixd.text import encoder, tokenizer
from caldrixd.text.child import Limits
from caldrixd.text.tokenizer import LIMITS, MIB, Tokenizer
from tests.text.conftest import TINY, byte_fallback_model

TEXTS = (
    "",
    " ",
    "text",
    " text",
    "hi  ab \n\n hi",
    "<|im_start|>user",
    "<|im_end|> x",
    "<|im_end|>  x",
    "</s> hi",
    "</s>  hi",
    "😀 👩‍👩‍👧 漢 é e\u0301",
    "\0\x1b[0m",
)


def test_ids_are_the_librarys_and_round_trip(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    twins = (
        (byte_level, tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))),
        (byte_fallback, byte_fallback_model()),
    )
    for ours, twin in twins:
        for text in TEXTS:
            for special in (True, False):
                ids = ours.encode(text, add_special=special)
                assert ids == twin.encode(text, add_special_tokens=special).ids
            if "<" not in text:
                assert ours.decode(ids) == text


def test_the_tokenizers_own_bos_rule(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_fallback.encode("hi", add_special=True) == [1, *byte_fallback.encode("hi", add_special=False)]
    assert byte_fallback.encode("", add_special=True) == [1]
    assert byte_level.encode("", add_special=True) == []


def copied(tmp_path: Path, **changes: Any) -> Path:
    """tiny-llama's tokenizer with other values at the top of tokenizer.json."""
    table = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(table | changes))
    return tmp_path


def test_stored_truncation_and_padding_are_ignored(spec: ModelSpec, tmp_path: Path) -> None:
    directory = copied(
        tmp_path,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    loaded = tokenizer.load(directory, spec)
    twin = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for text in ("a", "one two three four five six seven"):
        assert loaded.encode(text, add_special=True) == twin.encode(text).ids


@pytest.mark.parametrize(
    ("config", "eos_ids", "bos_id"),
    [
        (None, {2}, 1),
        ({}, {2}, 1),
        ({"eos_token": "<|endoftext|>", "bos_token": "<|im_end|>"}, {2, 0}, 2),
        ({"eos_token": {"content": "<|endoftext|>"}, "bos_token": {"content": "<|im_end|>"}}, {2, 0}, 2),
        ({"eos_token": None, "bos_token": None}, {2}, 1),
        ({"eos_token": "<none>", "bos_token": "<none>"}, {2}, 1),
        ({"eos_token": 7, "bos_token": ["x"]}, {2}, 1),
    ],
)
def test_end_and_begin_of_text(
    spec: ModelSpec, tmp_path: Path, config: Any, eos_ids: set[int], bos_id: int
) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = tokenizer.load(tmp_path, spec)
    assert loaded.eos_ids == eos_ids
    assert loaded.bos_id == bos_id


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"version": "1.0", "model": {"type": "BPE"}}',
        b'{"model": ' + b"[" * 100_000,
        b'{"normalizer": ' + b'{"type":"Sequence","normalizers":[' * 10_000,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_tokenizer_that_cannot_be_loaded(spec: ModelSpec, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(Refused) as caught:
        tokenizer.load(tmp_path, spec)
    assert caught.value.code == "tokenizer/invalid"
    assert caught.value.kind == RUN
    assert caught.value.text.startswith("tokenizer.json cannot be used: ")
    assert len(caught.value.text) < 300


def test_a_tokenizer_that_is_missing_or_huge(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        tokenizer.load(tmp_path, spec)
    assert caught.value.code == "tokenizer/missing"
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(Refused) as caught:
        tokenizer.load(tmp_path, spec)
    assert caught.value.code == "config/too-big"


def test_a_panic_of_the_library_is_a_refusal_and_the_next_text_works(spec: ModelSpec, tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    loaded = tokenizer.load(copied(tmp_path, pre_tokenizer=pattern), spec)
    with pytest.raises(Refused) as caught:
        loaded.encode("a" * 40 + "b", add_special=True)
    assert caught.value.code == "tokenizer/failed"
    assert caught.value.kind == MESSAGE
    assert loaded.encode("b", add_special=True)


def test_a_text_that_is_no_unicode_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(Refused) as caught:
        byte_level.encode("\ud83d", add_special=True)
    assert caught.value.code == "tokenizer/failed"


def test_ids_outside_the_models_vocabulary_are_refused(spec: ModelSpec) -> None:
    loaded = tokenizer.load(TINY, replace(spec, vocab_size=2))
    assert loaded.encode("<|im_start|>", add_special=False) == [1]
    with pytest.raises(Refused) as caught:
        loaded.encode("<|im_end|>", add_special=False)
    assert caught.value.code == "message/unknown-token"
    assert loaded.bos_id == 1
    assert tokenizer.load(TINY, replace(spec, vocab_size=1, bos_id=None)).bos_id is None


QUICK = replace(LIMITS, seconds=3)  # four times as long by the clock: enough to start a process
SMALL = replace(LIMITS, memory=300 * MIB)
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def sequence(normalizer: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [normalizer] * count}


@pytest.mark.parametrize(
    ("normalizer", "limits", "words"),
    [
        (
            sequence(DOUBLES, 40),
            SMALL,
            "the tokenizer of this model used more than 300 MiB of memory on this text and was stopped",
        ),
        (
            {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * (1 << 20)},
            SMALL,
            "the tokenizer of this model used more than 300 MiB of memory on this text and was stopped",
        ),
        (
            sequence({"type": "Replace", "pattern": {"Regex": "[ab]+(?<!a|b)"}, "content": "a"}, 500),
            QUICK,
            "the tokenizer of this model ran for over 3 s on this text and was stopped",
        ),
    ],
    ids=["doubles", "one long", "slow"],
)
def test_a_bomb_costs_one_message_and_the_next_is_answered(
    spec: ModelSpec, tmp_path: Path, normalizer: dict[str, Any], limits: Limits, words: str
) -> None:
    loaded = tokenizer.load(copied(tmp_path, normalizer=normalizer), spec, limits)
    with pytest.raises(Refused) as caught:
        loaded.encode("ab" * 2000, add_special=True)
    assert caught.value.text == words
    assert caught.value.kind == MESSAGE
    assert loaded.encode("x", add_special=True) == [90]


def test_a_file_that_takes_too_much_to_read_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        tokenizer.load(with_tokens(tmp_path, *(letter * 1_000_000 for letter in "abcdef")), spec, SMALL)
    assert caught.value.text == ("tokenizer.json cannot be used: reading it took more than 300 MiB of memory")


def with_tokens(tmp_path: Path, *contents: str) -> Path:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": 512 + index, "content": content, **flags} for index, content in enumerate(contents)]
    return copied(tmp_path, added_tokens=added)


def test_a_token_that_is_longer_than_any_word(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        tokenizer.load(with_tokens(tmp_path, "a" * 70_000), spec)
    assert caught.value.text == (
        "tokenizer.json cannot be used: it has a token of 70000 characters, over 65536"
    )


def test_two_tokens_with_one_id(spec: ModelSpec, tmp_path: Path) -> None:
    model = json.loads((TINY / "tokenizer.json").read_text("utf-8"))["model"]
    model["vocab"]["again"] = 300
    with pytest.raises(Refused) as caught:
        tokenizer.load(copied(tmp_path, model=model), spec)
    assert caught.value.text == "tokenizer.json cannot be used: two of its tokens have the same id"


def test_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (TINY / "tokenizer.json").read_text("utf-8")
    assert encoder.load(source).get_vocab_size() == 512
    monkeypatch.setattr(encoder, "MAX_ADDED_TOKENS", 2)
    with pytest.raises(encoder.Unusable, match="it adds 3 tokens to its vocabulary, over 2"):
        encoder.load(source)
    monkeypatch.setattr(encoder, "MAX_TOKENS", 511)
    with pytest.raises(encoder.Unusable, match="it has 512 tokens, over 511"):
        encoder.load(source)


REPLACE = {"type": "Replace", "pattern": {"String": "ab"}, "content": "xy"}


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        ({**REPLACE, "content": "xyz"}, "its decoder replaces by a regular expression or by a longer text"),
        (
            {**REPLACE, "pattern": {"Regex": "a+"}},
            "its decoder replaces by a regular expression or by a longer text",
        ),
        ({"type": "Sequence", "decoders": [REPLACE] * 65}, "its decoder has over 64 steps"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Sequence", "decoders": [{**REPLACE, "content": "xyz"}]}],
            },
            "its decoder replaces by a regular expression or by a longer text",
        ),
    ],
)
def test_a_decoder_that_could_make_a_text_grow(
    spec: ModelSpec, tmp_path: Path, decoder: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused) as caught:
        tokenizer.load(copied(tmp_path, decoder=decoder), spec)
    assert caught.value.text == f"tokenizer.json cannot be used: {reason}"


def test_a_decoder_as_converted_models_have_it(spec: ModelSpec, tmp_path: Path) -> None:
    steps = {"type": "Sequence", "decoders": [REPLACE, {"type": "Fuse"}]}
    loaded = tokenizer.load(copied(tmp_path, decoder=steps), spec)
    ids = loaded.encode("ab", add_special=False)
    assert loaded.decode(ids) == "".join(
        {"ab": "xy"}.get(token, token) for token in (loaded._vocabulary.tokens[id_] for id_ in ids)
    )
    assert tokenizer.load(copied(tmp_path, decoder=None), spec).decode([90, 90]) == "x x"


def test_an_encoder_that_was_killed_is_started_again(byte_level: Tokenizer) -> None:
    expected = byte_level.encode("text", add_special=True)
    os.kill(byte_level._child.pid, signal.SIGSEGV)
    os.waitid(os.P_PID, byte_level._child.pid, os.WEXITED | os.WNOWAIT)
    assert byte_level.encode("text", add_special=True) == expected


def test_a_panic_of_the_decoder_is_a_refusal(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    class Decoder:
        def decode(self, tokens: list[str]) -> str:
            raise Panic("out of range")

    ids = byte_level.encode("hi", add_special=False)
    monkeypatch.setattr(byte_level, "_decoder", Decoder())
    with pytest.raises(Refused, match="out of range") as caught:
        byte_level.decode(ids)
    assert caught.value.code == "tokenizer/failed"


def test_decode_leaves_out_special_tokens_alone(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    ids = [1, *byte_level.encode("hi", add_special=False), 2]
    assert byte_level.decode(ids) == "hi"
    thought = byte_fallback.encode("<think>hi</s>", add_special=True)
    assert byte_fallback.decode(thought) == "<think> hi"
    assert byte_fallback.is_silent(1)
    assert byte_fallback.is_silent(10_000)
    assert not byte_fallback.is_silent(thought[1])
