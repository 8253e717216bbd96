"""Chat templates: what transformers' templates use works, what they must not do costs one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.refusals import MESSAGE, RUN, Refused
from caldrixd.text import confined, renderer, template
from caldrixd.text.template import LIMITS
from tests.text.conftest import TINY, MakeTemplate

USER = [{"role": "user", "content": "hi"}]
QUICK = replace(LIMITS, seconds=3)  # four times as long by the clock: enough to start a process


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}|{{ m['content'] }}]{% endfor %}", "[user|hi]"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{% if add_generation_prompt %}A:{% endif %}", "A:"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ bos_token }}x{{ eos_token }}{{ missing_token }}", "<s>x</s>"),
        ("{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }}", "2024-07-03 03 Jul 2024"),
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}b", "ab"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
            "{% if i == 3 %}{% break %}{% endif %}{% endfor %}",
            "023",
        ),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ messages[-1].content.strip().split('i')[0].upper() }}", "H"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('é') }}", "<é>"),
        ("{{ lipsum.__name__ }}{{ nothing.at_all | default('d') }}", None),
        ("{{ '<b>' }} & \"", '<b> & "'),
        ("", ""),
    ],
)
def test_what_templates_use(make_template: MakeTemplate, source: str, expected: str | None) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    loaded = make_template(source, config=config)
    if expected is None:
        with pytest.raises(Refused):
            loaded.render(USER)
    else:
        assert loaded.render(USER) == expected


@pytest.mark.parametrize(
    ("thinking", "expected"), [(None, "False"), (True, "True True"), (False, "True False")]
)
def test_thinking_is_undefined_on_or_off(
    make_template: MakeTemplate, thinking: bool | None, expected: str
) -> None:
    loaded = make_template("{{ enable_thinking is defined }} {{ enable_thinking }}")
    assert loaded.render(USER, thinking).strip() == expected


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("tojson", {}),
        ("tojson(indent=2)", {"indent": 2}),
        ("tojson(sort_keys=true)", {"sort_keys": True}),
        ("tojson(ensure_ascii=true)", {"ensure_ascii": True}),
        ("tojson(separators=(',', ':'))", {"separators": (",", ":")}),
    ],
)
def test_tojson_is_plain_json(make_template: MakeTemplate, call: str, arguments: dict[str, Any]) -> None:
    value = {"z": "é<'>&", "a": [1, 2.5, True, None], "b": {}}
    loaded = make_template("{{ {'z': \"é<'>&\", 'a': [1, 2.5, true, none], 'b': {}} | " + call + " }}")
    expected = json.dumps(value, **({"ensure_ascii": False} | arguments))
    assert loaded.render(USER) == expected


ESCAPES = (
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ [] | map(attribute='__class__') | list }}{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | sum(attribute='__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ ('%s' % '{0.__class__}').format(1) }}",
    "{{ ''.format.__self__ }}",
    "{{ ('' | attr('format')).__func__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['sys'].modules }}",
    "{{ strftime_now.__self__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ range.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% set x = messages.append(1) %}{{ x }}",
    "{{ messages.pop() }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{% set d = {} %}{{ d.__setitem__('a', 1) }}",
    "{{ (1).__class__.__base__ }}",
    "{{ (messages | list).sort() }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ (x for x in messages).gi_frame }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ tojson.__globals__ }}",
    "{{ messages | tojson(default=raise_exception) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% from 'os' import system %}{{ system('id') }}",
    "{% extends '/etc/passwd' %}",
    "{% set undefined = undefined.__class__ %}{{ undefined.__init__ }}",
    "{{ undefined._fail_with_undefined_error() }}",
    "{{ undefined.__init__.__globals__.sys }}",
    "{{ config.items() }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os').system('id') }}",
    "{{ eval('1') }}",
    "{{ exec('1') }}",
    "{{ getattr('', '__class__') }}",
    "{% do messages.append(1) %}",
    "{{ loop.__class__ }}{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator }}{% endfor %}",
    "{{ messages | map(attribute='items.__func__.__globals__') | list }}{{ messages[0].items.__self__ }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_fail_closed(source: str) -> None:
    """Each is stopped, or yields an undefined value, which is an empty text; nothing leaks or changes."""
    messages = [{"role": "user", "content": "hi"}]
    made = renderer.environment()
    request = {"source": source, "messages": messages, "variables": {}, "now": "2024-07-03"}
    reply = renderer.answer(request, made.from_string, 1000)
    assert reply["outcome"] in ("failed", "invalid") or reply["text"].strip("[], ") in ("", "Undefined"), (
        reply
    )
    assert messages == [{"role": "user", "content": "hi"}]


def test_an_escape_is_a_refusal(make_template: MakeTemplate) -> None:
    loaded = make_template("{{ ''.__class__.__mro__ }}")
    with pytest.raises(Refused) as caught:
        loaded.render(USER)
    assert caught.value.code == "template/failed"
    assert "SecurityError" in caught.value.text


MEMORY = (
    "{{ 'x' * 10**9 }}",
    "{{ 'x'.center(10**9) }}",
    "{{ '%1000000000s' % 'x' }}",
    "{{ '{:1000000000}'.format('x') }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ [0] * 10**9 }}",
    "{{ (1, 2) * 10**9 }}",
    "{{ 'x'.replace('', 'y' * 10**5) * 10**4 }}",
    "{{ 'xxxxxxxxxx'.replace('x', 'y' * 10**8) }}",
    "{% set ns = namespace(s='x' * 10**6) %}{% for i in range(20) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
)


@pytest.mark.parametrize("source", MEMORY)
def test_a_memory_bomb_costs_one_sentence(make_template: MakeTemplate, source: str) -> None:
    loaded = make_template(source, limits=replace(LIMITS, memory=200 << 20))
    with pytest.raises(Refused) as caught:
        loaded.render(USER)
    assert caught.value.code == "template/memory"
    assert caught.value.kind == MESSAGE
    assert "more than 200 MiB" in caught.value.text


SLOW = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = 9 %}{{ n ** (n ** n) }}",
)


@pytest.mark.parametrize("source", SLOW)
def test_an_endless_template_is_stopped(make_template: MakeTemplate, source: str) -> None:
    loaded = make_template("{% if messages[0].content == 'go' %}" + source + "{% endif %}ok", limits=QUICK)
    assert loaded.render(USER) == "ok"
    with pytest.raises(Refused) as caught:
        loaded.render([{"role": "user", "content": "go"}])
    assert caught.value.code == "template/too-slow"
    assert "over 3 s" in caught.value.text
    assert loaded.render(USER) == "ok"


def test_processor_time_alone_stops_a_renderer() -> None:
    arguments = [sys.executable, "-P", renderer.__file__, str(512 << 20), "1", "1000"]
    request = {"source": SLOW[0], "messages": USER, "variables": {}, "now": "2024-07-03"}
    body = json.dumps(request).encode()
    result = subprocess.run(
        arguments, input=len(body).to_bytes(4) + body, capture_output=True, check=False, timeout=300
    )
    assert result.returncode == -signal.SIGXCPU
    assert result.stdout == b""


def test_a_template_that_is_endless_to_compile_is_stopped(make_template: MakeTemplate) -> None:
    loaded = make_template("{{ 9 ** (9 ** 9) }}", limits=QUICK)
    with pytest.raises(Refused) as caught:
        loaded.render(USER)
    assert caught.value.code == "template/too-slow"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1001 }}",
        "{{ 'é' * 501 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    ],
)
def test_an_output_over_the_limit_is_stopped(make_template: MakeTemplate, source: str) -> None:
    loaded = make_template(source, limits=replace(LIMITS, output=1000))
    with pytest.raises(Refused) as caught:
        loaded.render(USER)
    assert caught.value.code == "template/too-long"
    assert "over 1000 bytes" in caught.value.text


def test_an_output_of_the_limit_is_whole(make_template: MakeTemplate) -> None:
    loaded = make_template("{{ 'é' * 500 }}", limits=replace(LIMITS, output=1000))
    assert loaded.render(USER) == "é" * 500


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("{{ raise_exception('no system\nrole') }}", "template/raised", "no system role"),
        ("{{ raise_exception('x' * 10000) }}", "template/raised", "x" * 300),
        ("{{ nothing.at_all.deep }}", "template/failed", "UndefinedError"),
        ("{{ 1 / 0 }}", "template/failed", "ZeroDivisionError"),
        ("{{ 'x' * 10**30 }}", "template/failed", "OverflowError"),
        ("{{ range(10**6) }}", "template/failed", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "template/failed", "RecursionError"),
        ("{{ '\\ud800' }}", "template/failed", "UnicodeEncodeError"),
        ("{% for %}", "template/invalid", "line 1"),
        ("{{ x | nofilter }}", "template/invalid", "nofilter"),
        ("{% unknown %}", "template/invalid", "unknown"),
    ],
)
def test_a_failing_template(make_template: MakeTemplate, source: str, code: str, words: str) -> None:
    loaded = make_template(source)
    with pytest.raises(Refused) as caught:
        loaded.render(USER)
    assert caught.value.code == code
    assert caught.value.kind == (RUN if code == "template/invalid" else MESSAGE)
    assert words in caught.value.text
    assert len(caught.value.text) < 450


def test_the_next_render_after_each_failure_works(make_template: MakeTemplate) -> None:
    loaded = make_template(
        "{% set c = messages[0].content %}{% if c == 'memory' %}{{ 'x' * 10**9 }}"
        "{% elif c == 'raise' %}{{ raise_exception('no') }}{% elif c == 'long' %}{{ 'x' * 10**7 }}"
        "{% else %}{{ c }}{% endif %}"
    )
    for content, code in (
        ("memory", "memory"),
        ("raise", "raised"),
        ("long", "too-long"),
        ("memory", "memory"),
    ):
        with pytest.raises(Refused) as caught:
            loaded.render([{"role": "user", "content": content}])
        assert caught.value.code == f"template/{code}"
        assert loaded.render(USER) == "hi"


def test_a_killed_renderer_is_one_refusal(make_template: MakeTemplate) -> None:
    loaded = make_template("{{ messages[0].content }}")
    assert loaded.render(USER) == "hi"
    os.kill(loaded._child.pid, signal.SIGSEGV)
    os.waitid(os.P_PID, loaded._child.pid, os.WEXITED | os.WNOWAIT)
    assert loaded.render(USER) == "hi"


def test_a_large_conversation_passes_through_the_pipe(make_template: MakeTemplate) -> None:
    loaded = make_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "漢" * 100_000 + str(index)} for index in range(20)]
    assert loaded.render(messages) == "".join(message["content"] for message in messages)


def test_the_renderer_ends_with_its_parent() -> None:
    arguments = [sys.executable, "-P", renderer.__file__, str(512 << 20), "5", "1000"]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(300) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b""
    process.stdout.close()


def test_the_renderer_can_open_and_start_nothing() -> None:
    check = (
        "import importlib.util, os, resource, sys\n"
        f"spec = importlib.util.spec_from_file_location('confined', {str(confined.__file__)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.limit_process(512 << 20)\n"
        "try:\n    open('/etc/passwd')\nexcept OSError as error:\n    os.write(1, error.strerror.encode())\n"
        "os.write(1, repr(resource.getrlimit(resource.RLIMIT_NPROC)).encode())\n"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True, timeout=300)
    assert result.stdout == b"Too many open files(0, 0)"


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "a"}, None, "a"),
        ({"chat_template": "a"}, "b", "b"),
        ({}, "b", "b"),
        (
            {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
        ),
        ({"chat_template": [{"name": "tool", "template": "t"}]}, None, None),
        ({"chat_template": []}, None, None),
        ({"chat_template": None}, None, None),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_where_the_template_comes_from(
    tmp_path: Path, config: dict[str, Any] | None, jinja: str | None, expected: str | None
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    loaded = template.load(tmp_path)
    if loaded is None:
        assert expected is None
    else:
        assert loaded.render(USER) == expected
        loaded.close()


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer_config.json", b'{"chat_template": 7}', "template/invalid"),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}', "template/invalid"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": 1}]}',
            "template/invalid",
        ),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": "x" * (1 << 21)}).encode(),
            "template/invalid",
        ),
        ("tokenizer_config.json", b"[]", "config/not-an-object"),
        ("tokenizer_config.json", b" " * ((16 << 20) + 1), "config/too-big"),
        ("chat_template.jinja", b"\xff", "template/invalid"),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "config/too-big"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_template_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused) as caught:
        template.load(tmp_path)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("config", "expected"), [({"chat_template": "a"}, "a"), ({}, "b"), ({"chat_template": []}, "b")]
)
def test_the_template_beside_a_processor_is_the_last(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "b"}))
    loaded = template.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == expected
    loaded.close()
    (tmp_path / "chat_template.jinja").write_text("c")
    loaded = template.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "c"
    loaded.close()


def test_the_tiny_models_template() -> None:
    loaded = template.load(TINY)
    assert loaded is not None
    assert loaded.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    loaded.close()
