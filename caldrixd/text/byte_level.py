"""vocab.json and merges.txt, as GPT-2 and Qwen2 were published, made into what a tokenizer.json would hold.

The ids are those of transformers' class of that name in every release: what could give others is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import parse, reason_of, text_of
from caldrixd.text.added import ADDED, DECODER, SPECIAL, Sources, Token
from caldrixd.text.config import FILE as CONFIG
from caldrixd.text.config import MAX_BYTES as MAX_CONFIG

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
MODEL_CONFIG = "config.json"
MAX_VOCABULARY = 64 << 20
MAX_TOKENS = 1 << 20

# The bytes of a file by its name, of at most so many; Refused for more.
Read = Callable[[str, int], bytes]

_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CASES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


@dataclass(frozen=True)
class Style:
    """How a class of transformers reads the two files.

    `pattern` cuts a text into words (None: the library's own, which is GPT-2's). `defaults` are the special
    tokens of a config that names none. `options` may be set. A strict class needs merges.txt to begin with
    #version and to end with a line feed: without them some releases lose a merge.
    """

    pattern: str | None
    defaults: Mapping[str, str]
    strict: bool = False
    options: Collection[str] = ()


_END = "<|endoftext|>"
_QWEN_DEFAULTS = MappingProxyType(dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END))
STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "GPT2Tokenizer": Style(
            None,
            MappingProxyType(dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)),
            strict=True,
            options=("add_prefix_space", "add_bos_token"),
        ),
        "Qwen2Tokenizer": Style(QWEN2, _QWEN_DEFAULTS),
    }
)

# Models whose class transformers has come to choose by the type of the model, whatever the repo says.
CLASS_OF_TYPE: Mapping[str, str] = MappingProxyType(
    {
        "qwen2": "Qwen2Tokenizer",
        "qwen3_5": "Qwen3_5Tokenizer",
        "qwen3_5_text": "Qwen3_5Tokenizer",
    }
)

# What may be set, and to what without changing an id in any release of transformers.
_HARMLESS: Mapping[str, Collection[Any]] = MappingProxyType(
    {
        "add_prefix_space": (None, False),
        "add_bos_token": (None, False),
        "add_eos_token": (None, False),
        "split_special_tokens": (None, False),
        "errors": (None, "replace"),
        "dropout": (None, 0, 0.0),
        "auto_map": (None,),
        "init_inputs": (None, [], ()),
    }
)


def convert(names: Collection[str], read: Read, holder: str) -> dict[str, Any]:
    """The object of a tokenizer.json with the ids that transformers gives. `names` are the files there are.

    `holder` is "repo" or "model", as a refusal is to call it. Refused "tokenizer/..." or "config/...".
    """

    def optional(name: str, limit: int) -> dict[str, Any]:
        return _object(name, read(name, limit)) if name in names else {}

    config = optional(CONFIG, MAX_CONFIG)
    model_type = optional(MODEL_CONFIG, MAX_CONFIG).get("model_type")
    style = _style(config.get("tokenizer_class"), model_type, holder)
    _check_options(config, style, holder)
    vocabulary = _vocabulary(_object(VOCABULARY, read(VOCABULARY, MAX_VOCABULARY)), holder)
    merges = _merges(read(MERGES, MAX_VOCABULARY), vocabulary, style, holder)
    legacy = (SPECIAL, ADDED) if DECODER not in config else ()
    special, added = (optional(name, MAX_CONFIG) if name in legacy else {} for name in (SPECIAL, ADDED))
    sources = Sources(config, special, added, style.defaults, holder, again=not style.strict)
    tokens = sources.tokens(vocabulary)
    prefix = config.get("add_prefix_space") is True
    begin = sources.named("bos_token") if config.get("add_bos_token") else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token.state() for token in sorted(tokens.values(), key=lambda token: token.id)],
        "normalizer": {"type": "NFC"} if style.pattern else None,
        "pre_tokenizer": _pre_tokenizer(style.pattern, prefix),
        "post_processor": None if begin is None else _begins_with(tokens[begin]),
        "decoder": _byte_level(True, True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _object(name: str, data: bytes) -> dict[str, Any]:
    try:
        value = parse(data)
    except ValueError as error:
        raise Refused("config/unreadable", file=name, reason=reason_of(error)) from None
    if type(value) is not dict:
        raise Refused("config/not-an-object", file=name)
    return value


def _style(name: Any, model_type: Any, holder: str) -> Style:
    if name is None:
        raise Refused("tokenizer/guess", holder=holder, reason=f"{CONFIG} names no tokenizer_class")
    plain = name.removesuffix("Fast") if type(name) is str else ""
    if plain not in STYLES:
        raise Refused("tokenizer/other-class", holder=holder, name=ascii(name)[:80])
    known = CLASS_OF_TYPE.get(model_type) if type(model_type) is str else None
    if known not in (None, plain):
        reason = f"{CONFIG} names {plain} where a {model_type} model has {known}"
        raise Refused("tokenizer/guess", holder=holder, reason=reason)
    return STYLES[plain]


def _check_options(config: Mapping[str, Any], style: Style, holder: str) -> None:
    for name, values in _HARMLESS.items():
        value = config.get(name)
        known = name in style.options and type(value) is bool
        if not known and not any(value == other and type(value) is type(other) for other in values):
            raise Refused("tokenizer/option", holder=holder, file=CONFIG, field=name, value=ascii(value)[:80])


def _refuse_shape(holder: str, file: str, shape: str) -> NoReturn:
    raise Refused("tokenizer/shape", holder=holder, file=file, shape=shape)


def _vocabulary(table: dict[str, Any], holder: str) -> dict[str, int]:
    """Tokens and their ids, which are 0, 1, ... in any order, all 256 bytes among them."""
    if len(table) > MAX_TOKENS:
        _refuse_shape(holder, VOCABULARY, f"has {len(table)} tokens (over {MAX_TOKENS})")
    if any(type(id_) is not int for id_ in table.values()) or set(table.values()) != set(range(len(table))):
        _refuse_shape(holder, VOCABULARY, "has ids that are not 0, 1, 2 and so on")
    lacking = sum(letter not in table for letter in _alphabet())
    if lacking:
        _refuse_shape(holder, VOCABULARY, f"lacks {lacking} of the 256 bytes")
    return table


def _alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else one after U+00FF."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in shown] + [chr(0x100 + index) for index in range(256 - len(shown))]


def _merges(data: bytes, vocabulary: dict[str, int], style: Style, holder: str) -> list[list[str]]:
    try:
        text = text_of(data)
    except ValueError as error:
        raise Refused("config/unreadable", file=MERGES, reason=reason_of(error)) from None
    lines = text.replace("\r\n", "\n").split("\n")
    headed = lines[0].startswith("#version")
    if style.strict and not headed:
        raise Refused("tokenizer/guess", holder=holder, reason=f"{MERGES} does not begin with #version")
    if lines[-1]:
        if style.strict:
            reason = f"the last line of {MERGES} does not end with a line feed"
            raise Refused("tokenizer/guess", holder=holder, reason=reason)
        lines.append("")
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines[headed:-1], 1 + headed):
        left, space, right = line.partition(" ")
        if not left or not space or not right or " " in right or line.startswith("#version"):
            _refuse_shape(holder, MERGES, f"has a line {number} that is no pair of tokens")
        for token in (left, right, left + right):
            if token not in vocabulary:
                where = f"line {number} of {MERGES}"
                raise Refused(
                    "tokenizer/not-in-vocabulary", holder=holder, where=where, name=ascii(token)[:80]
                )
        if (left, right) in pairs:
            _refuse_shape(holder, MERGES, f"has the pair of line {number} twice")
        pairs[left, right] = None
    return [[left, right] for left, right in pairs]


def _pre_tokenizer(pattern: str | None, prefix: bool) -> dict[str, Any]:
    if pattern is None:
        return _byte_level(prefix, True)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False, False)]}


def _byte_level(prefix: bool, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _begins_with(token: Token) -> dict[str, Any]:
    name = {"SpecialToken": {"id": token.content, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [name, text],
        "pair": [name, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token.content: {"id": token.content, "ids": [token.id], "tokens": [token.content]}
        },
    }
