"""Flags as records: values, and refusals with their exit status."""

from __future__ import annotations

from typing import Any

import pytest

from caldrix_protocol import messages as m
from caldrix_protocol.option import Option
from caldrix_protocol.options import (
    BACKENDS,
    BATCHES,
    DTYPES,
    ISAS,
    KERNELS,
    MEANT,
    OPTIONS,
    check_together,
    defaults,
    find,
    is_accepted,
    options_of,
    put,
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
        ("--temperature", "0", 0.0),
        ("--temperature", "-0", 0.0),
        ("--temperature", ".7", 0.7),
        ("--temperature", "1e-3", 0.001),
        ("--temperature", "1e308", 1e308),
        ("--top-k", "0", 0),
        ("--top-k", "2147483647", 2**31 - 1),
        ("--top-p", "1", 1.0),
        ("--top-p", "1e-300", 1e-300),
        ("--min-p", "0", 0.0),
        ("--min-p", "1.0", 1.0),
        ("--repetition-penalty", "0.5", 0.5),
        ("--seed", "0", 0),
        ("--seed", "18446744073709551615", 2**64 - 1),
        ("--stop", " ", " "),
        ("--think", "on", True),
        ("--think", "off", False),
        ("--stop", "é" * 512, "é" * 512),
        ("--draft-model", "demo", "demo"),
        ("--max-context", "1", 1),
        ("--sampler", "host", "host"),
        ("--queue-depth", "1", 1),
        ("--weight-budget", "1", 1),
        ("--weight-budget", "3m", 3 << 20),
        ("--weight-budget", "2g", 2 << 30),
        ("--weight-ring", "2", 2),
        ("--weight-pin", "lm_head", "lm_head"),
        ("--layout-dir", "/l", "/l"),
        ("--raw", None, True),
        ("--plain", None, True),
        ("--stats", None, True),
        ("--json", None, True),
    ],
)
def test_good_values(flag: str, text: str | None, result: Any) -> None:
    assert read(flag, text) == result
    assert type(read(flag, text)) is type(result)


def shown(text: str) -> str:
    """A value in a sentence; one that would not be seen there has quotes."""
    return text[:4000] if text.strip() else f'"{text}"'


NO_NUMBERS = [
    "",
    " \n",
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
    assert refused.text.startswith(f"--max-tokens must be a positive integer, got {shown(text)}")
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
    assert f"got {shown(text)}" in refused.text
    assert EXIT_STATUS[refused.kind] == 1


NO_REALS = ["", "?", "-", ".", "1_0", " 1", "0x1", "nan", "inf", "-inf", "1e400", "1e", "٣", "1,5", "1" * 401]


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        *(
            ("--temperature", text, "--temperature must be a finite number of at least 0")
            for text in [*NO_REALS, "-0.1"]
        ),
        *(
            ("--top-k", text, "--top-k must be an integer from 0 to 2147483647")
            for text in ["", "-1", "1.0", "2147483648", "+1", "9" * 401]
        ),
        *(
            ("--top-p", text, "--top-p must be a number over 0 and at most 1")
            for text in [*NO_REALS, "0", "-0", "-1", "1.0000001"]
        ),
        *(
            ("--min-p", text, "--min-p must be a number from 0 to 1")
            for text in [*NO_REALS, "-0.1", "1.0000001"]
        ),
        *(
            ("--repetition-penalty", text, "--repetition-penalty must be a finite number over 0")
            for text in [*NO_REALS, "0", "-1"]
        ),
        *(
            ("--seed", text, "--seed must be an integer from 0 to 18446744073709551615")
            for text in ["", "-1", "1.5", "18446744073709551616", "off"]
        ),
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(flag: str, text: str, words: str) -> None:
    refused = refusal(flag, text)
    assert refused.text == f"{words}, got {shown(text)}"
    assert EXIT_STATUS[refused.kind] == 2


@pytest.mark.parametrize("text", ["", "x" * 1025, "é" * 513])
def test_a_stop_text_has_a_length(text: str) -> None:
    assert refusal("--stop", text).text == "--stop needs a text of 1 to 1024 bytes"


def test_stop_texts_add_up_to_sixteen() -> None:
    values = defaults("run")
    stop = find("run", "--stop")
    for count in range(16):
        put(values, stop, str(count))
    assert values["stop"] == tuple(map(str, range(16)))
    with pytest.raises(Refused) as caught:
        put(values, stop, "16")
    assert caught.value.text == "--stop can be given 16 times at most"


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--max-context", "0", "--max-context must be >= 1, got 0"),
        ("--queue-depth", "-1", "--queue-depth must be >= 1, got -1"),
        ("--sampler", "device", "--sampler must be host, got device"),
        ("--weight-ring", "1", "--weight-ring must be >= 2, got 1"),
        *(
            (
                "--weight-budget",
                text,
                "--weight-budget must be a positive byte count, optionally suffixed g or m, got "
                + shown(text),
            )
            for text in ("", "0", "g", "0m", "-1", "1.5g", "1k", "1G", "1gm")
        ),
    ],
)
def test_the_engines_values_are_refused_in_its_words(flag: str, text: str, words: str) -> None:
    refused = refusal(flag, text)
    assert refused.text == words
    assert EXIT_STATUS[refused.kind] == 1


STREAMED = [
    "--weight-ring",
    "--weight-pin",
    "--weight-pins",
    "--weight-digest",
    "--weight-codec",
    "--layout-dir",
]


def together(**values: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        check_together(defaults("run") | values)
    assert EXIT_STATUS[caught.value.kind] == 1
    return caught.value


@pytest.mark.parametrize("flag", STREAMED)
def test_some_flags_are_for_streamed_weights(flag: str) -> None:
    key = find("run", flag).key
    assert together(**{key: 2}).text == f"{flag} is only meaningful with --weight-budget"
    assert together(**{key: 2}, weight_budget=1).code == "run/not-available"


def test_streamed_weights_are_not_batched() -> None:
    assert together(weight_budget=1, max_batch=8).text == (
        "streamed weights are single-stream: --weight-budget cannot be combined with --max-batch 8"
    )


@pytest.mark.parametrize(
    "values", [{"queue_depth": 1}, {"weight_budget": 1}, {"weight_budget": 1, "max_batch": 1}]
)
def test_flags_whose_feature_is_to_come_are_refused_last(values: dict[str, int]) -> None:
    flag = "--" + next(iter(values)).replace("_", "-")
    assert together(**values).text == f"{flag} asks for what the engine cannot do yet in this version"


@pytest.mark.parametrize("text", ["", "0", "2", "16", "01", "1.0", "-1", "8 ", "eight", "٨"])
def test_max_batch_takes_two_numbers(text: str) -> None:
    refused = refusal("--max-batch", text)
    assert (
        refused.text == f"--max-batch {shown(text)}: must be 1 or 8 (the batched plan is compiled at B = 8)"
    )
    assert EXIT_STATUS[refused.kind] == 1


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--backend", "cuda", "--backend must be auto, hip, metal or cpu, got cuda"),
        ("--backend", "CPU", "--backend must be auto, hip, metal or cpu, got CPU"),
        ("--backend", "", '--backend must be auto, hip, metal or cpu, got ""'),
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
        ("--draft-model", "", "--draft-model needs a value"),
        ("--weight-pin", "", "--weight-pin needs a value"),
        ("--draft-model", "\udc80", "--draft-model is not valid UTF-8"),
        ("--stop", "\udc80", "--stop is not valid UTF-8"),
        ("--seed", None, "--seed needs a value"),
        ("--image", "a.png", "--image is not available yet in this version"),
        ("-i", None, "-i is not available yet in this version"),
    ],
)
def test_what_caldrix_itself_refuses_has_status_2(flag: str, text: str | None, words: str) -> None:
    refused = refusal(flag, text)
    assert refused.text == words
    assert EXIT_STATUS[refused.kind] == 2


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--nope", None),
        ("-x", None),
        ("--", None),
        ("-pfoo", None),
        ("--daemon", None),
        ("--queue-depht", None),  # which is to come
        ("--prot", "--prompt"),  # --port is refused
        ("--PROMPT", "--prompt"),
        ("--promp", "--prompt"),
        ("--temp", "--temperature"),
        ("-max-tokens", "--max-tokens"),
        ("--max_tokens", "--max-tokens"),
        ("--quite", "--quiet"),
        ("--max", "--max-tokens"),
        ("-P", "-p"),
        ("-n", "--max-tokens"),
        ("--num-predict", "--max-tokens"),
        ("--num_ctx", "--ctx"),
        ("-t", "--temperature or --threads"),
    ],
)
def test_any_other_flag_of_run_is_the_engines(flag: str, nearest: str | None) -> None:
    refused = refusal(flag)
    assert refused.code == ("run/unknown-flag" if nearest is None else "run/misspelt-flag")
    assert refused.text.startswith(f"unknown flag {flag}; ")
    assert refused.fields.get("nearest") == nearest
    assert EXIT_STATUS[refused.kind] == 1


def test_what_a_flag_is_called_elsewhere_leads_to_one_that_is_accepted() -> None:
    for meant in MEANT.values():
        assert all(is_accepted(find("run", flag)) for flag in meant.split(" or "))


@pytest.mark.parametrize("command", ["stop", "ps", "doctor", "caldrixd", "version"])
def test_elsewhere_an_unknown_flag_has_status_2(command: str) -> None:
    refused = refusal("--prompt", "x", command)
    assert refused.text == "unknown flag --prompt; `caldrix help` lists the flags"
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
    assert refused.text.endswith(f"got {shown(text)}")


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
        "stdin": False,
        "system": None,
        "think": None,
        "max_tokens": None,
        "ctx": None,
        "backend": "auto",
        "threads": None,
        "cpu_isa": None,
        "cpu_kernels": None,
        "max_batch": None,
        "max_context": None,
        "sampler": "host",
        "dtype": "f32",
        "raw": False,
        "plain": False,
        "quiet": False,
        "no_history": False,
        "stats": False,
        "json": False,
        "draft_model": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
    }
    assert defaults("stop") == {"daemon": False}
    assert defaults("caldrixd") == {"idle_unload": 900.0}
    assert defaults("ps") == {}


def test_flags_agree_with_the_message_they_travel_in() -> None:
    opened = m.Open("demo", {})
    same = ("backend", "ctx", "dtype")
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
    generate = m.checks(m.Generate)
    knobs = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    assert m.Generate._field_defaults["thinking"] == defaults("run")["think"]
    assert [m.Generate._field_defaults[key] for key in knobs] == [defaults("run")[key] for key in knobs]
    assert generate["top_k"](read("--top-k", "2147483647")) == 2**31 - 1
    assert generate["seed"](read("--seed", str(2**64 - 1))) == 2**64 - 1
    assert generate["stop"]((read("--stop", "é" * 512),) * 16)
    for key in ("temperature", "repetition_penalty"):
        assert generate[key](read("--" + key.replace("_", "-"), "1.7976931348623157e308")) == m.MAX_FLOAT


TEXTS = {"--prompt", "--system", "--stop", "--draft-model", *STREAMED[1:]}


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
    elif option.metavar is not None and option.name not in TEXTS:
        with pytest.raises(Refused) as caught:
            option.check("?")
        assert caught.value.kind == option.kind
