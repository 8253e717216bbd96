"""Which files are a model's tokenizer, from their names and the small ones among them, before any weight."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import START, read_bytes, reason_of, stands_for
from caldrixd.text.added import ADDED, SPECIAL
from caldrixd.text.byte_level import MERGES, VOCABULARY, Read, convert
from caldrixd.text.config import FILE as CONFIG

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER = 64 << 20
# All that a tokenizer is made of; each is small beside weights.
NAMES = (TOKENIZER, CONFIG, VOCABULARY, MERGES, SPECIAL, ADDED)

# How files of other kinds are named, and what they hold.
OTHER_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer.model": "a SentencePiece or tiktoken model",
        "spiece.model": "a SentencePiece model",
        "sentencepiece.bpe.model": "a SentencePiece model",
        "sentencepiece.model": "a SentencePiece model",
        "tiktoken.model": "a tiktoken model",
        "qwen.tiktoken": "a tiktoken model",
        "tekken.json": "a tekken model",
        "vocab.txt": "a WordPiece vocabulary",
        "bpe.codes": "a subword-nmt model",
        "rwkv_vocab_v20230424.txt": "an RWKV vocabulary",
        "vocab.json": "a vocabulary without merges.txt",
        "merges.txt": "merges without vocab.json",
    }
)


def check(names: Collection[str], read: Read, holder: str) -> None:
    """Whether the files of these names are a tokenizer. Refused "tokenizer/..." or "config/...".

    tokenizer.json is enough and is not read. Without one, `read(name, limit)` is asked for small files among
    `names`. `holder` is what refusals call it: "repo" for one on the hub, "model" for one on disk.
    """
    if TOKENIZER not in names:
        _converted(names, read, holder)


def needed(names: Collection[str]) -> tuple[str, ...]:
    """Those of `names` that the tokenizer is made of."""
    made_of = (TOKENIZER, CONFIG) if TOKENIZER in names else NAMES
    return tuple(name for name in made_of if name in names)


def check_directory(directory: Path) -> None:
    """The same of a model directory, of whose tokenizer.json the beginning is read.

    Refused also "tokenizer/invalid" for one that is none.
    """
    names, read = _on_disk(directory)
    check(names, read, "model")
    if TOKENIZER in names:
        start = read_bytes(directory / TOKENIZER, MAX_TOKENIZER, START)
        if reason := stands_for(start):
            raise Refused("tokenizer/invalid", file=TOKENIZER, reason=reason)


def source(directory: Path) -> tuple[str, bytes]:
    """The tokenizer.json of a model directory, or what it would be, and the file to name when it is bad.

    Refused "tokenizer/..." or "config/...".
    """
    names, read = _on_disk(directory)
    if TOKENIZER in names:
        return TOKENIZER, read(TOKENIZER, MAX_TOKENIZER)
    return VOCABULARY, json.dumps(_converted(names, read, "model")).encode()


def _on_disk(directory: Path) -> tuple[Collection[str], Read]:
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise Refused("model/not-readable", path=directory, reason=reason_of(error)) from None
    return names, lambda name, limit: read_bytes(directory / name, limit)


def _converted(names: Collection[str], read: Read, holder: str) -> dict[str, Any]:
    if VOCABULARY in names and MERGES in names:
        return convert(names, read, holder)
    for name, kind in OTHER_KINDS.items():
        if name in names:
            raise Refused("tokenizer/other-kind", holder=holder, name=name, kind=kind)
    raise Refused("tokenizer/missing", path=f"the {holder}")
