"""The demo model from the command line, in the user's own cache: the first thing a new user runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldrix_protocol.address import cache_directory
from tests.support.cli import Home, new_home
from tests.support.demo import demo_model

__all__ = ["demo_model"]


@pytest.fixture(scope="module")
def demo_home(demo_model: Path) -> Iterator[Home]:
    with new_home(Path(cache_directory(os.environ)).parent) as home:
        yield home


def test_demo_names_paris(demo_home: Home) -> None:
    result = demo_home.caldrix("run", "demo", "-p", "What is the capital of France?")
    assert result.status == 0
    assert "Paris" in result.out
    assert "caldrix:" not in result.out
