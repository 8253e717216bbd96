"""Daemons for these tests. All of them share one directory of compiled kernels, kept between runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, Home, kernel_cache, private_home, running_daemon
from tests.support.models import tiny

LONG_CTX = 1 << 17


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    with private_home(kernel_cache(request.config)) as home:
        yield home


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    with running_daemon(home) as daemon:
        yield daemon


@pytest.fixture
def endless(home: Home) -> Iterator[Daemon]:
    """A daemon whose cc never ends, so that `cpu_kernels="c"` loads for ever."""
    cc = home.root / "bin" / "cc"
    cc.parent.mkdir()
    cc.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 10000\n', "ascii")
    cc.chmod(0o755)
    home.changes = {"PATH": f"{cc.parent}{os.pathsep}{os.environ['PATH']}"}
    with running_daemon(home) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One daemon for all tests of a module that leave it as it was."""
    with private_home(kernel_cache(request.config)) as home, running_daemon(home) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has no end token, so that a reply goes on for minutes."""
    directory = tmp_path_factory.mktemp("models") / "talkative"
    shutil.copytree(tiny("tiny-llama"), directory)
    _edit(directory / "config.json", max_position_embeddings=LONG_CTX, eos_token_id=None)
    _edit(directory / "generation_config.json", eos_token_id=None)
    _edit(directory / "tokenizer_config.json", eos_token=None)
    return directory


def _edit(path: Path, **fields: int | None) -> None:
    """Set fields of a JSON object; None removes one."""
    edited = {**json.loads(path.read_text("utf-8")), **fields}
    kept = {name: value for name, value in edited.items() if value is not None}
    path.write_text(json.dumps(kept), "utf-8")
