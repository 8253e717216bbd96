"""The added tokens of a model without tokenizer.json, from the files where transformers looks for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from caldrix_protocol.refusals import Refused
from caldrixd.text.config import FILE as CONFIG

# tokenizer_config.json has all of them under this name, or two other files do.
DECODER = "added_tokens_decoder"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_ADDED = 1 << 16


@dataclass(frozen=True)
class Token:
    """One added token, as a tokenizer.json has it."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    def state(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Special:
    """A token that a field of a file calls special."""

    file: str
    field: str
    token: Token


@dataclass(frozen=True)
class Sources:
    """The objects of the files. `defaults` are special tokens by field; `holder` is what refusals call this.

    `again` says that the class adds the special tokens a second time, without their flags.
    """

    config: Mapping[str, Any]
    special: Mapping[str, Any]
    added: Mapping[str, Any]
    defaults: Mapping[str, str]
    holder: str
    again: bool

    def tokens(self, vocabulary: Mapping[str, int]) -> dict[str, Token]:
        """By content, with the ids they have in the vocabulary or get after it. Refused "tokenizer/..."."""
        self._check_lists()
        tokens = self._declared()
        if len(tokens) > MAX_ADDED:
            self._refuse(self._place, f"adds {len(tokens)} tokens to the vocabulary (over {MAX_ADDED})")
        free = len(vocabulary)
        for token in sorted(tokens.values(), key=lambda token: token.id):
            expected = vocabulary.get(token.content, free)
            if token.id != expected:
                self._refuse(self._place, f"gives {_shown(token.content)} the id {token.id}, not {expected}")
            free += expected == free
        special = {found.token.content: self._settled(found, tokens, vocabulary) for found in self._special()}
        return tokens | special

    def _settled(
        self, special: Special, declared: Mapping[str, Token], vocabulary: Mapping[str, int]
    ) -> Token:
        """A special token: as it is declared, else with its id in the vocabulary."""
        content = special.token.content
        token = declared.get(content)
        if token is None:
            if special.field not in NAMED + LISTS:
                self._refuse_option(special)
            if content not in vocabulary:
                where = f"the {special.field} of {special.file}"
                name = _shown(content)
                raise Refused("tokenizer/not-in-vocabulary", holder=self.holder, where=where, name=name)
            token = replace(special.token, id=vocabulary[content])
        flagged = token.single_word or token.lstrip or token.rstrip or (self.again and token.normalized)
        if flagged or not token.special:
            self._refuse_option(special)
        return token

    def _check_lists(self) -> None:
        """Which of several lists counts is another in each release."""
        files = (self.config, self.special)
        lists = [file[name] for file in files for name in LISTS if file.get(name) is not None]
        if any(other != lists[0] for other in lists):
            self._refuse(CONFIG, "has not the only list of special tokens")

    @property
    def _place(self) -> str:
        return CONFIG if DECODER in self.config else ADDED

    def _refuse(self, file: str, shape: str) -> NoReturn:
        raise Refused("tokenizer/shape", holder=self.holder, file=file, shape=shape)

    def _refuse_option(self, special: Special) -> NoReturn:
        value = _shown(special.token.content)
        raise Refused(
            "tokenizer/option", holder=self.holder, file=special.file, field=special.field, value=value
        )

    def _declared(self) -> dict[str, Token]:
        if DECODER not in self.config:
            return self._legacy()
        table = self.config[DECODER]
        if type(table) is not dict:
            self._refuse(CONFIG, f"has a {DECODER} that is no object")
        tokens: dict[str, Token] = {}
        for number, value in table.items():
            if not number.isascii() or not number.isdigit() or len(number) > 9:
                self._refuse(CONFIG, f"has the token id {_shown(number)}")
            token = self._token(CONFIG, DECODER, value)
            if token.content in tokens:
                self._refuse(CONFIG, f"adds {_shown(token.content)} twice")
            tokens[token.content] = replace(token, id=int(number))
        return tokens

    def _legacy(self) -> dict[str, Token]:
        special: set[str] = set()
        for found in self._special():
            listed = found.file == SPECIAL and found.field in LISTS
            if listed and found.token.content in self.added and not self.again:
                self._refuse_option(found)
            special.add(found.token.content)
        for content, id_ in self.added.items():
            if type(id_) is not int or not content:
                self._refuse(ADDED, f"gives {_shown(content)} the id {_shown(id_)}")
        return {
            content: Token(id_, content, normalized=content not in special, special=content in special)
            for content, id_ in self.added.items()
        }

    def _special(self) -> Iterator[Special]:
        """The tokens that are called special, the last file's word on a field counting."""
        for field, value in {**self.defaults, **self.config, **self.special}.items():
            file = SPECIAL if field in self.special else CONFIG
            if field in LISTS and value is not None:
                if type(value) is dict:
                    value = list(value.values())
                if type(value) is not list:
                    self._refuse(file, f"has {field} that is no list")
                for item in value:
                    yield Special(file, field, self._token(file, field, item, special=True))
            elif field.endswith("_token") and type(value) in (str, dict):
                yield Special(file, field, self._token(file, field, value, special=True))

    def named(self, field: str) -> str | None:
        """The content of one special token."""
        return next((found.token.content for found in self._special() if found.field == field), None)

    def _token(self, file: str, field: str, value: Any, *, special: bool = False) -> Token:
        """A token without its id; flags that are not given are what the library takes them for."""
        if type(value) is str and special:
            value = {"content": value}
        if type(value) is not dict or not {*value} <= {"content", "__type", *FLAGS}:
            self._refuse(file, f"has in {field} what is no token")
        content = value.get("content")
        flags = {name: value[name] for name in FLAGS if name in value}
        if type(content) is not str or not content or any(type(flag) is not bool for flag in flags.values()):
            self._refuse(file, f"has in {field} what is no token")
        if special or flags.get("special"):
            return Token(0, content, **{"normalized": False, **flags, "special": True})
        return Token(0, content, **{"normalized": True, **flags, "special": False})


def _shown(value: Any) -> str:
    return ascii(value)[:80]
