from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Home, new_home
from tests.support.daemon import kernel_cache
from tests.support.models import tiny


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """A home of its own, with the compiled kernels of all test runs."""
    with new_home(kernel_cache(request.config)) as made:
        yield made


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Home]:
    """One home, and so one daemon, for all tests of a module that leave it as it was."""
    with new_home(kernel_cache(request.config)) as made:
        yield made


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model without an end token and with a long context: its reply lasts until it is stopped."""
    directory = tmp_path_factory.mktemp("models") / "endless"
    shutil.copytree(tiny("tiny-llama"), directory)
    _edit(directory / "config.json", max_position_embeddings=1 << 20, eos_token_id=None)
    _edit(directory / "generation_config.json", eos_token_id=None)
    _edit(directory / "tokenizer_config.json", eos_token=None)
    return str(directory)


def _edit(path: Path, **fields: int | None) -> None:
    edited = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in edited.items() if value is not None}))
