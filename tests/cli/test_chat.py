"""A chat from the keys to the numba lane and back: a real pseudo-terminal, a real daemon, tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from caldrix_client.terminal import safe
from caldrix_protocol.refusals import sentence
from tests.support.cli import SECONDS, Home, Screen
from tests.support.models import smollm2, tiny

LLAMA = str(tiny("tiny-llama"))
FULL = (
    "the context of {} tokens is full, so the answer ends here; a larger --ctx holds more, "
    "up to what the model was made for"
)


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def said(err: str) -> list[str]:
    """What stderr says, but for the lines about the model and the daemon."""
    about = ("started caldrixd", "reading the ", "loading ", "backend ", "cpu: ", "compil", "kernels ")
    lines = [line.removeprefix("caldrix: ") for line in err.splitlines()]
    return [line for line in lines if not line.startswith(about)]


def becomes(home: Home, state: str) -> bool:
    """Whether `caldrix ps` shows a model in this state, if not at once then some looks later."""
    deadline = time.monotonic() + SECONDS
    while f"  {state}  " not in home.caldrix("ps").out:
        if time.monotonic() > deadline:
            return False
    return True


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
        assert becomes(home, "idle")
        screen.press("\x03")
        assert screen.end() == 0


def test_ctrl_c_at_the_prompt_and_ctrl_d_end_the_chat(shared: Home) -> None:
    for keys in ("half a message\x03", "\x04"):
        with Screen(shared, "run", LLAMA) as screen:
            screen.ready()
            screen.press(keys)
            assert screen.end() == 0


def in_terminal(home: Home, *keys: str, flags: tuple[str, ...] = ()) -> tuple[list[dict[str, Any]], str]:
    """The answers of a chat in a terminal whose stdout is a pipe, and what its screen shows."""
    reading, writing = os.pipe()
    try:
        with Screen(home, "run", LLAMA, "--json", "--max-tokens", "8", *flags, out=writing) as screen:
            os.close(writing)
            with open(reading, encoding="utf-8", closefd=False) as out:
                answers = []
                for pressed in keys:
                    screen.ready()
                    screen.press(pressed)
                    answers.append(json.loads(out.readline()))
            screen.ready()
            screen.press("\x04")
            assert screen.end() == 0
    finally:
        os.close(reading)
    return answers, screen.shown


def test_a_paste_of_five_lines_is_one_message(shared: Home) -> None:
    lines = "one\ntwo\n\n/reset\nfive"
    pasted = "\x1b[200~" + lines.replace("\n", "\r") + "\x1b[201~\r"
    (answer,), _ = in_terminal(shared, pasted)
    (alone,) = objects(shared.caldrix("run", LLAMA, "--json", "--max-tokens", "8", "-p", lines).out)
    assert answer["prompt_ids"] == alone["prompt_ids"]


def test_what_a_terminal_shows_when_exchanges_are_dropped(shared: Home) -> None:
    answers, shown = in_terminal(shared, *("word\r" for _ in range(4)), flags=("--ctx", "64"))
    dropped = [answer["dropped_turns"] for answer in answers if answer["dropped_turns"]]
    assert dropped
    for count in dropped:
        assert f"caldrix: {sentence('notice/dropped-turns', count=count)}\r\n" in shown


# What is typed in one chat, and what the screen answers: each command with nothing, a value, off, nonsense.
COMMANDS = (
    ("/temperature", "temperature 0"),
    ("/temperature 0.7", "temperature 0.7"),
    ("/temperature off", "temperature 0"),
    ("/temperature hot", "/temperature must be a finite number of at least 0, got hot"),
    ("/top-k", "top-k 0"),
    ("/top-k 40", "top-k 40"),
    ("/top-k off", "top-k 0"),
    ("/top-k -1", "/top-k must be an integer from 0 to 2147483647, got -1"),
    ("/top-p", "top-p 1"),
    ("/top-p .9", "top-p 0.9"),
    ("/top-p off", "top-p 1"),
    ("/top-p 0", "/top-p must be a number over 0 and at most 1, got 0"),
    ("/min-p", "min-p 0"),
    ("/min-p .05", "min-p 0.05"),
    ("/min-p off", "min-p 0"),
    ("/min-p nan", "/min-p must be a number from 0 to 1, got nan"),
    ("/repetition-penalty", "repetition-penalty 1"),
    ("/repetition-penalty 1.1", "repetition-penalty 1.1"),
    ("/repetition-penalty off", "repetition-penalty 1"),
    ("/repetition-penalty 0", "/repetition-penalty must be a finite number over 0, got 0"),
    ("/seed", "seed off"),
    ("/seed 7", "seed 7"),
    ("/seed off", "seed off"),
    ("/seed 1.5", "/seed must be an integer from 0 to 18446744073709551615, got 1.5"),
    ("/sampling", "temperature 0, top-k 0, top-p 1, min-p 0, repetition-penalty 1, seed off"),
    ("/sampling 1", "/sampling takes nothing, got 1"),
    ("/system", "system off"),
    ("/system be brief", "system be brief"),
    ("/system off", "system off"),
    ("/system @/nowhere", "/system cannot read /nowhere: No such file or directory"),
    ("/context", "the context holds 512 tokens: 0 used, 128 reserved for the answer, 384 free"),
    ("/context off", "/context takes nothing, got off"),
    ("/undo", "nothing was said yet"),
    ("/regen", "nothing was said yet"),
    ("/reset", "the conversation is cleared"),
    ("/reset off", "/reset takes nothing, got off"),
    ("/image cat.png", "/image is not available yet in this version"),
    ("/help me", "/help takes nothing, got me"),
    ("/quit now", "/quit takes nothing, got now"),
    ("/sytem", "unknown command /sytem; the nearest is /system, "),
    ("/help", "the commands of a chat\r\n  /reset "),
)


def test_every_command_with_a_value_off_nothing_and_nonsense(shared: Home) -> None:
    with Screen(shared, "run", LLAMA, "--ctx", "512") as screen:
        for typed, answer in COMMANDS:
            screen.ready()
            screen.press(f"{typed}\r")
            screen.expect("\x1b[?2004l")
            assert f"caldrix: {answer}" in screen.expect("\x1b[?2004h").replace("\x1b[0m", "")
            screen.press("\x15")
            screen.press(" \r")  # nothing: the next prompt
        screen.ready()
        screen.press("/exit\r")
        assert screen.end() == 0


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences have in common from their beginning on."""
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def read_again(before: dict[str, Any], after: dict[str, Any]) -> int:
    """How many tokens were prefilled that an answer before had left in its sequence.

    The sequence holds the prompt and the reply, but for the last token of it.
    """
    held = [*before["prompt_ids"], *before["ids"][:-1]]
    known = min(shared_beginning(held, after["prompt_ids"]), len(after["prompt_ids"]) - 1)
    return known - int(after["timings"]["cached_tokens"])


TYPED = b"What is the capital of France?\nAnd of Spain?\n/regen\nThank you.\n"


def test_a_later_turn_prefills_what_is_not_known(shared: Home) -> None:
    """This model's answers have other ids when they are read again, from some place on."""
    result = shared.caldrix("run", LLAMA, "--json", "--max-tokens", "8", typed=TYPED)
    answers = objects(result.out)
    assert (result.status, len(answers)) == (0, 4)
    for before, after in pairwise(answers):
        assert read_again(before, after) == 0
        assert after["timings"]["cached_tokens"] >= len(before["prompt_ids"]) - 1


def test_a_later_turn_of_smollm2_prefills_the_new_tokens_only(shared: Home) -> None:
    result = shared.caldrix("run", str(smollm2()), "--json", "--max-tokens", "8", typed=TYPED)
    first, second, again, last = objects(result.out)
    assert result.status == 0
    for before, after in ((first, second), (again, last)):
        said = [*before["prompt_ids"], *before["ids"]]
        assert after["prompt_ids"][: len(said)] == said
        assert after["timings"]["cached_tokens"] == len(said) - 1
    assert again["prompt_ids"] == second["prompt_ids"]
    assert again["timings"]["cached_tokens"] == len(again["prompt_ids"]) - 1


def test_a_template_that_renders_the_past_anew_shares_what_is_left(shared: Home, tmp_path: Path) -> None:
    """As of templates that leave out the thinking of earlier answers."""
    directory = tmp_path / "forgetful"
    shutil.copytree(tiny("tiny-llama"), directory)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:3] if m.role == 'assistant' else "
        "m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    flags = ("--json", "--max-tokens", "12")
    result = shared.caldrix("run", str(directory), *flags, typed=b"one\ntwo\nthree\n")
    answers = objects(result.out)
    assert (result.status, len(answers)) == (0, 3)
    for before, after in pairwise(answers):
        assert read_again(before, after) == 0
        assert after["timings"]["cached_tokens"] >= len(before["prompt_ids"])
        assert len(after["prompt_ids"]) - after["timings"]["cached_tokens"] > 10


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


def test_short_messages_are_answered_and_an_empty_line_is_none(shared: Home) -> None:
    for flags in (("-p", " "), ("-p", "a"), ("--raw", "-p", " "), ("--raw", "-p", "a")):
        result = shared.caldrix("run", LLAMA, *flags, "--json", "--max-tokens", "2")
        assert (result.status, len(objects(result.out))) == (0, 1), result.err
    assert shared.caldrix("run", LLAMA, "-q", typed=b"\n  \n\t\n") == (0, "", "")
    assert shared.caldrix("run", LLAMA, "-p", "") == (2, "", "caldrix: -p needs a prompt that is not empty\n")


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


def test_undo_and_regen_after_an_answer_that_was_stopped(home: Home, endless: str) -> None:
    """What came of it can be taken back, or replaced by an answer to the same prompt."""
    begun = home.caldrix("run", endless, "--max-tokens", "6", "-p", "hi").out.removesuffix("\n")
    begun = safe(begun).replace("\n", "\r\n")
    with Screen(home, "run", endless, "--ctx", str(1 << 17)) as screen:
        for line, words in (
            ("hi", begun),
            ("/undo", sentence("status/chat-undo", count=0)),
            ("/regen", "nothing was said yet"),
            ("hi", begun),
            ("/regen", begun),
        ):
            screen.ready()
            screen.press(f"{line}\r")
            screen.expect("\x1b[?2004l")
            screen.expect(words)
            if words == begun:
                screen.press("\x03")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def test_system_in_a_chat_holds_from_the_next_message_on(shared: Home) -> None:
    typed = b"one\n/system S\ntwo\n/system off\n/undo\ntwo\n"
    result = shared.caldrix("run", LLAMA, "--json", "--max-tokens", "4", typed=typed)
    plain, told, again = objects(result.out)
    assert len(told["prompt_ids"]) > len(again["prompt_ids"])
    assert shared_beginning(plain["prompt_ids"], again["prompt_ids"]) == len(plain["prompt_ids"])
    assert shared_beginning(plain["prompt_ids"], told["prompt_ids"]) < 3


def test_a_chat_outlives_its_daemon_and_its_worker(home: Home, endless: str) -> None:
    with Screen(home, "run", endless, "--ctx", str(1 << 17)) as screen:
        screen.ready()
        screen.press("hi\r")
        screen.expect("\x1b[?2004l")
        assert becomes(home, "answering")
        os.kill(daemon(home), signal.SIGKILL)
        screen.expect("caldrix: caldrixd closed the connection before the request ended\r\n")
        screen.ready()
        screen.press("/sampling\r")
        screen.expect("caldrix: temperature 0, ")
        screen.ready()
        screen.press("hi\r")
        screen.expect("caldrix: started caldrixd (pid ")
        assert becomes(home, "answering")
        screen.press("\x03")
        screen.ready()
        assert home.caldrix("stop").status == 0  # the model is loaded again for the next message
        screen.press("hi\r")
        screen.expect("caldrix: loading ")
        assert becomes(home, "answering")
        os.kill(worker(home), signal.SIGKILL)
        screen.expect("caldrix: the worker process of ")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def daemon(home: Home) -> int:
    return int((home.path / "run" / "caldrix" / "caldrixd.lock").read_text())


def worker(home: Home) -> int:
    """The process of the only model that is loaded."""
    titles, row = home.caldrix("ps").out.splitlines()
    return int(row[titles.index("PID") :].split()[0])


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
    assert process.wait(SECONDS) == 143
    process.communicate()
    assert becomes(home, "idle")
    process = home.start("run", endless, "-p", "hi", "--ctx", str(1 << 17))
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(SECONDS) == 141
    assert becomes(home, "idle")
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read().decode()
