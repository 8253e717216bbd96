"""The knobs of sampling, as flags give them and as a chat changes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from caldrix_protocol.option import Option
from caldrix_protocol.options import find
from caldrix_protocol.refusals import Refused

OFF = "off"  # back to the default


class Sampling(NamedTuple):
    """How the next token is picked. The fields are those of `generate`; the defaults pick the most likely."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def set(self, name: str, text: str) -> Sampling:
        """With one knob as it was typed (`name` as in `--top-k` without the dashes), or `off`.

        Raises Refused of kind "usage", which names the knob as a chat's command.
        """
        option = _option(name)
        try:
            value = option.default if text == OFF else option.check(text)
        except Refused as refused:
            raise Refused(refused.code, **{**refused.fields, "name": f"/{name}"}) from None
        return self._replace(**{option.key: value})

    def shown(self, name: str) -> str:
        """The value of one knob as it can be typed."""
        value: Any = getattr(self, _option(name).key)
        return OFF if value is None else str(value).removesuffix(".0")

    def line(self) -> str:
        """All knobs with their values."""
        names = [field.replace("_", "-") for field in self._fields]
        return ", ".join(f"{name} {self.shown(name)}" for name in names)


def _option(name: str) -> Option:
    return find("run", f"--{name}")
