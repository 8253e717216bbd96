"""The references against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from caldrix_kernels import OPS
from caldrix_kernels.add.reference import add
from caldrix_kernels.attention.reference import attention
from caldrix_kernels.causal_conv.reference import causal_conv
from caldrix_kernels.delta_rule.reference import delta_rule
from caldrix_kernels.embed.reference import embed
from caldrix_kernels.experts.reference import experts, route
from caldrix_kernels.gated_rmsnorm.reference import gated_rmsnorm
from caldrix_kernels.gather.reference import gather
from caldrix_kernels.linear.reference import linear
from caldrix_kernels.rmsnorm.reference import rmsnorm
from caldrix_kernels.sigmoid_mul.reference import sigmoid_mul
from caldrix_kernels.silu_mul.reference import silu_mul
from caldrix_kernels.slice.reference import slice_columns
from caldrixd.plan import oracle


def f32(*values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def test_the_table_holds_every_op_of_a_plan() -> None:
    assert OPS.keys() == oracle.RUN.keys()
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


def test_rmsnorm_of_groups_norms_each_by_itself() -> None:
    # Root mean squares 5 / sqrt(2) and 1; the gain is the same for both.
    y = rmsnorm(f32([3, 4, 1, -1]), f32(1, 10), eps=0.0, groups=2)
    root = math.sqrt(2)
    np.testing.assert_allclose(y, [[0.6 * root, 8 * root, 1, -10]], rtol=1e-6)


def test_rmsnorm_adds_an_offset_to_the_gain() -> None:
    y = rmsnorm(f32([1, -1]), f32(0.5, -1), eps=0.0, offset=1.0)
    np.testing.assert_allclose(y, [[1.5, 0.0]], rtol=1e-6)


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


@pytest.mark.parametrize(
    ("window", "seen"), [(0, [1, 2, 3, 4, 5]), (1, [1] * 5), (3, [1, 2, 3, 3, 3]), (5, [1, 2, 3, 4, 5])]
)
def test_each_row_sees_as_many_positions_as_its_window(window: int, seen: list[int]) -> None:
    # Values tell the position: a head of five columns, one for each.
    keys = np.zeros((5, 1, 5), np.float32)
    values = np.eye(5, dtype=np.float32)[:, None, :]
    y = attention(np.ones((5, 5), np.float32), keys, values, range(5), scale=1.0, window=window)
    assert np.count_nonzero(y, axis=1).tolist() == seen
    assert [np.flatnonzero(row).max() for row in y] == [0, 1, 2, 3, 4]


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


def test_sigmoid_mul_gates() -> None:
    # sigmoid(ln 3) = 3/4
    gate = f32([0, math.log(3), -math.log(3), 1000, -1000])
    y = sigmoid_mul(f32([4, 8, 8, 5, 5]), gate)
    np.testing.assert_allclose(y, [[2, 6, 2, 5, 0]], rtol=1e-6)


def test_slice_takes_columns_of_each_part() -> None:
    x = f32([1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60])
    assert slice_columns(x, groups=2, first=0, count=2).tolist() == [[1, 2, 4, 5], [10, 20, 40, 50]]
    assert slice_columns(x, groups=2, first=2, count=1).tolist() == [[3, 6], [30, 60]]
    assert slice_columns(x, groups=1, first=4, count=2).tolist() == [[5, 6], [50, 60]]


@pytest.mark.parametrize(
    ("scores", "top_k", "normalise", "chosen", "weights"),
    [
        # Softmax of ln(1, 3, 4, 2): tenths.
        ([0, math.log(3), math.log(4), math.log(2)], 2, False, [1, 2], [0.3, 0.4]),
        ([0, math.log(3), math.log(4), math.log(2)], 2, True, [1, 2], [3 / 7, 4 / 7]),
        ([0, math.log(3), math.log(4), math.log(2)], 4, True, [0, 1, 2, 3], [0.1, 0.3, 0.4, 0.2]),
        ([5, 5, 5, 5], 2, False, [0, 1], [0.25, 0.25]),
        ([1000, 1000, -1000, 0], 1, True, [0], [1.0]),
    ],
)
def test_rows_are_routed_to_their_highest_scores(
    scores: list[float], top_k: int, normalise: bool, chosen: list[int], weights: list[float]
) -> None:
    ids, shares = route(f32(scores), top_k=top_k, normalise=normalise)
    assert ids.tolist() == [chosen]
    np.testing.assert_allclose(shares, [weights], rtol=1e-6)


def test_experts_add_up_the_chosen_ones() -> None:
    # Hidden 1, width 1: expert e makes down * silu(gate x) * up x. silu(ln 3) = 3/4 ln 3.
    unit = math.log(3)
    first = [f32([unit]), f32([1]), f32([10])]
    second = [f32([-unit]), f32([1]), f32([100])]
    third = [f32([unit]), f32([7]), f32([7])]
    scores = f32([math.log(3), 0, -1000], [-1000, 0, -1000])
    y = experts(f32([1], [2]), scores, first + second + third, top_k=2, normalise=False)
    # Row 0: 3/4 * 10 * 3/4 ln 3 + 1/4 * 100 * (-ln 3 / 4); row 1: 100 * silu(-2 ln 3) * 2.
    expected = [[(90 / 16 - 100 / 16) * unit], [100 * 2 * -2 * unit / 10]]
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_causal_conv_sees_the_rows_before_and_keeps_the_last() -> None:
    # Before silu, channel 0 is x[t-2] + 10 x[t-1] + 100 x[t], channel 1 minus that.
    weight = np.array([[[1, 10, 100]], [[-1, -10, -100]]], np.float32)
    x = f32([1, 1], [2, 2], [3, 3])
    y, state = causal_conv(x, np.zeros((2, 2), np.float32), weight)
    np.testing.assert_allclose(y[:, 0], [100, 210, 321], rtol=1e-6)
    np.testing.assert_allclose(y[:, 1], 0, atol=1e-6)
    assert state.tolist() == [[2, 2], [3, 3]]
    y, state = causal_conv(f32([4, 4]), state, weight)
    np.testing.assert_allclose(y[:, 0], [432], rtol=1e-6)
    assert state.tolist() == [[3, 3], [4, 4]]


def test_the_delta_rule_forgets_corrects_and_reads() -> None:
    # One key head of two for two value heads of one. b = 0: beta 1/2. a + dt_bias = 0: softplus ln 2,
    # and exp(a_log) = 1 and 2, so the state decays to 1/2 and 1/4.
    def step(
        q: list[float],
        k: list[float],
        v: list[float],
        state: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ) -> tuple[list[float], np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        zero = np.zeros((1, 2), np.float32)
        y, state = delta_rule(
            f32([*q, *k, *v]), zero - 1, zero, state, f32(0, math.log(2)), f32(1, 1), key_heads=1, key_dim=2
        )
        return y[0].tolist(), state

    y, state = step([9, 0], [5, 0], [8, 8], np.zeros((2, 2, 1), np.float32))
    # S = k (v / 2) with k of length 1; read with q of length 1 over sqrt 2.
    np.testing.assert_allclose(state[:, :, 0], [[4, 0], [4, 0]], rtol=1e-5)
    np.testing.assert_allclose(y, [4 / math.sqrt(2)] * 2, rtol=1e-5)
    y, state = step([0, 3], [3, 4], [10, 20], state)
    # S decays to (2, 0) and (1, 0); k = (.6, .8) reads 1.2 and .6; half of 8.8 and 19.4 is written.
    np.testing.assert_allclose(state[:, :, 0], [[2 + 0.6 * 4.4, 3.52], [1 + 0.6 * 9.7, 7.76]], rtol=1e-5)
    np.testing.assert_allclose(y, [3.52 / math.sqrt(2), 7.76 / math.sqrt(2)], rtol=1e-5)


def test_the_delta_rule_shares_key_heads_among_neighbouring_value_heads() -> None:
    # Two key heads of one, four value heads of one; without decay worth speaking of, beta 1/2.
    zero = np.zeros((1, 4), np.float32)
    y, _ = delta_rule(
        f32([1, -1, 1, 1, 2, 4, 6, 8]),
        zero - 1000,
        zero,
        np.zeros((4, 1, 1), np.float32),
        zero[0],
        zero[0],
        key_heads=2,
        key_dim=1,
    )
    np.testing.assert_allclose(y, [[1, 2, -3, -4]], rtol=1e-5)


def test_recurrent_rows_have_the_same_bits_in_any_chunks() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((9, 2 * 6 + 12), np.float32)
    a, b = random.standard_normal((2, 9, 4), np.float32)
    weight = random.standard_normal((24, 1, 4), np.float32)

    def run(chunk: int) -> bytes:
        window, state = np.zeros((3, 24), np.float32), np.zeros((4, 3, 3), np.float32)
        out = b""
        for i in range(0, 9, chunk):
            part = slice(i, i + chunk)
            mixed, window = causal_conv(x[part], window, weight)
            y, state = delta_rule(mixed, a[part], b[part], state, a[0], b[0], key_heads=2, key_dim=3)
            out += y.tobytes()
        return out + window.tobytes() + state.tobytes()

    assert run(1) == run(4) == run(9)


def test_gated_rmsnorm_norms_each_part_and_gates_it() -> None:
    # silu(ln 3) = 3/4 ln 3
    gate = math.log(3)
    y = gated_rmsnorm(f32([3, 4, 1, -1]), f32([gate, 0, -gate, gate]), f32(1, 10), 0.0, groups=2)
    expected = [[0.6 * math.sqrt(2) * 0.75 * gate, 0, -0.25 * gate, -10 * 0.75 * gate]]
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_add() -> None:
    assert add(f32([1, 2]), f32([10, 20])).tolist() == [[11, 22]]


@pytest.mark.parametrize("wanted", [[], [1], [2, 0]])
def test_gather_keeps_the_wanted_rows_in_order(wanted: list[int]) -> None:
    x = f32([1], [2], [3])
    assert gather(x, wanted).tolist() == [[x[i, 0]] for i in wanted]
    assert gather(x, wanted).shape == (len(wanted), 1)
