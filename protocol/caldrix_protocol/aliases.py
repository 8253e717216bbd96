"""The short names of models that a daemon knows: what shells complete before there is one to ask."""

from __future__ import annotations

ALIASES = (
    "smollm2",
    "smollm2-instruct",
    "llama-8b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "decider-0.8b",
    "smolvlm-256m",
    "demo",
)
