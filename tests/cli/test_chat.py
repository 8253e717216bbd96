"""A chat from the keys to the numba lane and back: a real pseudo-terminal, a real daemon, tiny models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from caldrix_client.terminal import safe
from tests.support.cli import Home, Screen
from tests.support.models import tiny

LLAMA = str(tiny("tiny-llama"))
FULL = "the context of {} tokens is full, so the answer ends here; restart with a larger --ctx"


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def said(err: str) -> list[str]:
    """What stderr says, but for the lines about the model and the daemon."""
    about = ("started caldrixd", "tiny-llama: ", "loading ", "backend ", "cpu: ", "compil", "kernels ")
    lines = [line.removeprefix("caldrix: ") for line in err.splitlines()]
    return [line for line in lines if not line.startswith(about)]


def becomes_idle(home: Home) -> bool:
    """Whether `caldrix ps` shows the model idle, if not at once then after some looks."""
    return any("  idle  " in home.caldrix("ps").out for _ in range(100))


def test_answers_stream_into_the_terminal(shared: Home) -> None:
    alone = [shared.caldrix("run", LLAMA, "-p", text, "--max-tokens", "6").out for text in ("one", "two")]
    on_screen = [safe(text).replace("\n", "\r\n") for text in alone]
    with Screen(shared, "run", LLAMA, "--max-tokens", "6") as screen:
        screen.ready()
        screen.press("one\r")
        screen.expect(on_screen[0])
        screen.ready()
        screen.press("/reset\r")
        screen.expect("the conversation is cleared\r\n")
        screen.ready()
        screen.press("two\r")
        screen.expect(on_screen[1])
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def test_ctrl_c_in_the_prefill_forgets_the_message(home: Home, endless: str) -> None:
    (home.path / "long").write_text("word " * 60_000)
    clean = home.caldrix("run", endless, "--max-tokens", "6", typed=b"hi\n").out
    with Screen(home, "run", endless, "--ctx", str(1 << 19), "--max-tokens", "6") as screen:
        screen.ready()
        screen.press(f"/system @{home.path}/long\r")
        screen.ready()
        screen.press("lost\r")
        screen.expect("prompt: ")
        screen.press("\x03")
        screen.ready()
        screen.press("/system off\r")
        screen.expect("system off\r\n")
        screen.ready()
        screen.press("hi\r")
        screen.expect(safe(clean).replace("\n", "\r\n"))
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def test_ctrl_c_in_the_answer_stops_it_and_keeps_the_chat(home: Home, endless: str) -> None:
    with Screen(home, "run", endless, "--ctx", str(1 << 17), "--stats") as screen:
        for _ in range(2):
            screen.ready()
            screen.press("hi\r")
            screen.expect("\x1b[?2004l")
            screen.expect("l")  # some of the answer
            screen.press("\x03")
            screen.expect("caldrix: load ")
        screen.ready()
        assert becomes_idle(home)
        screen.press("\x03")
        assert screen.end() == 0


def test_the_second_turn_prefills_new_tokens_only(shared: Home) -> None:
    result = shared.caldrix("run", LLAMA, "--json", "--max-tokens", "8", typed=b"one\ntwo\n/regen\n")
    first, second, again = (answer["timings"] for answer in objects(result.out))
    assert result.status == 0
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert again["cached_tokens"] == second["prompt_tokens"] - 1


def test_the_oldest_exchanges_are_dropped_with_their_number(shared: Home) -> None:
    flags = ("--ctx", "64", "--max-tokens", "8", "--json", "--system", "S")
    result = shared.caldrix("run", LLAMA, *flags, typed=b"one\ntwo\nthree\nfour\nfive\n")
    answers = objects(result.out)
    dropped = [answer["dropped_turns"] for answer in answers]
    assert result.status == 0
    assert sum(map(bool, dropped)) >= 2
    assert said(result.err) == [
        f"the conversation outgrew the context; the {count} oldest turns were dropped"
        for count in dropped
        if count
    ]
    for answer in answers:
        ids = answer["prompt_ids"]
        assert len(ids) <= 64 - 8
        assert ids[:5] == answers[0]["prompt_ids"][:5]


def test_a_message_too_long_is_refused_with_both_counts_and_the_chat_goes_on(shared: Home) -> None:
    typed = b"one\n" + b"word " * 40 + b"\ntwo\n"
    result = shared.caldrix("run", LLAMA, "--ctx", "64", "--max-tokens", "8", "--json", typed=typed)
    words = said(result.err)
    assert result.status == 1
    assert len(objects(result.out)) == 2
    assert words[0].startswith("the prompt has 1")
    assert words[0].endswith(
        " tokens and the context 64; restart with a larger --ctx or send a shorter message"
    )
    alone = shared.caldrix("run", LLAMA, "--ctx", "64", "-p", "word " * 40)
    assert (alone.status, alone.out) == (1, "")
    assert said(alone.err)[0].endswith("restart with a larger --ctx or send a shorter message")


@pytest.mark.parametrize("arguments", [("-p", "hi"), ()])
def test_an_answer_ends_exactly_at_the_context_and_says_so(
    shared: Home, endless: str, arguments: tuple[str, ...]
) -> None:
    result = shared.caldrix("run", endless, "--ctx", "64", "--json", *arguments, typed=b"hi\n")
    (answer,) = objects(result.out)
    assert answer["finish_reason"] == "length"
    assert len(answer["prompt_ids"]) + len(answer["ids"]) == 64
    assert said(result.err)[-1] == FULL.format(64)
    limited = shared.caldrix("run", endless, "--ctx", "64", "-p", "hi", "--max-tokens", "4")
    assert FULL.format(64) not in limited.err


def test_context_counts_what_the_daemon_counted(shared: Home) -> None:
    result = shared.caldrix(
        "run", LLAMA, "--ctx", "100", "--max-tokens", "8", "--json", typed=b"one\n/context\n"
    )
    (answer,) = objects(result.out)
    used = len(answer["prompt_ids"]) + len(answer["ids"])
    assert said(result.err)[-1] == (
        f"the context holds 100 tokens: {used} used, 8 reserved for the answer, {92 - used} free"
    )


def test_a_seed_makes_the_answer_again(shared: Home) -> None:
    lines = b"/temperature 1\n/seed 7\none\n/regen\n/seed off\n/regen\n"
    result = shared.caldrix("run", LLAMA, "--json", "--max-tokens", "8", typed=lines)
    first, second, third = objects(result.out)
    assert result.status == 0
    assert first["ids"] == second["ids"]
    assert (first["seed"], second["seed"]) == (7, 7)
    assert isinstance(third["seed"], int)
    again = shared.caldrix(
        "run",
        LLAMA,
        "--json",
        "--max-tokens",
        "8",
        "-p",
        "one",
        "--temperature",
        "1",
        "--seed",
        str(third["seed"]),
    )
    assert objects(again.out)[0]["ids"] == third["ids"]


def test_sigterm_and_a_reader_that_leaves_free_the_model(home: Home, endless: str) -> None:
    process = home.start("run", endless, "-p", "hi", "--ctx", str(1 << 17))
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.terminate()
    assert process.wait(60) == 143
    process.communicate()
    assert becomes_idle(home)
    process = home.start("run", endless, "-p", "hi", "--ctx", str(1 << 17))
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(60) == 141
    assert becomes_idle(home)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read().decode()
