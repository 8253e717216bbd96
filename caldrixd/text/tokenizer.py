"""Text to token ids and back, by the tokenizer.json of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_bytes, reason_of
from caldrixd.spec import ModelSpec
from caldrixd.text.config import read_config, special_token

MAX_TOKENIZER = 64 << 20
MAX_TOKENS = 1 << 21
MAX_ADDED_TOKENS = 1 << 16

FILE = "tokenizer.json"


def load(directory: Path, spec: ModelSpec) -> Tokenizer:
    """The tokenizer of a model directory. Refused "tokenizer/..." or "config/..."."""
    if not (directory / FILE).exists():
        raise Refused("tokenizer/missing", path=directory)
    data = read_bytes(directory / FILE, MAX_TOKENIZER)
    with _border("tokenizer/invalid", file=FILE):
        model = tokenizers.Tokenizer.from_buffer(data)
        # Stored settings would cut or fill up every prompt in silence.
        model.no_truncation()
        model.no_padding()
    count = model.get_vocab_size(with_added_tokens=True)
    if count > MAX_TOKENS:
        raise Refused("tokenizer/invalid", file=FILE, reason=f"it has {count} tokens, over {MAX_TOKENS}")
    added = len(model.get_added_tokens_decoder())
    if added > MAX_ADDED_TOKENS:
        reason = f"it adds {added} tokens to its vocabulary, over {MAX_ADDED_TOKENS}"
        raise Refused("tokenizer/invalid", file=FILE, reason=reason)
    return Tokenizer(model, read_config(directory), spec)


@contextmanager
def _border(code: str, **fields: Any) -> Iterator[None]:
    """Every failure of the library becomes a refusal, also its panics, which are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Refused):
        raise
    except BaseException as error:
        raise Refused(code, reason=reason_of(error), **fields) from None


class Tokenizer:
    """`eos_ids` end a reply; `bos_id` starts an empty prompt. Every method may raise "tokenizer/failed"."""

    def __init__(self, model: tokenizers.Tokenizer, config: dict[str, Any], spec: ModelSpec) -> None:
        self._model = model
        self._plain: tokenizers.Tokenizer | None = None
        self._vocab_size = spec.vocab_size
        self._added = {
            id_: (token.content, bool(token.special))
            for id_, token in model.get_added_tokens_decoder().items()
        }
        self._joins_bytes = b'"ByteFallback"' in model.decoder.__getstate__() if model.decoder else False
        self.bos_id = self._token_id(config, "bos_token", spec.bos_id)
        eos_id = self._token_id(config, "eos_token", None)
        self.eos_ids = frozenset(spec.eos_ids if eos_id is None else (*spec.eos_ids, eos_id))

    def _token_id(self, config: dict[str, Any], name: str, default: int | None) -> int | None:
        token = special_token(config, name)
        found = None if token is None else self._model.token_to_id(token)
        return default if found is None or found >= self._vocab_size else found

    @cached_property
    def added_tokens(self) -> re.Pattern[str] | None:
        """Finds whatever `encode` would read as an added token; None where the tokenizer has none."""
        contents = sorted((content for content, _ in self._added.values() if content), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Special tokens written in the text become such; `add_special` adds the tokenizer's own rule."""
        with _border("tokenizer/failed"):
            return self._known(self._model.encode(text, add_special_tokens=add_special).ids)

    def encode_shielded(self, text: str, marker: re.Pattern[str], originals: Sequence[str]) -> list[int]:
        """Encode text in which `marker` stands for `originals` that must not become added tokens.

        The marker's first group is the index into `originals`. Added tokens cut a text before anything
        else happens to it, so the pieces between those that stay are encoded by themselves, without any.
        """
        ids: list[int] = []
        position = 0

        def restored(piece: str) -> list[int]:
            whole = marker.sub(lambda match: originals[int(match[1])], piece)
            return self._without_added().encode(whole, add_special_tokens=False).ids if whole else []

        with _border("tokenizer/failed"):
            marked = self._model.encode(text, add_special_tokens=False)
            for id_, (begin, end) in zip(marked.ids, marked.offsets, strict=True):
                if id_ in self._added:
                    ids += [*restored(text[position:begin]), id_]
                    position = end
            ids += restored(text[position:])
            return self._known(ids)

    def _without_added(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            table = json.loads(self._model.to_str())
            table["added_tokens"] = []
            table["post_processor"] = None
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(table))
        return self._plain

    def _known(self, ids: list[int]) -> list[int]:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise Refused("message/unknown-token", token=largest, count=self._vocab_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; bytes that are no character become U+FFFD."""
        with _border("tokenizer/failed"):
            return self._model.decode(list(ids), skip_special_tokens=True)

    def is_silent(self, id_: int) -> bool:
        """Whether `decode` leaves this id out: a special token, or none at all."""
        if id_ in self._added:
            return self._added[id_][1]
        return self._model.id_to_token(id_) is None

    def is_byte(self, id_: int) -> bool:
        """Whether the id is one raw byte, whose meaning depends on the bytes around it."""
        if not self._joins_bytes:
            return False
        token = self._model.id_to_token(id_)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
