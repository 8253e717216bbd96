"""The real model through the real command: the tokens transformers gives in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest

from caldrix_protocol.messages import Done, Generate
from tests.support.cli import Home
from tests.support.daemon import Caller
from tests.support.models import reference, smollm2

PROMPTS: dict[str, dict[str, Any]] = {
    prompt["name"]: prompt for prompt in reference("smollm2-135m-instruct")["prompts"]
}
RAW = [name for name, prompt in PROMPTS.items() if "prompt" in prompt]
CHATS = [name for name, prompt in PROMPTS.items() if "messages" in prompt]


def expected_ids(prompt: dict[str, Any]) -> list[int]:
    ids: list[int] = prompt["generated_ids"]
    return ids if prompt["eos_step"] is None else ids[: prompt["eos_step"] + 1]


def test_there_are_twelve_references() -> None:
    assert (len(RAW), len(CHATS)) == (10, 2)


@pytest.mark.parametrize("name", RAW)
def test_raw_prompts(shared: Home, name: str) -> None:
    prompt = PROMPTS[name]
    ids = expected_ids(prompt)
    result = shared.caldrix(
        "run", str(smollm2()), "--raw", "--json", "-p", prompt["prompt"], "--max-tokens", str(len(ids))
    )
    assert result.status == 0, result.err
    answer = json.loads(result.out)
    assert answer["prompt_ids"] == prompt["prompt_ids"]
    assert answer["ids"] == ids
    assert answer["finish_reason"] == ("length" if prompt["eos_step"] is None else "stop")


@pytest.mark.parametrize("name", CHATS)
def test_chats(shared: Home, name: str) -> None:
    prompt = PROMPTS[name]
    assert shared.caldrix("doctor").status == 0  # so that the daemon runs
    turns = tuple(
        {"role": turn["role"], "content": ({"type": "text", "text": turn["content"]},)}
        for turn in prompt["messages"]
    )
    ids = expected_ids(prompt)
    with Caller(shared.address.socket) as caller:
        opened = caller.open(smollm2())
        done = caller.ask(Generate(opened.handle, turns=turns, max_tokens=len(ids)))[-1]
    assert type(done) is Done
    assert list(done.prompt_ids) == prompt["prompt_ids"]
    assert list(done.ids) == ids
