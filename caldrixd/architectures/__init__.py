"""The model families: how each reads its config.json and what its plan is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from caldrixd.architectures import llama, mistral, qwen2, qwen3, qwen3_5, qwen3_moe
from caldrixd.architectures.blocks import decoder
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec

# What any checkpoint may hold that its plan does not use: a tied head wins over a stored one.
IGNORED = ("*.self_attn.rotary_emb.inv_freq", "lm_head.weight")
# The heads that draft tokens, and the part that sees.
NOT_TEXT = ("mtp.*", "model.visual.*")


@dataclass(frozen=True)
class Family:
    """One entry of config.json's `architectures`.

    `ignored` lists names of tensors, with `*` for anything, that a checkpoint may hold and the plan does
    not use. `stacked` says which last name of a tensor stands for the matrices of all experts, and which
    parts of an expert follow each other in it.
    """

    read_config: Callable[[Mapping[str, Any]], ModelSpec]
    build: Callable[[ModelSpec], Plan] = decoder
    ignored: tuple[str, ...] = IGNORED
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read_config),
    "MistralForCausalLM": Family(mistral.read_config),
    "Qwen2ForCausalLM": Family(qwen2.read_config),
    "Qwen3ForCausalLM": Family(qwen3.read_config),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read_config, stacked=qwen3_moe.STACKED),
    "Qwen3_5ForCausalLM": Family(qwen3_5.read_config, ignored=IGNORED + NOT_TEXT),
    "Qwen3_5ForConditionalGeneration": Family(qwen3_5.read_full_config, ignored=IGNORED + NOT_TEXT),
}
