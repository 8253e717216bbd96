"""vocab.json and merges.txt: the ids of transformers, or a refusal that says what stands in the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from caldrix_protocol.refusals import RUN, Refused
from caldrixd.spec import ModelSpec
from caldrixd.text import files, tokenizer
from tests.support.models import DATA

GOLDEN = json.loads((DATA / "tokenizers/golden.json").read_text("utf-8"))
VOCABULARY: dict[str, int] = GOLDEN["vocabulary"]
MERGES = "".join(["#version: 0.2\n", *(f"{merge}\n" for merge in GOLDEN["merges"])])
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
QWEN2 = {"tokenizer_class": "Qwen2Tokenizer"}
END = "<|endoftext|>"
COUNT = len(VOCABULARY)


def written(path: Path, contents: dict[str, Any]) -> Path:
    """A directory with the golden vocabulary and merges, and these files, of which None is none."""
    whole = {"vocab.json": VOCABULARY, "merges.txt": MERGES, **contents}
    for name, content in whole.items():
        if content is not None:
            text = content if type(content) is str else json.dumps(content)
            (path / name).write_text(text, "utf-8", newline="")
    return path


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_the_ids_and_the_text_are_those_of_transformers(tmp_path: Path, case: dict[str, Any]) -> None:
    _, source = files.source(written(tmp_path, case["files"]))
    made = tokenizers.Tokenizer.from_str(source.decode())
    for text, ids, decoded in zip(GOLDEN["texts"], case["ids"], case["decoded"], strict=True):
        assert made.encode(text).ids == ids
        assert made.decode(ids) == decoded


def test_a_converted_tokenizer_is_used_like_any_other(spec: ModelSpec, tmp_path: Path) -> None:
    case = next(case for case in GOLDEN["cases"] if case["name"] == "GPT2Tokenizer bos")
    written(tmp_path, case["files"])
    loaded = tokenizer.load(tmp_path, replace(spec, vocab_size=COUNT))
    for text, ids, decoded in zip(GOLDEN["texts"], case["ids"], case["decoded"], strict=True):
        assert loaded.encode(text, add_special=True) == ids
        assert loaded.encode(text, add_special=False) == ids[1:]
        assert loaded.decode(ids) == decoded


def without(token: str) -> dict[str, int]:
    """The vocabulary with another token in this one's place."""
    return {("other" if name == token else name): id_ for name, id_ in VOCABULARY.items()}


def declared(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, **flags}


CLASS = "and its tokenizer_config.json names {}, whose vocab.json and merges.txt inferno does not convert"
OPTION = "and its {} sets {} to {}, which inferno cannot reproduce exactly"
SHAPE = "and its {} {}, which inferno cannot reproduce exactly"
GUESS = "and {}; inferno does not guess which the model was trained with"
ABSENT = "and {} has {}, which is not in vocab.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no class": ({CONFIG: {}}, GUESS.format(f"{CONFIG} names no tokenizer_class")),
    "no config": ({}, GUESS.format(f"{CONFIG} names no tokenizer_class")),
    "another class": ({CONFIG: {"tokenizer_class": "RobertaTokenizer"}}, CLASS.format("'RobertaTokenizer'")),
    "class of a type": (
        {CONFIG: QWEN2, "config.json": {"model_type": "qwen3_5"}},
        GUESS.format(f"{CONFIG} names Qwen2Tokenizer where a qwen3_5 model has Qwen3_5Tokenizer"),
    ),
    "class a number": ({CONFIG: {"tokenizer_class": 1}}, CLASS.format("1")),
    **{
        f"{field} {value!r}": ({CONFIG: {**QWEN2, field: value}}, OPTION.format(CONFIG, field, ascii(value)))
        for field, value in (
            ("add_prefix_space", True),
            ("add_bos_token", True),
            ("add_eos_token", True),
            ("split_special_tokens", True),
            ("errors", "strict"),
            ("dropout", 0.1),
            ("auto_map", {"AutoTokenizer": ["code.Tokenizer", None]}),
            ("init_inputs", ["x"]),
        )
    },
    "prefix a number": (
        {CONFIG: {**GPT2, "add_prefix_space": 1}},
        OPTION.format(CONFIG, "add_prefix_space", 1),
    ),
    "vocabulary with a hole": (
        {CONFIG: GPT2, "vocab.json": {**VOCABULARY, "x" * 9: COUNT + 1}},
        SHAPE.format("vocab.json", "has ids that are not 0, 1, 2 and so on"),
    ),
    "id a text": (
        {CONFIG: GPT2, "vocab.json": {**VOCABULARY, "x" * 9: str(COUNT)}},
        SHAPE.format("vocab.json", "has ids that are not 0, 1, 2 and so on"),
    ),
    "byte missing": (
        {CONFIG: GPT2, "vocab.json": without("\u0142")},
        SHAPE.format("vocab.json", "lacks 1 of the 256 bytes"),
    ),
    "merge of three": (
        {CONFIG: GPT2, "merges.txt": MERGES + "a b c\n"},
        SHAPE.format("merges.txt", "has a line 73 that is no pair of tokens"),
    ),
    "empty line": (
        {CONFIG: QWEN2, "merges.txt": MERGES + "\n\n"},
        SHAPE.format("merges.txt", "has a line 73 that is no pair of tokens"),
    ),
    "second version": (
        {CONFIG: QWEN2, "merges.txt": MERGES + "#version: 0.2\n"},
        SHAPE.format("merges.txt", "has a line 73 that is no pair of tokens"),
    ),
    "merge twice": (
        {CONFIG: QWEN2, "merges.txt": MERGES + GOLDEN["merges"][3] + "\n"},
        SHAPE.format("merges.txt", "has the pair of line 73 twice"),
    ),
    "merge of unknown": (
        {CONFIG: QWEN2, "merges.txt": MERGES + "q zz\n"},
        ABSENT.format("line 73 of merges.txt", "'zz'"),
    ),
    "merge to unknown": (
        {CONFIG: QWEN2, "merges.txt": MERGES + "q q\n"},
        ABSENT.format("line 73 of merges.txt", "'qq'"),
    ),
    "no version": (
        {CONFIG: GPT2, "merges.txt": MERGES.partition("\n")[2]},
        GUESS.format("merges.txt does not begin with #version"),
    ),
    "no last line feed": (
        {CONFIG: GPT2, "merges.txt": MERGES[:-1]},
        GUESS.format("the last line of merges.txt does not end with a line feed"),
    ),
    "end unknown": (
        {CONFIG: {**QWEN2, "eos_token": "<eos>"}},
        ABSENT.format(f"the eos_token of {CONFIG}", "'<eos>'"),
    ),
    "end unknown in the map": (
        {CONFIG: QWEN2, SPECIAL: {"eos_token": "<eos>"}},
        ABSENT.format(f"the eos_token of {SPECIAL}", "'<eos>'"),
    ),
    "default unknown": (
        {CONFIG: GPT2, "vocab.json": without(END)},
        ABSENT.format(f"the unk_token of {CONFIG}", f"'{END}'"),
    ),
    "added with a hole": (
        {CONFIG: {**GPT2, "added_tokens_decoder": {str(COUNT + 1): declared("<a>")}}},
        SHAPE.format(CONFIG, f"gives '<a>' the id {COUNT + 1}, not {COUNT}"),
    ),
    "added at another's place": (
        {CONFIG: GPT2, "added_tokens.json": {END: COUNT}},
        SHAPE.format("added_tokens.json", f"gives '{END}' the id {COUNT}, not {COUNT - 1}"),
    ),
    "added twice": (
        {CONFIG: {**GPT2, "added_tokens_decoder": {str(COUNT): declared("a"), "0": declared("a")}}},
        SHAPE.format(CONFIG, "adds 'a' twice"),
    ),
    "id of letters": (
        {CONFIG: {**GPT2, "added_tokens_decoder": {"x": declared("a")}}},
        SHAPE.format(CONFIG, "has the token id 'x'"),
    ),
    "flag a number": (
        {CONFIG: {**GPT2, "added_tokens_decoder": {str(COUNT): declared("a", lstrip=1)}}},
        SHAPE.format(CONFIG, "has in added_tokens_decoder what is no token"),
    ),
    "special with a flag": (
        {CONFIG: {**QWEN2, "eos_token": {"content": END, "lstrip": True}}},
        OPTION.format(CONFIG, "eos_token", f"'{END}'"),
    ),
    "special and not": (
        {CONFIG: {**QWEN2, "eos_token": "<a>", "added_tokens_decoder": {str(COUNT): declared("<a>")}}},
        OPTION.format(CONFIG, "eos_token", "'<a>'"),
    ),
    "special by another name": (
        {CONFIG: {**QWEN2, "image_token": END, "unk_token": None, "eos_token": None, "pad_token": None}},
        OPTION.format(CONFIG, "image_token", f"'{END}'"),
    ),
    "list of the map": (
        {CONFIG: GPT2, SPECIAL: {"additional_special_tokens": ["<a>"]}, "added_tokens.json": {"<a>": COUNT}},
        OPTION.format(SPECIAL, "additional_special_tokens", "'<a>'"),
    ),
    "two lists": (
        {CONFIG: {**QWEN2, "additional_special_tokens": []}, SPECIAL: {"additional_special_tokens": [END]}},
        SHAPE.format(CONFIG, "has not the only list of special tokens"),
    ),
}


@pytest.mark.parametrize(("contents", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_could_give_other_ids_is_refused_by_name(
    tmp_path: Path, contents: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused) as caught:
        files.source(written(tmp_path, contents))
    assert caught.value.kind == RUN
    assert caught.value.text == f"the model has no tokenizer.json, {words}"


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({CONFIG: "["}, f"{CONFIG} cannot be read: "),
        ({CONFIG: "[]"}, f"{CONFIG} is not a JSON object"),
        ({CONFIG: QWEN2, "vocab.json": "[]"}, "vocab.json is not a JSON object"),
        (
            {CONFIG: QWEN2, "vocab.json": '{"a": 0, "a": 1}'},
            "vocab.json cannot be read: a stands in it twice",
        ),
        ({CONFIG: QWEN2, SPECIAL: "7"}, f"{SPECIAL} is not a JSON object"),
        (
            {CONFIG: QWEN2, "added_tokens.json": '{"a": NaN}'},
            "added_tokens.json cannot be read: a is not a finite",
        ),
    ],
)
def test_a_file_that_is_no_object_is_refused_by_name(
    tmp_path: Path, contents: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused) as caught:
        files.source(written(tmp_path, contents))
    assert caught.value.text.startswith(words)


def test_merges_that_are_no_text_are_refused(tmp_path: Path) -> None:
    written(tmp_path, {CONFIG: QWEN2})
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\n\xff \xfe\n")
    with pytest.raises(Refused) as caught:
        files.source(tmp_path)
    assert caught.value.text.startswith("merges.txt cannot be read: ")


@pytest.mark.parametrize(
    "change",
    [lambda text: text[:-1], lambda text: text.replace("\n", "\r\n"), lambda text: text.partition("\n")[2]],
)
def test_merges_that_every_release_reads_alike(tmp_path: Path, change: Any) -> None:
    _, plain = files.source(written(tmp_path, {CONFIG: QWEN2}))
    _, changed = files.source(written(tmp_path, {CONFIG: QWEN2, "merges.txt": change(MERGES)}))
    assert changed == plain
