"""Reads a tokenizer.json and encodes with it, in a confined process: its patterns and rules are a stranger's.

Run by tokenizer.py. The first request holds the file (`source`); its answer has what decoding needs. The
others ask for the ids of a text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import tokenizers

from caldrixd.text.confined import Frame, limit_process, serve
from caldrixd.text.templated import Templated

MAX_TOKENS = 1 << 20
MAX_ADDED_TOKENS = 1 << 16
MAX_TOKEN = 1 << 16
MAX_DECODER_STEPS = 64


class Unusable(Exception):
    """The file cannot be used; the text says why."""


def load(source: str) -> tokenizers.Tokenizer:
    """The tokenizer of a file's text. Unusable for what is too much, or not plain enough to decode with."""
    model = tokenizers.Tokenizer.from_str(source)
    # Stored settings would cut or fill up every prompt in silence.
    model.no_truncation()
    model.no_padding()
    vocabulary = model.get_vocab(with_added_tokens=True)
    if len(vocabulary) > MAX_TOKENS:
        raise Unusable(f"it has {len(vocabulary)} tokens, over {MAX_TOKENS}")
    added = len(model.get_added_tokens_decoder())
    if added > MAX_ADDED_TOKENS:
        raise Unusable(f"it adds {added} tokens to its vocabulary, over {MAX_ADDED_TOKENS}")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise Unusable("two of its tokens have the same id")
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN:
        raise Unusable(f"it has a token of {longest} characters, over {MAX_TOKEN}")
    return model


def check_decoder(decoder: Any) -> None:
    """Decoding is not confined, so its steps must be known, few, and never make a text longer. Unusable."""
    for count, step in enumerate(_steps(decoder), 1):
        if count > MAX_DECODER_STEPS:
            raise Unusable(f"its decoder has over {MAX_DECODER_STEPS} steps")
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) > len(pattern):
                raise Unusable("its decoder replaces by a regular expression or by a longer text")


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


class Encoder:
    """Answers the requests of one tokenizer."""

    def __init__(self) -> None:
        self._model: tokenizers.Tokenizer | None = None
        self._templated: Templated | None = None

    def answer(self, request: Frame) -> Frame:
        """Outcome and fields. The library's panics are BaseExceptions."""
        try:
            if "source" in request:
                return self._load(request["source"])
            if "marker" in request:
                assert self._templated is not None
                marker = None if request["marker"] is None else re.compile(request["marker"])
                ids = self._templated.ids(request["text"], marker, request["originals"])
            else:
                assert self._model is not None
                ids = self._model.encode(request["text"], add_special_tokens=request["special"]).ids
            return {"outcome": "ids", "ids": ids}
        except MemoryError:
            raise
        except BaseException as error:
            return {"outcome": "failed", "text": str(error)[:1000] or type(error).__name__}

    def _load(self, source: str) -> Frame:
        self._model = model = load(source)
        self._templated = Templated(model)
        decoder = None if model.decoder is None else json.loads(model.decoder.__getstate__())
        check_decoder(decoder)
        added = model.get_added_tokens_decoder()
        return {
            "outcome": "loaded",
            "vocabulary": model.get_vocab(with_added_tokens=True),
            "added": {id_: [token.content, token.special] for id_, token in added.items()},
            "decoder": decoder,
        }


def main() -> None:
    memory, seconds, _ = map(int, sys.argv[1:])
    limit_process(memory)
    serve(Encoder().answer, seconds=seconds)


if __name__ == "__main__":
    main()
