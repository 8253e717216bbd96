"""The references against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from caldrix_kernels import OPS
from caldrix_kernels.add.reference import add
from caldrix_kernels.attention.reference import attention
from caldrix_kernels.embed.reference import embed
from caldrix_kernels.gather.reference import gather
from caldrix_kernels.linear.reference import linear
from caldrix_kernels.rmsnorm.reference import rmsnorm
from caldrix_kernels.silu_mul.reference import silu_mul


def f32(*values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_the_table_holds_every_op_of_a_plan() -> None:
    assert list(OPS) == ["embed", "rmsnorm", "linear", "rope", "attention", "silu_mul", "add", "gather"]
    assert all(op.name == name for name, op in OPS.items())


def test_embed_takes_table_rows() -> None:
    table = f32([1, 2], [3, 4], [5, 6])
    assert embed(table, [2, 0, 2]).tolist() == [[5, 6], [1, 2], [5, 6]]


def test_embed_prefers_a_given_embedding_and_leaves_the_table_alone() -> None:
    table = f32([1, 2], [3, 4])
    assert embed(table, [1, 1], {1: f32(7, 8)}).tolist() == [[3, 4], [7, 8]]
    assert table.tolist() == [[1, 2], [3, 4]]


def test_rmsnorm_divides_by_the_root_mean_square() -> None:
    # mean of squares (9 + 16 + 0 + 0) / 4 = 6.25, root 2.5
    y = rmsnorm(f32([3, 4, 0, 0]), f32(1, 10, 1, 1), eps=0.0)
    np.testing.assert_allclose(y, [[1.2, 16.0, 0.0, 0.0]], rtol=1e-6)


def test_rmsnorm_adds_eps_to_the_mean_square() -> None:
    y = rmsnorm(f32([1, 1]), f32(1, 1), eps=3.0)
    assert y.tolist() == [[0.5, 0.5]]


def test_rmsnorm_of_large_values_does_not_overflow() -> None:
    y = rmsnorm(f32([1e30, 1e30]), f32(1, 2), eps=1e-5)
    np.testing.assert_allclose(y, [[1.0, 2.0]], rtol=1e-6)


def test_linear_multiplies_by_the_rows_of_the_weight() -> None:
    weight = f32([1, 2], [3, 4], [5, 6])
    assert linear(f32([1, 10], [0, 1]), weight).tolist() == [[21, 43, 65], [2, 4, 6]]


def test_linear_adds_the_bias_to_each_row() -> None:
    y = linear(f32([1, 1], [2, 0]), f32([1, 2], [3, 4]), f32(100, 200))
    assert y.tolist() == [[103, 207], [102, 206]]


def test_linear_of_no_rows() -> None:
    assert linear(np.empty((0, 2), np.float32), f32([1, 2])).shape == (0, 1)


def test_linear_rows_have_the_same_bits_in_any_company() -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((96, 160), np.float32)
    x = random.standard_normal((33, 160), np.float32)
    together = linear(x, weight)
    for row in range(len(x)):
        assert linear(x[row : row + 1], weight).tobytes() == together[row].tobytes()


def test_attention_of_the_first_position_is_its_value() -> None:
    keys, values = f32([[1, 2]], [[9, 9]]), f32([[5, 6]], [[7, 8]])
    assert attention(f32([3, 4]), keys, values, [0], scale=0.5).tolist() == [[5, 6]]


def test_attention_weighs_values_by_softmax() -> None:
    # scores 0 and ln 3: weights 1/4 and 3/4
    keys = f32([[0, 0]], [[math.log(3), 0]])
    values = f32([[0, 4]], [[8, 0]])
    y = attention(f32([2, 5]), keys, values, [1], scale=0.5)
    np.testing.assert_allclose(y, [[6, 1]], rtol=1e-6)


def test_attention_does_not_see_later_positions() -> None:
    keys = np.zeros((3, 1, 1), np.float32)
    values = f32([[2]], [[4]], [[1000]])
    assert attention(f32([1], [1]), keys, values, [0, 1], scale=1.0).tolist() == [[2], [3]]


def test_attention_shares_key_heads_among_neighbouring_query_heads() -> None:
    # Query heads 0 and 1 read the first key head, 2 and 3 the second. Weights 1/4 and 3/4, or halves.
    keys = f32([[0], [0]], [[math.log(3)], [math.log(3)]])
    values = f32([[0], [0]], [[4], [40]])
    y = attention(f32([1, 0, 1, 0]), keys, values, [1], scale=1.0)
    np.testing.assert_allclose(y, [[3, 2, 30, 20]], rtol=1e-6)


def test_attention_keeps_the_last_positions_of_a_window() -> None:
    keys = np.zeros((4, 1, 1), np.float32)
    values = f32([[100]], [[100]], [[2]], [[4]])
    assert attention(f32([1]), keys, values, [3], scale=1.0, window=2).tolist() == [[3]]
    assert attention(f32([1]), keys, values, [3], scale=1.0, window=4).tolist() == [[51.5]]


def test_attention_of_large_scores_does_not_overflow() -> None:
    keys, values = f32([[1000]], [[0]]), f32([[3]], [[5]])
    assert attention(f32([1000]), keys, values, [1], scale=1.0).tolist() == [[3]]


def test_silu_mul_gates() -> None:
    # silu(ln 3) = ln 3 * 3/4; silu(-ln 3) = -ln 3 / 4
    gate = f32([0, math.log(3), -math.log(3)])
    y = silu_mul(gate, f32([5, 2, 4]))
    np.testing.assert_allclose(y, [[0, 1.5 * math.log(3), -math.log(3)]], rtol=1e-6)


def test_silu_mul_of_large_gates_neither_overflows_nor_warns() -> None:
    with np.errstate(over="raise"):
        y = silu_mul(f32([1000, -1000, -3e38]), f32([1, 1, 1]))
    assert y.tolist() == [[1000, 0, 0]]


def test_add() -> None:
    assert add(f32([1, 2]), f32([10, 20])).tolist() == [[11, 22]]


@pytest.mark.parametrize("wanted", [[], [1], [2, 0]])
def test_gather_keeps_the_wanted_rows_in_order(wanted: list[int]) -> None:
    x = f32([1], [2], [3])
    assert gather(x, wanted).tolist() == [[x[i, 0]] for i in wanted]
    assert gather(x, wanted).shape == (len(wanted), 1)
