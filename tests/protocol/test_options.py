"""Flags as records: values, refusals with their exit status, and the tables made from them."""

from __future__ import annotations

from typing import Any

import pytest

from caldrix_protocol import messages as m
from caldrix_protocol.options import (
    BACKENDS,
    BATCHES,
    DTYPES,
    ISAS,
    KERNELS,
    OPTIONS,
    Option,
    check_together,
    defaults,
    documentation,
    find,
    options_of,
    refused_documentation,
    value,
)
from caldrix_protocol.refusals import EXIT_STATUS, ROWS, Refused


def read(flag: str, text: str | None, command: str = "run") -> Any:
    return value(find(command, flag), flag, text)


def refusal(flag: str, text: str | None = None, command: str = "run") -> Refused:
    with pytest.raises(Refused) as caught:
        read(flag, text, command)
    return caught.value


@pytest.mark.parametrize(
    ("flag", "text", "result"),
    [
        ("-p", "hi", "hi"),
        ("--prompt", "-p", "-p"),
        ("--prompt", " ", " "),
        ("--system", "", ""),
        ("--system", "@file", "@file"),
        ("--max-tokens", "1", 1),
        ("--max-tokens", "007", 7),
        ("--max-tokens", str(2**63 - 1), 2**63 - 1),
        ("--ctx", "1", 1),
        ("--ctx", "1048576", 1 << 20),
        ("--threads", "1", 1),
        ("--threads", "256", 256),
        ("--dtype", "bf16", "bf16"),
        ("--max-batch", "1", 1),
        ("--max-batch", "8", 8),
        ("--cpu-isa", "x86-64-v2", "x86-64-v2"),
        ("--cpu-isa", "native", "native"),
        ("--cpu-kernels", "numba", "numba"),
        ("--backend", "metal", "metal"),
        ("--raw", None, True),
        ("--plain", None, True),
        ("--stats", None, True),
        ("--json", None, True),
    ],
)
def test_good_values(flag: str, text: str | None, result: Any) -> None:
    assert read(flag, text) == result
    assert type(read(flag, text)) is type(result)


NO_NUMBERS = [
    "",
    "0",
    "-1",
    "+1",
    " 1",
    "1 ",
    "1.0",
    "1e3",
    "1_000",
    "٣",
    "0x10",
    "nan",
    "9" * 20,
    "9" * 5000,
]


@pytest.mark.parametrize("text", [*NO_NUMBERS, str(2**63)])
def test_max_tokens_must_be_a_positive_integer(text: str) -> None:
    refused = refusal("--max-tokens", text)
    assert refused.text.startswith(f"--max-tokens must be a positive integer, got {text[:4000]}")
    assert EXIT_STATUS[refused.kind] == 2


@pytest.mark.parametrize(
    ("flag", "text", "code"),
    [("--ctx", text, "run/ctx") for text in [*NO_NUMBERS, "1048577"]]
    + [("--threads", text, "run/threads") for text in [*NO_NUMBERS, "257"]]
    + [("--dtype", text, "run/dtype") for text in ["", "f16", "F32", "bfloat16"]]
    + [("--cpu-isa", text, "run/cpu-isa") for text in ["", "x86-64", "v3", "X86-64-V3", "haswell"]]
    + [("--cpu-kernels", text, "run/cpu-kernels") for text in ["", "C", "cc", "llvm"]],
)
def test_engine_flags_are_refused_with_status_1(flag: str, text: str, code: str) -> None:
    refused = refusal(flag, text)
    assert refused.code == code
    assert f"got {text[:4000]}" in refused.text
    assert EXIT_STATUS[refused.kind] == 1


@pytest.mark.parametrize("text", ["", "0", "2", "16", "01", "1.0", "-1", "8 ", "eight", "٨"])
def test_max_batch_takes_two_numbers(text: str) -> None:
    refused = refusal("--max-batch", text)
    assert refused.text == f"--max-batch {text}: must be 1 or 8 (the batched plan is compiled at B = 8)"
    assert EXIT_STATUS[refused.kind] == 1


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--backend", "cuda", "--backend must be auto, hip, metal or cpu, got cuda"),
        ("--backend", "CPU", "--backend must be auto, hip, metal or cpu, got CPU"),
        ("--backend", "", "--backend must be auto, hip, metal or cpu, got "),
        (
            "--backend",
            "host",
            "--backend host is inferno-serve's off-hardware stand-in for its tests; "
            "caldrix does not expose it",
        ),
        ("-p", None, "-p needs a value"),
        ("--prompt", None, "--prompt needs a value"),
        ("--ctx", None, "--ctx needs a value"),
        ("-p", "", "-p needs a prompt that is not empty"),
        ("-p", "a\udcffb", "-p is not valid UTF-8"),
        ("--system", "\udc80", "--system is not valid UTF-8"),
        ("--raw", "yes", "--raw takes no value"),
        ("--json", "", "--json takes no value"),
        ("--port", "80", "--port: caldrix run serves no HTTP; use caldrix serve"),
        ("--host", None, "--host: caldrix run serves no HTTP; use caldrix serve"),
        ("--admin", None, "--admin: caldrix run serves no HTTP; use caldrix serve"),
        ("--admin-port", None, "--admin-port: caldrix run serves no HTTP; use caldrix serve"),
        ("--model-dir", "/m", "--model-dir: give the model as the first argument"),
        ("--draft-model", "d", "--draft-model is not available yet in this version"),
        ("--image", "a.png", "--image is not available yet in this version"),
        ("-i", None, "-i is not available yet in this version"),
        *(
            (flag, "1", f"{flag} is not available yet in this version")
            for flag in (
                "--temperature",
                "--top-k",
                "--top-p",
                "--min-p",
                "--repetition-penalty",
                "--seed",
            )
        ),
    ],
)
def test_what_caldrix_itself_refuses_has_status_2(flag: str, text: str | None, words: str) -> None:
    refused = refusal(flag, text)
    assert refused.text == words
    assert EXIT_STATUS[refused.kind] == 2


@pytest.mark.parametrize("flag", ["--cpu", "--promp", "-x", "--", "-pfoo", "--daemon", "--PROMPT"])
def test_any_other_flag_of_run_is_the_engines(flag: str) -> None:
    refused = refusal(flag)
    assert refused.code == "run/unknown-flag"
    assert refused.text.startswith(f"unknown flag {flag}")
    assert EXIT_STATUS[refused.kind] == 1


@pytest.mark.parametrize("command", ["stop", "ps", "doctor", "caldrixd", "version"])
def test_elsewhere_an_unknown_flag_has_status_2(command: str) -> None:
    refused = refusal("--prompt", "x", command)
    assert refused.code == "usage/unknown-flag"
    assert EXIT_STATUS[refused.kind] == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("900", 900.0), ("0.25", 0.25), ("31536000", 31536000.0)]
)
def test_idle_unload_takes_seconds(text: str, seconds: float) -> None:
    assert read("--idle-unload", text, "caldrixd") == seconds


@pytest.mark.parametrize(
    "text",
    ["", ".", "1.", ".5", "-1", "1e3", "nan", "inf", "1_0", "٣", "1.2.3", "31536000.1", "31536001", "15m"],
)
def test_idle_unload_takes_nothing_else(text: str) -> None:
    refused = refusal("--idle-unload", text, "caldrixd")
    assert refused.code == "usage/idle-unload"
    assert refused.text.endswith(f"got {text}")


def test_stop_has_one_switch() -> None:
    assert read("--daemon", None, "stop") is True
    assert [option.name for option in options_of("stop")] == ["--daemon"]


CPU_ONLY = [("--threads", 2), ("--cpu-isa", "native"), ("--cpu-kernels", "auto")]


@pytest.mark.parametrize("backend", ["hip", "metal"])
@pytest.mark.parametrize(("flag", "given"), CPU_ONLY)
def test_some_flags_are_for_the_cpu_lane(backend: str, flag: str, given: Any) -> None:
    values = defaults("run") | {"backend": backend}
    check_together(values)
    with pytest.raises(Refused) as caught:
        check_together(values | {find("run", flag).key: given})
    assert caught.value.text == f"{flag} is only meaningful with --backend cpu"
    assert EXIT_STATUS[caught.value.kind] == 1


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_they_go_with_cpu_and_auto(backend: str) -> None:
    given = {find("run", flag).key: value for flag, value in CPU_ONLY}
    check_together(defaults("run") | {"backend": backend} | given)


def test_defaults_are_keyed_by_name() -> None:
    assert defaults("run") == {
        "prompt": None,
        "system": None,
        "max_tokens": None,
        "ctx": None,
        "backend": "auto",
        "threads": None,
        "cpu_isa": None,
        "cpu_kernels": None,
        "max_batch": 8,
        "dtype": "f32",
        "raw": False,
        "plain": False,
        "stats": False,
        "json": False,
    }
    assert defaults("stop") == {"daemon": False}
    assert defaults("caldrixd") == {"idle_unload": 900.0}
    assert defaults("ps") == {}


def test_flags_agree_with_the_message_they_travel_in() -> None:
    opened = m.Open("demo", {})
    same = ("backend", "ctx", "dtype", "max_batch")
    assert [getattr(opened, key) for key in same] == [defaults("run")[key] for key in same]
    checked = m.checks(m.Open)
    for backend in BACKENDS:
        assert checked["backend"](read("--backend", backend)) == backend
    for dtype in DTYPES:
        assert checked["dtype"](read("--dtype", dtype)) == dtype
    for isa in ISAS:
        assert checked["cpu_isa"](read("--cpu-isa", isa)) == isa
    for kernels in KERNELS:
        assert checked["cpu_kernels"](read("--cpu-kernels", kernels)) == kernels
    for batch in BATCHES:
        assert checked["max_batch"](read("--max-batch", str(batch))) == batch
    assert checked["ctx"](read("--ctx", "1048576")) == 1 << 20
    assert checked["threads"](read("--threads", "256")) == 256


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_records_are_well_formed(option: Option) -> None:
    spellings = [name for each in OPTIONS for name in (each.name, *each.aliases)]
    assert len(spellings) == len(set(spellings))
    assert option.name.startswith("--")
    assert option.key.isidentifier()
    if option.refused is None or option.refused == "usage/not-available":
        assert option.doc
        assert option.absent
    if option.refused is not None:
        assert ROWS[option.refused].kind == option.kind
    elif option.metavar is not None and option.name not in ("--prompt", "--system"):
        with pytest.raises(Refused) as caught:
            option.check("?")
        assert caught.value.kind == option.kind


def test_documentation_has_a_row_for_every_flag_but_the_refused() -> None:
    rows = documentation("run").split("\n")
    assert rows[0] == "| `-p PROMPT`, `--prompt PROMPT` | answer this prompt and exit | chat |"
    assert "| `--threads N` | threads of the CPU lane | one for each core |" in rows
    assert any(row.startswith("| `--backend auto\\|hip\\|metal\\|cpu` |") for row in rows)
    assert (
        "| `--top-k N` | keep only the N most likely tokens (0 keeps all) (not available yet) | 0 |" in rows
    )
    assert len(rows) == 22
    assert documentation("ps") == ""
    assert documentation("caldrixd").startswith("| `--idle-unload SECONDS` |")


def test_refused_flags_are_documented_with_their_words() -> None:
    assert refused_documentation("run").split("\n") == [
        "| `--backend host` | --backend host is inferno-serve's off-hardware stand-in for its tests; "
        "caldrix does not expose it |",
        *(
            f"| `{flag}` | {flag}: caldrix run serves no HTTP; use caldrix serve |"
            for flag in ("--port", "--host", "--admin", "--admin-port")
        ),
        "| `--model-dir` | --model-dir: give the model as the first argument |",
    ]
    assert refused_documentation("stop") == ""
