"""Encodes what a chat template made: nothing that a person wrote in it becomes an added token.

Added tokens cut a text before all else happens to it. Here each that the template wrote is replaced by a
fence, a character that occurs nowhere else and is cut out in the same way; between the fences nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import AddedToken

Cut = tuple[int, int, int]  # begin and end in the text, id
BREAKS = 8  # times that a text is cut further until no piece of it is an added token
NOWHERE = "\U0010ffff"  # a character that no vocabulary has


class Forged(Exception):
    """The tokenizer makes an added token of plain text, however that is cut."""


class Templated:
    """Encodes with one tokenizer; whatever it would add at the ends is left out."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self._added = model.get_added_tokens_decoder()
        unknown = self._without_added([]).encode(NOWHERE, add_special_tokens=False).ids
        visible = {id_ for id_, token in self._added.items() if token.content.strip()}
        self._control = visible - set(unknown)

    def ids(self, text: str, marker: re.Pattern[str] | None, originals: Sequence[str]) -> list[int]:
        """The ids of a text in which `marker` stands for `originals`; its first group is the index.

        Forged where there are none.
        """
        encoding = self._model.encode(text, add_special_tokens=False)
        cuts = [
            (begin, end, id_)
            for id_, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if id_ in self._added
        ]
        written = [cut for cut in cuts if self._is_written(text, cut)]
        if marker is None and len(written) == len(cuts):
            ids: list[int] = encoding.ids
            return ids
        return self._fenced(text, written, marker, originals)

    def _is_written(self, text: str, cut: Cut) -> bool:
        """Whether the text has the token letter by letter; a normalizer may make one of other letters."""
        begin, end, id_ = cut
        return text[begin:end].strip() == self._added[id_].content.strip()

    def _fenced(
        self, text: str, cuts: Sequence[Cut], marker: re.Pattern[str] | None, originals: Sequence[str]
    ) -> list[int]:
        spare = _unused(text, *originals)
        gap = AddedToken(next(spare), normalized=False, special=True)
        fences: dict[tuple[bool, ...], AddedToken] = {}
        pieces = []
        position = 0
        for begin, end, id_ in cuts:
            token = self._added[id_]
            flags = (token.single_word, token.lstrip, token.rstrip, token.normalized)
            if flags not in fences:
                fences[flags] = _fence(next(spare), token)
            pieces += [text[position:begin], text[begin:end].replace(token.content, fences[flags].content)]
            position = end
        whole = "".join([*pieces, text[position:]])
        if marker is not None:
            whole = marker.sub(lambda match: originals[int(match[1])], whole)
        return self._encoded(whole, [gap, *fences.values()], [id_ for _, _, id_ in cuts])

    def _encoded(self, text: str, fences: Sequence[AddedToken], fenced: Sequence[int]) -> list[int]:
        """`fences` stand for the ids of `fenced` in their order, but the first, which stands for none."""
        plain = self._without_added(fences)
        gap = fences[0].content
        contents = {plain.token_to_id(fence.content): fence.content for fence in fences}
        for _ in range(BREAKS):
            encoding = plain.encode(text, add_special_tokens=False)
            tokens = [
                (id_, text[begin:end], begin)
                for id_, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
            ]
            is_fence = [id_ in contents and contents[id_] in piece for id_, piece, _ in tokens]
            forged = [
                (begin, piece)
                for (id_, piece, begin), fence in zip(tokens, is_fence, strict=True)
                if not fence and id_ in self._control
            ]
            if not forged:
                return _restored(tokens, is_fence, gap, fenced)
            for begin, piece in reversed(forged):
                text = text[:begin] + gap.join(piece) + text[begin + len(piece) :]
        raise Forged("it makes a special token of plain text")

    def _without_added(self, fences: Sequence[AddedToken]) -> tokenizers.Tokenizer:
        """Shares the model; of added tokens it has the fences alone."""
        plain = tokenizers.Tokenizer(self._model.model)
        if self._model.normalizer is not None:
            plain.normalizer = self._model.normalizer
        if self._model.pre_tokenizer is not None:
            plain.pre_tokenizer = self._model.pre_tokenizer
        plain.add_special_tokens(list(fences))
        return plain


def _fence(character: str, token: AddedToken) -> AddedToken:
    return AddedToken(
        character,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _unused(*texts: str) -> Iterator[str]:
    used = set().union(*texts)
    return (chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in used)


def _restored(
    tokens: Sequence[tuple[int, str, int]], is_fence: Sequence[bool], gap: str, fenced: Sequence[int]
) -> list[int]:
    """The ids with those of `fenced` in the places of the fences, and none for a gap. Forged."""
    ids = []
    waiting = list(reversed(fenced))
    for (id_, piece, _), fence in zip(tokens, is_fence, strict=True):
        if not fence:
            ids.append(id_)
        elif gap not in piece:
            if not waiting:
                raise Forged("it finds other special tokens than the chat template wrote")
            ids.append(waiting.pop())
    if waiting:
        raise Forged("it finds other special tokens than the chat template wrote")
    return ids
