"""Renders chat templates, in a confined process: a template is code of a stranger.

Run by template.py. Request: source, messages, variables, now, thinking. Answer: outcome, text.
"""

from __future__ import annotations

import codecs
import json
import pprint
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.constants
import jinja2.debug
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from caldrixd.text.confined import limit_process, serve

# Wanted inside functions of jinja2 and of the standard library, when no file can be opened any more.
PRELOADED = (jinja2.constants, jinja2.debug, pprint, codecs.lookup("unicode-escape"))

MAX_REASON = 300


class Raised(TemplateError):
    """The template called raise_exception."""


class TooLong(Exception):
    """The output passed its limit."""


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as templates for language models expect it: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> None:
    raise Raised(str(message))


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def render(request: dict[str, Any], compiled: Callable[[str], jinja2.Template], limit: int) -> str:
    """The text of a request. TooLong above `limit` bytes, checked while the template runs."""
    now = datetime.fromisoformat(request["now"])
    thinking = request.get("thinking")
    stream = compiled(request["source"]).generate(
        **request["variables"],
        messages=request["messages"],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **({} if thinking is None else {"enable_thinking": thinking}),
        strftime_now=now.strftime,
    )
    pieces: list[str] = []
    written = 0
    for piece in stream:
        written += len(piece)
        if written > limit:
            raise TooLong
        pieces.append(piece)
    text = "".join(pieces)
    if len(text.encode()) > limit:
        raise TooLong
    return text


def answer(request: dict[str, Any], compiled: Callable[[str], jinja2.Template], limit: int) -> dict[str, str]:
    """Outcome and text; the text of a failure is its reason."""
    try:
        return {"outcome": "text", "text": render(request, compiled, limit)}
    except MemoryError:
        return {"outcome": "memory", "text": ""}
    except TooLong:
        return {"outcome": "too-long", "text": ""}
    except Raised as error:
        return {"outcome": "raised", "text": str(error)[:MAX_REASON]}
    except TemplateSyntaxError as error:
        return {"outcome": "invalid", "text": f"line {error.lineno}: {error.message}"[:MAX_REASON]}
    except Exception as error:
        return {"outcome": "failed", "text": f"{type(error).__name__}: {error}"[:MAX_REASON]}


def main() -> None:
    memory, seconds, limit = map(int, sys.argv[1:])
    limit_process(memory)
    made = environment()
    templates: dict[str, jinja2.Template] = {}

    def compiled(source: str) -> jinja2.Template:
        if source not in templates:
            templates.clear()
            templates[source] = made.from_string(source)
        return templates[source]

    serve(lambda request: answer(request, compiled, limit), seconds=seconds)


if __name__ == "__main__":
    main()
