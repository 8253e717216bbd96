from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cli import Home, new_home


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made
