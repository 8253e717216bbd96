"""Two small tokenizers, byte-level and with byte fallback, and templates that are closed after the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from caldrixd.models import gate
from caldrixd.spec import ModelSpec
from caldrixd.text import template, tokenizer
from caldrixd.text.child import Limits
from caldrixd.text.template import LIMITS, ChatTemplate
from caldrixd.text.tokenizer import Tokenizer
from tests.support.models import tiny

TINY = tiny("tiny-llama")
PIECES = ("▁", "a", "b", "c", "h", "i", "é", "ab", "▁a", "▁ab", "hi", "▁hi")
MERGES = (("a", "b"), ("▁", "a"), ("▁a", "b"), ("h", "i"), ("▁", "hi"))


@pytest.fixture
def spec() -> ModelSpec:
    """The spec of tiny-llama: 512 tokens, BOS 1, EOS 2."""
    return gate.read_spec(TINY)


@pytest.fixture
def byte_level(spec: ModelSpec) -> Tokenizer:
    return tokenizer.load(TINY, spec)


def byte_fallback_model() -> tokenizers.Tokenizer:
    """As sentencepiece models are converted: ▁ for a space, <0x..> for unknown bytes, <s> before a text."""
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = tokenizers.Tokenizer(
        models.BPE(vocabulary, list(MERGES), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model


@pytest.fixture
def byte_fallback(spec: ModelSpec, tmp_path: Path) -> Tokenizer:
    directory = tmp_path / "byte-fallback"
    directory.mkdir()
    byte_fallback_model().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tokenizer.load(directory, spec)


MakeTemplate = Callable[..., ChatTemplate]


@pytest.fixture
def make_template(tmp_path: Path) -> Iterator[MakeTemplate]:
    """Load a chat template from source text, with a clock that stands still."""
    made: list[ChatTemplate] = []

    def make(source: str, *, config: dict[str, Any] | None = None, limits: Limits = LIMITS) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_bytes(source.encode("utf-8", "surrogatepass"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
        loaded = template.load(tmp_path, clock=lambda: datetime(2024, 7, 3, 9, 5), limits=limits)
        assert loaded is not None
        made.append(loaded)
        return loaded

    yield make
    for loaded in made:
        loaded.close()
