from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cli import Home, new_home
from tests.support.daemon import kernel_cache


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
