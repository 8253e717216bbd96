"""Text to token ids and back, by the tokenizer.json of a model.

The file is read and texts are encoded by a confined process (encoder.py). Ids are decoded here, a token at a
time, from the vocabulary and the decoder that it found in the file.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import CUT, reason_of, text_of
from caldrixd.spec import ModelSpec
from caldrixd.text import files
from caldrixd.text.child import Broken, Child, Limits, OverMemory, TooSlow
from caldrixd.text.config import read_config, special_token

MIB = 1 << 20
UNFINISHED = "EOF while parsing"  # what the library says of a document without its end
# A text of the largest size that is encoded at all takes about a third of these.
LIMITS = Limits(seconds=30, memory=2048 * MIB, output=64 * MIB)


def load(directory: Path, spec: ModelSpec, limits: Limits = LIMITS) -> Tokenizer:
    """The tokenizer of a model directory, its process started. Refused "tokenizer/..." or "config/..."."""
    return Tokenizer(directory, spec, limits)


@dataclass(frozen=True)
class Vocabulary:
    """What decoding needs: tokens by id, the added ones among them with whether they are special."""

    tokens: Mapping[int, str]
    added: Mapping[int, tuple[str, bool]]
    decoder: Any

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Vocabulary:
        tokens = {id_: token for token, id_ in answer["vocabulary"].items()}
        added = {int(id_): (content, special) for id_, (content, special) in answer["added"].items()}
        return Vocabulary(tokens, added, answer["decoder"])

    def texts(self, count: int) -> list[str | None]:
        """The token of each id below `count`; None where it has no text: a special token, or none at all."""
        silent = {id_ for id_, (_, special) in self.added.items() if special}
        return [None if id_ in silent else self.tokens.get(id_) for id_ in range(count)]


class Tokenizer:
    """`eos_ids` end a reply; `bos_id` starts an empty prompt. Every method may raise "tokenizer/..."."""

    def __init__(self, directory: Path, spec: ModelSpec, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits
        self._lock = threading.Lock()
        self._child, self._vocabulary = self._start()
        self._vocab_size = spec.vocab_size
        self._texts = self._vocabulary.texts(spec.vocab_size)
        decoder = self._vocabulary.decoder
        self._joins_bytes = '"ByteFallback"' in json.dumps(decoder)
        self._decoder = _decoder(decoder)
        config = read_config(directory)
        self.bos_id = self._token_id(config, "bos_token", spec.bos_id)
        eos_id = self._token_id(config, "eos_token", None)
        self.eos_ids = frozenset(spec.eos_ids if eos_id is None else (*spec.eos_ids, eos_id))

    def _start(self) -> tuple[Child, Vocabulary]:
        child = Child("caldrixd.text.encoder", self._limits)
        name, source = files.source(self._directory)
        try:
            answer = child.ask({"source": text_of(source)})
        except (TooSlow, OverMemory, Broken, ValueError) as error:
            reason = self._words(error)
        else:
            if answer.get("outcome") == "loaded":
                return child, Vocabulary.of(answer)
            reason = " ".join(str(answer.get("text")).split())[:200]
            if reason.startswith(UNFINISHED):
                reason = CUT
        child.close()
        raise Refused("tokenizer/invalid", file=name, reason=reason)

    def _words(self, error: Exception) -> str:
        if isinstance(error, TooSlow):
            return f"reading it took over {self._limits.seconds} s"
        if isinstance(error, OverMemory):
            return f"reading it took more than {self._limits.memory // MIB} MiB of memory"
        return reason_of(error)

    def _token_id(self, config: Mapping[str, Any], name: str, default: int | None) -> int | None:
        token = special_token(config, name)
        tokens = self._vocabulary.tokens
        found = None if token is None else next((id_ for id_, text in tokens.items() if text == token), None)
        return default if found is None or found >= self._vocab_size else found

    @cached_property
    def added_tokens(self) -> re.Pattern[str]:
        """Finds whatever `encode` would read as an added token, but for those that are spaces."""
        return _any_of(content for content, _ in self._vocabulary.added.values())

    @cached_property
    def special_tokens(self) -> re.Pattern[str]:
        """Finds whatever `encode` would read as a special token."""
        return _any_of(content for content, special in self._vocabulary.added.values() if special)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Special tokens written in the text become such; `add_special` adds the tokenizer's own rule."""
        return self._ids({"text": text, "special": add_special})

    def encode_templated(
        self, text: str, marker: re.Pattern[str] | None = None, originals: Sequence[str] = ()
    ) -> list[int]:
        """Encode what a chat template made: only added tokens that it has letter by letter become such.

        `marker` stands for `originals`, which never become added tokens; its first group is the index.
        """
        pattern = None if marker is None else marker.pattern
        return self._ids({"text": text, "marker": pattern, "originals": list(originals)})

    def _ids(self, request: dict[str, Any]) -> list[int]:
        with self._lock:
            if not self._child.alive:
                self._child, _ = self._start()
            try:
                answer = self._child.ask(request)
            except TooSlow:
                raise Refused("tokenizer/too-slow", seconds=self._limits.seconds) from None
            except OverMemory:
                raise Refused("tokenizer/memory", limit=self._limits.memory // MIB) from None
            except Broken as error:
                raise Refused("tokenizer/failed", reason=reason_of(error)) from None
        if answer.get("outcome") != "ids":
            raise Refused("tokenizer/failed", reason=" ".join(str(answer.get("text")).split())[:200])
        return self._known(answer["ids"])

    def _known(self, ids: list[int]) -> list[int]:
        largest = max(ids, default=0)
        if largest >= self._vocab_size:
            raise Refused("message/unknown-token", token=largest, count=self._vocab_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; bytes that are no character become U+FFFD."""
        texts = self._texts
        tokens = [text for id_ in ids if id_ < len(texts) and (text := texts[id_]) is not None]
        if self._decoder is None:
            return " ".join(tokens)
        try:
            decoded: str = self._decoder.decode(tokens)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # also the library's panics
            raise Refused("tokenizer/failed", reason=reason_of(error)) from None
        return decoded

    def is_silent(self, id_: int) -> bool:
        """Whether `decode` leaves this id out: a special token, or none at all."""
        return id_ >= len(self._texts) or self._texts[id_] is None

    def is_byte(self, id_: int) -> bool:
        """Whether the id is one raw byte, whose meaning depends on the bytes around it."""
        if not self._joins_bytes:
            return False
        token = self._vocabulary.tokens.get(id_)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the contents; those without a letter to see are left out."""
    longest_first = sorted(filter(str.strip, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _decoder(state: Any) -> Any:
    """The library's decoder, which can only be made as a part of a tokenizer."""
    if state is None:
        return None
    table = {"version": "1.0", "added_tokens": [], "decoder": state}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return tokenizers.Tokenizer.from_str(json.dumps({**table, "model": model})).decoder
