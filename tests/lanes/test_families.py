"""Every tiny model, through the lane and the engine: what transformers answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from caldrix_kernels.formats import widen
from caldrixd.engine.engine import Engine, Request
from caldrixd.lanes.lane import Program
from caldrixd.plan.plan import Plan, Tensor
from tests.support import models, recorded
from tests.support.recorded import Float32

# A distance of the two largest logits that another order of summing may turn over.
DOUBTFUL = 2e-4

# The same weights, stored in two ways.
MOE_LAYOUTS = ("tiny-qwen3-moe-stacked", "tiny-qwen3-moe-raw")

Reply = list[tuple[int, Float32]]


def replies(plan: Plan, tensors: Mapping[str, Tensor], prompts: list[dict[str, Any]]) -> list[Reply]:
    """Tokens and the logits they were picked from, for all prompts served together."""
    program = recorded.load(plan, tensors)
    engine = Engine(cast(Program, program))
    for id, prompt in enumerate(prompts):
        engine.submit(Request(id, tuple(prompt["prompt_ids"]), 512, len(prompt["generated_ids"])))
    got: list[Reply] = [[] for _ in prompts]
    while engine.busy:
        for event, logits in program.take(engine.step()):
            assert event.token is not None
            got[event.id].append((event.token, logits))
    program.close()
    return got


@pytest.mark.parametrize("name", models.TINY)
def test_replies_are_the_reference(name: str) -> None:
    """Ids up to a doubtful one; top-5 logits within 1e-4, margins and log probabilities within 2e-4."""
    prompts = models.reference(name)["prompts"]
    for prompt, reply in zip(prompts, replies(*models.opened(models.tiny(name)), prompts), strict=True):
        margins, generated = prompt["margins"], prompt["generated_ids"]
        sure = next((step for step, margin in enumerate(margins) if margin <= DOUBTFUL), len(generated))
        assert [token for token, _ in reply[:sure]] == generated[:sure]
        for number, (_, logits) in enumerate(reply[: sure + 1]):
            second, first = np.sort(logits.astype(np.float64))[-2:]
            assert abs(first - second - margins[number]) < 2e-4
            assert abs(np.log(np.exp(logits - first).sum()) + prompt["logprobs"][number]) < 2e-4
            for token, value in prompt["top5"][number] if number < len(prompt["top5"]) else ():
                assert abs(float(logits[int(token)]) - value) < 1e-4


def bits(plan: Plan, tensors: Mapping[str, Tensor], name: str) -> list[bytes]:
    prompts = models.reference(name)["prompts"]
    return [logits.tobytes() for reply in replies(plan, tensors, prompts) for _, logits in reply]


def test_the_format_that_stores_a_value_changes_no_bit() -> None:
    plan, tensors = models.opened(models.tiny("tiny-llama"))
    widened = {
        name: Tensor(
            "F32", tensor.shape, widen(tensor.data, tensor.dtype, tensor.shape).reshape(-1).view(np.uint8)
        )
        for name, tensor in tensors.items()
    }
    assert bits(plan, widened, "tiny-llama") == bits(plan, tensors, "tiny-llama")


def test_stacked_experts_are_the_same_experts() -> None:
    stacked, raw = (bits(*models.opened(models.tiny(name)), name) for name in MOE_LAYOUTS)
    assert stacked == raw
