"""The command against the hub of tests: a cache of the test's own, and what must hold of every refusal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caldrixd.models import aliases
from tests.support import hub
from tests.support.changed import Change, contents
from tests.support.cli import COMMAND, Home, Result, finish
from tests.support.models import tiny

NAME = "tiny/llama"
MODEL = tiny("tiny-llama")
PIN = aliases.HUB["smollm2"].revision
ONE_TOKEN = ("-p", "hi", "--max-tokens", "1")
WEIGHTS = (MODEL / "model.safetensors").read_bytes()
INDEX = "model.safetensors.index.json"
NOTHING_ELSE = "nothing else was downloaded"


def model(changes: Mapping[str, Change] | None = None, **more: Any) -> hub.Repo:
    """The tiny model as a repository, with changes."""
    return hub.repo(contents(MODEL, changes or {}), **more)


def indexed(weight_map: Any, more: Mapping[str, Change] | None = None) -> hub.Repo:
    """The tiny model with an index and its weights in part.safetensors."""
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return model({"model.safetensors": None, INDEX: index, "part.safetensors": WEIGHTS, **(more or {})})


def start(
    home: Home, directory: Path, server: hub.Server, *arguments: str, **more: str
) -> subprocess.Popen[bytes]:
    """The command, running, with the hub as its endpoint and a Hugging Face cache of the test's own."""
    variables = {**home.environment, **server.environment, "HF_HOME": str(directory / "hf"), **more}
    pipe = subprocess.PIPE
    return subprocess.Popen((*COMMAND, *arguments), stdin=pipe, stdout=pipe, stderr=pipe, env=variables)


def run(home: Home, directory: Path, server: hub.Server, name: str = NAME, **more: str) -> Result:
    """Ask for one token."""
    return finish(start(home, directory, server, "run", name, *ONE_TOKEN, **more))


def pull(home: Home, directory: Path, server: hub.Server, name: str = NAME, **more: str) -> Result:
    """Have the model in the cache."""
    return finish(start(home, directory, server, "pull", name, **more))


def refused(result: Result, *words: str) -> None:
    """The run ended with status 1 and one last line that has all the words."""
    assert (result.status, result.out) == (1, ""), result.err
    last = result.err.splitlines()[-1]
    assert [word for word in words if word not in last] == [], result.err
    assert "internal error" not in result.err


def below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_symlink() or path.is_file())


def nothing_outside(directory: Path) -> None:
    """All that was written is inside the Hugging Face cache, and no link there leads out of it."""
    cache = directory / "hf/hub"
    for path in below(directory):
        assert path.resolve().is_relative_to(cache.resolve()), path
