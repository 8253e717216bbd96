"""The chat template of a model, rendered by a confined process (renderer.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_bytes, read_object, reason_of, text_of
from caldrixd.text.child import Broken, Child, Limits, OverMemory, TooSlow
from caldrixd.text.config import MAX_BYTES, read_config, special_token

MIB = 1 << 20
MAX_SOURCE = 1 << 20
FILE = "chat_template.jinja"
OF_PROCESSOR = "chat_template.json"
LIMITS = Limits(seconds=5, memory=512 * MIB, output=8 * MIB)
_REFUSALS = {"raised": "template/raised", "failed": "template/failed", "invalid": "template/invalid"}


def load(
    directory: Path, *, clock: Callable[[], datetime] = datetime.now, limits: Limits = LIMITS
) -> ChatTemplate | None:
    """The template of a model directory, its renderer started; None where the model has none.

    chat_template.jinja wins over tokenizer_config.json, and that over chat_template.json, which is there for
    pictures. Nothing is compiled yet.
    Refused "template/invalid" or "config/...".
    """
    config = read_config(directory)
    path = directory / FILE
    source = _text(read_bytes(path, MAX_SOURCE)) if path.exists() else _configured(config)
    if source is None and (directory / OF_PROCESSOR).exists():
        source = _configured(read_object(directory / OF_PROCESSOR, MAX_BYTES))
    if source is None:
        return None
    if len(source) > MAX_SOURCE:
        raise Refused("template/invalid", reason=f"it has {len(source)} characters, over {MAX_SOURCE}")
    names = [name for name in config if name.endswith("_token")]
    variables = {name: token for name in names if (token := special_token(config, name)) is not None}
    return ChatTemplate(source, variables, clock=clock, limits=limits)


def _text(data: bytes) -> str:
    try:
        return text_of(data)
    except ValueError as error:
        raise Refused("template/invalid", reason=reason_of(error)) from None


def _configured(config: Mapping[str, Any]) -> str | None:
    """A text, or a list of {name, template} of which "default" is the one."""
    value = config.get("chat_template")
    if type(value) is list:
        named = [
            item.get("template") for item in value if type(item) is dict and item.get("name") == "default"
        ]
        value = named[0] if named else None
    if value is not None and type(value) is not str:
        raise Refused("template/invalid", reason="chat_template is not a text")
    return value


class ChatTemplate:
    """Turns a conversation into the prompt text. `close` ends its process; any thread may render."""

    def __init__(
        self, source: str, variables: Mapping[str, str], *, clock: Callable[[], datetime], limits: Limits
    ) -> None:
        self._source = source
        self._variables = dict(variables)
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._child = self._start()

    def render(self, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> str:
        """The prompt of messages ({role, content}), ready for the model's answer. Refused "template/...".

        `thinking` is the template's enable_thinking; None leaves it undefined.
        """
        request = {
            "source": self._source,
            "messages": [dict(message) for message in messages],
            "variables": self._variables,
            "now": self._clock().isoformat(),
            "thinking": thinking,
        }
        with self._lock:
            if not self._child.alive:
                self._child = self._start()
            try:
                reply = self._child.ask(request)
            except TooSlow:
                raise Refused("template/too-slow", seconds=self._limits.seconds) from None
            except OverMemory:
                raise Refused("template/memory", limit=self._limits.memory // MIB) from None
            except Broken as error:
                raise Refused("template/failed", reason=reason_of(error)) from None
        outcome, text = reply.get("outcome"), reply.get("text")
        if outcome == "text" and type(text) is str:
            return text
        if outcome == "too-long":
            raise Refused("template/too-long", limit=self._limits.output)
        raise Refused(_REFUSALS.get(str(outcome), "template/failed"), reason=" ".join(str(text).split()))

    def close(self) -> None:
        with self._lock:
            self._child.close()

    def _start(self) -> Child:
        return Child("caldrixd.text.renderer", self._limits)
