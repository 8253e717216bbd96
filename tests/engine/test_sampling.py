"""From logits to a token."""

from __future__ import annotations

import numpy as np
import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.engine.sampling import greedy


def test_greedy_takes_the_largest() -> None:
    assert greedy(np.array([-3, 2, 1], np.float32)) == 1


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert greedy(np.array([1, 7, 7, 0, 7], np.float32)) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_greedy_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(Refused) as caught:
        greedy(np.array([1, value, 3], np.float32))
    assert caught.value.code == "run/not-finite"
