"""Sampling, stop texts and the engine's flags from the command line to the numba lane and back."""

from __future__ import annotations

import json
from typing import Any

from caldrix_protocol.refusals import sentence
from tests.support.cli import Home
from tests.support.models import tiny

LLAMA = str(tiny("tiny-llama"))
ASK = ("run", LLAMA, "-p", "hi", "--max-tokens", "16")
HOT = ("--temperature", "1.5")


def answer(home: Home, *flags: str) -> dict[str, Any]:
    result = home.caldrix(*ASK, "--json", *flags)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_a_reply_can_be_had_again_by_the_seed_that_json_reports(shared: Home) -> None:
    first, second = answer(shared, *HOT), answer(shared, *HOT)
    assert first["ids"] != second["ids"]
    again = answer(shared, *HOT, "--seed", str(first["seed"]))
    assert (again["ids"], again["seed"]) == (first["ids"], first["seed"])
    knobs = ("--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2")
    seeded = answer(shared, *HOT, *knobs, "--seed", "1")
    assert (
        answer(shared, *HOT, *knobs, "--seed", "1", "--threads", "1", "--max-batch", "1")["ids"]
        == seeded["ids"]
    )
    assert answer(shared, *HOT, *knobs, "--seed", "2")["ids"] != seeded["ids"]


def test_without_a_temperature_nothing_is_drawn(shared: Home) -> None:
    plain = answer(shared)
    cut = answer(shared, "--seed", "7", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.2", "--temperature=0")
    assert cut["ids"] == plain["ids"]
    assert plain["seed"] is cut["seed"] is None
    assert answer(shared, "--repetition-penalty", "5")["ids"] != plain["ids"]
    assert answer(shared, *HOT, "--top-k", "1", "--seed", "3")["ids"] == plain["ids"]


def test_a_stop_text_ends_the_answer_before_it(shared: Home) -> None:
    plain = answer(shared)
    stop = plain["text"][6:9]
    cut = answer(shared, "--stop", "never said", f"--stop={stop}")
    assert cut["text"] == plain["text"][: plain["text"].find(stop)]
    assert cut["finish_reason"] == "stop"
    shown = shared.caldrix(*ASK, "--stop", stop)
    assert (shown.status, shown.out.removesuffix("\n")) == (0, cut["text"].removesuffix("\n"))


def test_a_draft_model_is_a_notice_and_the_run_goes_on(shared: Home) -> None:
    penalty = ("--repetition-penalty", "1.3")
    plain = answer(shared, *penalty)
    result = shared.caldrix(*ASK, *penalty, "--json", "--draft-model", "demo", "--sampler", "host")
    assert result.status == 0
    assert json.loads(result.out)["ids"] == plain["ids"]
    assert sentence("notice/no-speculation", draft="demo") in result.err
