"""Short names for models. Their table is aliases.json, which `caldrix models pin` rewrites."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

DEMO = "demo"  # comes from a package, not from the hub
TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Alias:
    """A repo on the hub at a revision. One that is no commit (40 hex digits) is not pinned."""

    repo: str
    revision: str
    licence: str


def read(text: str) -> dict[str, Alias]:
    """The aliases of a table by name."""
    return {name: Alias(**row) for name, row in json.loads(text).items()}


def written(table: Mapping[str, Alias]) -> str:
    """What `read` reads."""
    return json.dumps({name: asdict(alias) for name, alias in table.items()}, indent=1) + "\n"


def documented(name: str, alias: Alias) -> str:
    """The row of docs/models.md."""
    return f"| `{name}` | {alias.repo} | `{alias.revision}` | {alias.licence} |\n"


HUB: Mapping[str, Alias] = MappingProxyType(read(TABLE.read_text("utf-8")))
NAMES = (*HUB, DEMO)
