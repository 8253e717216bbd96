"""`caldrix run` from the command line to the numba lane and back, with the tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from caldrix_client.terminal import safe
from tests.support.cli import Home, Screen, finish
from tests.support.models import TINY, reference, tiny

LLAMA = str(tiny("tiny-llama"))


@pytest.mark.parametrize("name", TINY)
def test_raw_json_is_the_reference(shared: Home, name: str) -> None:
    for prompt in reference(name)["prompts"]:
        ids = prompt["generated_ids"]
        length = len(ids) if prompt["eos_step"] is None else prompt["eos_step"]
        limit = ("--max-tokens", str(len(ids)))
        result = shared.caldrix("run", str(tiny(name)), "-p", prompt["prompt"], "--raw", "--json", *limit)
        answer = json.loads(result.out)
        assert result.status == 0
        assert answer["prompt_ids"] == prompt["prompt_ids"]
        assert answer["ids"][:length] == ids[:length]
        assert answer["finish_reason"] == ("length" if prompt["eos_step"] is None else "stop")
        assert answer["timings"]["reply_tokens"] == len(answer["ids"])


def test_the_same_prompt_gives_the_same_text_as_json(shared: Home) -> None:
    arguments = ("run", LLAMA, "-p", "hi", "--max-tokens", "8")
    text = json.loads(shared.caldrix(*arguments, "--json").out)["text"]
    result = shared.caldrix(*arguments, "--stats")
    assert result.status == 0
    assert result.out.removesuffix("\n") == text.removesuffix("\n")
    said = result.err.splitlines()
    assert said[0].startswith("caldrix: reading the directory ")
    assert "caldrix: backend cpu (auto; `caldrix doctor` shows why)" in said
    assert said[-1].startswith("caldrix: load ")


def test_a_broken_model_is_one_sentence(shared: Home, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(LLAMA, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    result = shared.caldrix("run", str(broken), "-p", "hi")
    assert (result.status, result.out) == (1, "")
    assert "config.json: hidden_size must be" in result.err
    assert "Traceback" not in result.err
    assert shared.caldrix("run", LLAMA, "-p", "hi", "--max-tokens", "1").status == 0


def test_a_chat_in_a_terminal(shared: Home) -> None:
    alone = [shared.caldrix("run", LLAMA, "-p", text, "--max-tokens", "4").out for text in ("one", "two")]
    with Screen(shared, "run", LLAMA, "--max-tokens", "4", "--plain") as screen:
        screen.expect("> ")
        screen.press("one\n")
        first = screen.expect("\r\n> ")
        screen.press("/reset\n")
        screen.expect("the conversation is cleared\r\n> ")
        screen.press("two\n")
        second = screen.expect("\r\n> ")
        screen.press("\x04")
        assert screen.end() == 0
    on_screen = [safe(text).replace("\n", "\r\n") for text in alone]
    assert [first, second] == [f"one\r\n{on_screen[0]}> ", f"two\r\n{on_screen[1]}> "]


def test_ctrl_c_ends_an_answer_and_the_next_one_is_clean(shared: Home, endless: str) -> None:
    clean = shared.caldrix("run", endless, "-p", "hi", "--max-tokens", "20", "--json").out
    process = shared.start("run", endless, "-p", "hi", "--ctx", str(1 << 17))
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.status == 130
    assert result.out.endswith("\n")
    again = shared.caldrix("run", endless, "-p", "hi", "--max-tokens", "20", "--json").out
    assert json.loads(again)["ids"] == json.loads(clean)["ids"]


def test_a_killed_worker_is_one_sentence_and_the_next_run_answers(home: Home, endless: str) -> None:
    process = home.start("run", endless, "-p", "hi", "--ctx", str(1 << 17))
    assert process.stdout is not None
    assert process.stdout.read(1)
    rows = [line.split() for line in home.caldrix("ps").out.splitlines()]
    worker = dict(zip(rows[0], rows[1], strict=False))
    assert worker["MODEL"] == endless
    assert worker["STATE"] == "answering"
    os.kill(int(worker["PID"]), signal.SIGKILL)
    result = finish(process)
    assert result.status == 1
    assert result.err.splitlines()[-1] == (
        f"caldrix: the worker process of {endless} ended unexpectedly (killed by signal 9); try again"
    )
    assert home.caldrix("run", endless, "-p", "hi", "--max-tokens", "3").status == 0


def test_stop_frees_a_model_by_the_name_it_was_run_with(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny("tiny-llama").parent)
    assert home.caldrix("run", "tiny-llama", "-p", "hi", "--max-tokens", "1").status == 0
    assert "tiny-llama" in home.caldrix("ps").out
    assert home.caldrix("stop", "tiny-llama") == (0, "", "")
    assert home.caldrix("ps").out.count("\n") == 1
    assert home.caldrix("stop", "tiny-llama").status == 1
