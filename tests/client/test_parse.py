from __future__ import annotations

import pytest

from caldrix_client.parse import Command, Doctor, Help, Models, Ps, Run, Stop, Version, parse
from caldrix_protocol.options import defaults
from caldrix_protocol.refusals import Refused

PLAIN = Run("m", **defaults("run"))


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ([], Help()),
        (["help"], Help()),
        (["--help"], Help()),
        (["help", "run"], Help("run")),
        (["--help", "nope"], Help("nope")),
        (["run", "--help"], Help("run")),
        (["run", "m", "-h"], Help("run")),
        (["run", "m", "-p", "x", "--help"], Help("run")),
        (["doctor", "--help"], Help("doctor")),
        (["--version", "--help"], Help("version")),
        (["stop", "-h"], Help("stop")),
        (["completion", "-h"], Help("completion")),
        (["pull", "m", "--help"], Help("pull")),
        (["models", "--help"], Help("models")),
        (["models", "rm", "m", "--help"], Help("models rm")),
        (["models", "pin", "-h"], Help("models pin")),
        (["help", "models", "plan"], Help("models plan")),
        (["models"], Models("list")),
        (["models", "list"], Models("list")),
        (["version"], Version()),
        (["--version"], Version()),
        (["ps"], Ps()),
        (["doctor"], Doctor()),
        (["stop"], Stop(None, False)),
        (["stop", "m"], Stop("m", False)),
        (["stop", "--daemon"], Stop(None, True)),
        (["run", "m"], PLAIN),
        (["run", "m", "-p", "hi"], PLAIN._replace(prompt="hi")),
        (["run", "m", "--prompt=hi=ho"], PLAIN._replace(prompt="hi=ho")),
        (["run", "m", "-p", "--raw"], PLAIN._replace(prompt="--raw")),
        (["run", "m", "-p", "--help"], PLAIN._replace(prompt="--help")),
        (["run", "m", "-p", "a", "-p", "b"], PLAIN._replace(prompt="b")),
        (["run", "m", "--system", ""], PLAIN._replace(system="")),
        (["run", "m", "--ctx=64", "--max-tokens", "3"], PLAIN._replace(ctx=64, max_tokens=3)),
        (
            ["run", "m", "--backend", "cpu", "--threads", "2", "--dtype", "bf16"],
            PLAIN._replace(backend="cpu", threads=2, dtype="bf16"),
        ),
        (
            ["run", "m", "--cpu-isa=x86-64-v3", "--cpu-kernels", "c", "--max-batch", "1"],
            PLAIN._replace(cpu_isa="x86-64-v3", cpu_kernels="c", max_batch=1),
        ),
        (
            ["run", "m", "--raw", "--plain", "--stats", "--json"],
            PLAIN._replace(raw=True, plain=True, stats=True, json=True),
        ),
    ],
)
def test_a_command_line_means(line: list[str], command: Command) -> None:
    parsed = parse(line)
    assert type(parsed) is type(command)
    assert parsed == command


def test_the_fields_of_run_are_the_keys_of_its_options() -> None:
    assert set(Run._fields) == {"model", *defaults("run")}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["run", ""], "usage/model-required"),
        (["run", "m", "--system", "x", "--raw"], "usage/system-raw"),
        (["run", "m", "--backend", "hip", "--threads", "2"], "run/cpu-only-flag"),
        (["run", "m", "--cpu-isa", "native", "--backend", "metal"], "run/cpu-only-flag"),
        (["run", "m", "-p", "a\udcffb"], "usage/prompt-utf8"),
        (["run", "m", "--system", "a\udcffb"], "usage/prompt-utf8"),
        (["run", "m", "--", "x"], "run/unknown-flag"),
        (["run", "m", "--temp", "1"], "run/misspelt-flag"),
        (["pull", "m", "--quite"], "usage/misspelt-flag"),
        (["stpo"], "usage/misspelt-command"),
        (["-p", "hi"], "usage/model-first"),
        (["--ctx=64", "demo"], "usage/model-first"),
        ([""], "usage/unknown-command"),
        (["run", "m", "-"], "usage/bare-prompt"),
        (["stop", "m", "n"], "usage/extra-argument"),
        (["stop", "--daemon", "m"], "usage/stop-both"),
    ],
)
def test_what_has_no_meaning_is_refused(line: list[str], code: str) -> None:
    with pytest.raises(Refused) as refused:
        parse(line)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        (["ls"], "models list"),
        (["list"], "models list"),
        (["rm", "demo"], "models rm"),
        (["plan", "demo"], "models plan"),
        (["chat", "demo"], "run"),
        (["start"], "run"),
        (["download", "demo"], "pull"),
        (["-v"], "version"),
        (["-V"], "version"),
        (["--verison"], "version"),
        (["models", "ls"], "models list"),
        (["models", "lsit"], "models list"),
        (["models", "show", "demo"], "models plan"),
        (["models", "remove", "demo"], "models rm"),
        (["models", "pull", "demo"], "pull"),
        (["demo", "-p", "hi"], "run demo"),
        (["qwen3-0.6b"], "run qwen3-0.6b"),
        (["./model"], "run ./model"),
        (["owner/name@main", "-p", "hi"], "run owner/name@main"),
        (["models", "nope"], None),
        (["nope"], None),
    ],
)
def test_what_a_command_is_called_elsewhere_is_told(line: list[str], nearest: str | None) -> None:
    with pytest.raises(Refused) as refused:
        parse(line)
    assert refused.value.fields.get("nearest") == nearest
