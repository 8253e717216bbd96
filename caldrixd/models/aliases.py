"""Short names for models."""

from __future__ import annotations

from dataclasses import dataclass

DEMO = "demo"  # comes from a package, not from the hub


@dataclass(frozen=True)
class Alias:
    """A repo on the hub at a revision. One that is no commit (40 hex digits) is not pinned."""

    repo: str
    revision: str
    licence: str


HUB: dict[str, Alias] = {
    "smollm2": Alias("HuggingFaceTB/SmolLM2-135M", "93efa2f097d58c2a74874c7e644dbc9b0cee75a2", "Apache-2.0"),
    "smollm2-instruct": Alias(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac", "Apache-2.0"
    ),
    "llama-8b": Alias(
        "meta-llama/Llama-3.1-8B-Instruct",
        "0e9e39f249a16976918f6564b8830bc894c89659",
        "Llama 3.1 Community License, gated",
    ),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca", "Apache-2.0"),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218", "Apache-2.0"),
    "qwen3-30b-a3b": Alias("Qwen/Qwen3-30B-A3B", "ad44e777bcd18fa416d9da3bd8f70d33ebb85d39", "Apache-2.0"),
    "decider-0.8b": Alias("Mapika/decider-0.8b", "main", "as its repo says"),
    "smolvlm-256m": Alias(
        "HuggingFaceTB/SmolVLM-256M-Instruct", "7e3e67edbbed1bf9888184d9df282b700a323964", "Apache-2.0"
    ),
}
NAMES = (*HUB, DEMO)
