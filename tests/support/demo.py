"""The demo model, fetched once into the user's own cache: tests that need a real model share it."""

import functools
import os
from pathlib import Path

import pytest

from caldrixd.fetcher import demo


@functools.cache
def demo_directory() -> Path:
    """The directory of the demo model; downloaded when it is not in the cache yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caldrix"
    return demo.fetch(cache, os.environ, lambda message: None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the demo model."""
    return demo_directory()
