"""The model families: how each reads its config.json and what its plan is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from caldrixd.architectures import llama, qwen2
from caldrixd.architectures.blocks import IGNORED
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """One entry of config.json's `architectures`.

    `ignored` lists tensor name endings a checkpoint may hold that the plan does not use.
    """

    read_config: Callable[[Mapping[str, Any]], ModelSpec]
    build: Callable[[ModelSpec], Plan]
    ignored: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read_config, llama.build, IGNORED),
    "Qwen2ForCausalLM": Family(qwen2.read_config, qwen2.build, IGNORED),
}
