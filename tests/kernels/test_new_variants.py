"""The numba kernels of experts and of the gated delta rule's layers, on awkward shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from caldrix_kernels import OPS
from caldrix_kernels.causal_conv import numba_cpu as causal_conv
from caldrix_kernels.causal_conv.reference import causal_conv as causal_conv_reference
from caldrix_kernels.delta_rule import numba_cpu as delta_rule
from caldrix_kernels.delta_rule.reference import delta_rule as delta_rule_reference
from caldrix_kernels.experts import numba_cpu as experts
from caldrix_kernels.experts.reference import route as route_reference
from caldrix_kernels.formats import narrow_bf16, widen
from caldrix_kernels.gated_rmsnorm import numba_cpu as gated_rmsnorm
from caldrix_kernels.gated_rmsnorm.reference import gated_rmsnorm as gated_rmsnorm_reference
from caldrix_kernels.silu_mul.reference import sigmoid
from caldrix_kernels.step.layout import ACT_BF16, ACT_F32, ACT_ROUNDED, round_up

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def close(name: str, got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    tolerance = OPS[name].tolerance
    np.testing.assert_allclose(got, expected, rtol=tolerance.relative, atol=tolerance.absolute)


def fused(a: Any, b: Any, c: Any) -> Float32:
    """a * b + c of float32, rounded once: the product is exact in long double and the sum nearly."""
    wide = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return wide.astype(np.float32)


def address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


# --- experts ------------------------------------------------------------------------------------------


def route(scores: Float32, top_k: int, normalise: int) -> tuple[npt.NDArray[np.int64], Float32]:
    row = np.full(round_up(len(scores), 16), 1e30, np.float32)
    row[: len(scores)] = scores
    ids, weights = np.full(top_k + 1, -7, np.int64), np.full(top_k + 1, -7, np.float32)
    experts.route_row.ctypes(address(row), len(scores), top_k, normalise, address(ids), address(weights))
    assert (ids[top_k], weights[top_k]) == (-7, -7)
    return ids[:top_k], weights[:top_k]


@pytest.mark.parametrize(
    ("count", "top_k"), [(1, 1), (2, 2), (5, 2), (16, 4), (17, 17), (60, 4), (128, 8), (513, 10), (1024, 64)]
)
def test_routing_takes_the_most_probable(count: int, top_k: int) -> None:
    rng = np.random.default_rng(count)
    scores = (rng.standard_normal(count) * 4).astype(np.float32)
    for normalise in (0, 1):
        expected, shares = route_reference(scores[None], top_k=top_k, normalise=bool(normalise))
        ids, weights = route(scores, top_k, normalise)
        assert ids.tolist() == expected[0].tolist()
        np.testing.assert_allclose(weights, shares[0], rtol=2e-6)


def test_routing_tells_scores_apart_whose_weights_are_equal() -> None:
    scores = np.full(20, 1.0, np.float32)
    scores[[3, 18]] = np.nextafter(np.float32(1), np.float32(2))
    ids, weights = route(scores, 2, 0)
    assert ids.tolist() == [3, 18]
    scores[5] = 100.0
    scores[[7, 9]] = (-200.0, -150.0)
    assert route(scores, 19, 0)[0].tolist() == [i for i in range(20) if i != 7]
    assert weights[0] == weights[1]


def test_routing_takes_the_lower_of_equals() -> None:
    scores = np.zeros(40, np.float32)
    assert route(scores, 3, 0)[0].tolist() == [0, 1, 2]
    scores[[39, 20, 4]] = 1.0
    assert route(scores, 2, 0)[0].tolist() == [4, 20]
    scores[37] = 2.0
    ids, weights = route(scores, 4, 1)
    assert ids.tolist() == [4, 20, 37, 39]
    assert weights.tolist() == [weights[0], weights[0], weights[2], weights[0]]
    assert weights[2] > weights[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_routing_of_scores_that_are_not_finite_ends(bad: float) -> None:
    for places in ([0], [5], [19], range(20)):
        scores = np.arange(20, dtype=np.float32)
        scores[list(places)] = bad
        found, weights = route(scores, 5, 1)
        ids = found.tolist()
        assert ids == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] < 20
        assert np.isnan(weights).all() == np.isnan(bad)


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("width", [16, 48, 160])
def test_experts_are_combined_in_one_chain(width: int, top_k: int) -> None:
    rng = np.random.default_rng(width)
    parts = rng.standard_normal((11, width + 16), np.float32)
    out = rng.standard_normal(width + 1, np.float32)
    places = rng.permutation(11)[:top_k].astype(np.int64)
    weights = rng.random(top_k, np.float32)
    total = np.zeros(width, np.float32)
    for place, weight in zip(places, weights, strict=True):
        total = fused(weight, parts[place, :width], total)
    expected = np.append(out[:width] + total, out[width])
    experts.combine_row.ctypes(
        address(out), width, address(parts), parts.strides[0], address(places), address(weights), top_k
    )
    assert out.tobytes() == expected.tobytes()


# --- causal convolution -------------------------------------------------------------------------------


def convolved(x: Float32, state: Float32 | None, weight: Float32) -> tuple[Float32, Float32]:
    """Rows of a wider buffer through the kernels: results and the state after them."""
    taps, channels = weight.shape
    buffer = np.full((len(x), channels + 16), np.nan, np.float32)
    buffer[:, :channels] = x
    out, following = np.zeros_like(x), np.full((taps - 1, channels), np.nan, np.float32)
    earlier, stride = (0 if state is None else address(state)), buffer.strides[0]
    for row in range(len(x)):
        here = address(buffer[row])
        causal_conv.conv_row.ctypes(
            here, stride, row, earlier, address(weight), channels, taps, address(out[row])
        )
    last = address(buffer[-1])
    causal_conv.conv_state.ctypes(last, stride, len(x), earlier, address(following), channels, taps)
    return out, following


@pytest.mark.parametrize("channels", [16, 48, 272])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_causal_convolution(channels: int, taps: int) -> None:
    rng = np.random.default_rng(channels + taps)
    x, weight = (
        rng.standard_normal((9, channels), np.float32),
        rng.standard_normal((taps, channels), np.float32),
    )
    out, state = convolved(x, None, weight)
    expected, last = causal_conv_reference(
        x, np.zeros((taps - 1, channels), np.float32), np.ascontiguousarray(weight.T)[:, None]
    )
    close("causal_conv", out, expected)
    assert state.tobytes() == last.tobytes()


@pytest.mark.parametrize("cut", [(1,) * 9, (2, 7), (3, 1, 5), (8, 1), (4, 5)])
def test_causal_convolution_in_chunks_has_the_same_bits(cut: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((9, 48), np.float32), rng.standard_normal((4, 48), np.float32)
    whole, last = convolved(x, None, weight)
    state, parts = None, []
    for chunk in np.split(x, np.cumsum(cut)[:-1]):
        out, state = convolved(np.ascontiguousarray(chunk), state, weight)
        parts.append(out)
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert state is not None
    assert state.tobytes() == last.tobytes()


# --- gated delta rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [16, 48])
def test_gates(heads: int) -> None:
    rng = np.random.default_rng(heads)
    for scale in (0.01, 1.0, 10.0, 40.0):
        a, b = ((rng.standard_normal(heads) * scale).astype(np.float32) for _ in range(2))
        a_log, dt_bias = np.log(rng.uniform(0.01, 16, heads)).astype(np.float32), np.ones(heads, np.float32)
        decay, beta = np.zeros(heads, np.float32), np.zeros(heads, np.float32)
        arguments = (a, b, a_log, dt_bias)
        delta_rule.gates_row.ctypes(*map(address, arguments), heads, address(decay), address(beta))
        step = np.logaddexp(0.0, (a + dt_bias).astype(np.float64))
        power = np.exp(a_log.astype(np.float64)) * step
        kept = power < 80
        # The error of an exponent is an absolute one of the result's logarithm.
        assert np.all(np.abs(np.log(decay.astype(np.float64)) + power)[kept] <= 4e-7 + 7e-7 * power[kept])
        assert np.all((decay[~kept] >= 0) & (decay[~kept] < 1e-34))
        np.testing.assert_allclose(beta, sigmoid(b), rtol=5e-7, atol=1e-37)


def test_softplus_keeps_its_relative_precision() -> None:
    """Each is scaled to about 1 by its own rate, so that the decay is exp(-1) whatever x is."""
    x = np.linspace(-80, 80, 16 * 400).astype(np.float32)
    zeros, beta, decay = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    expected = np.logaddexp(0.0, x.astype(np.float64))
    a_log = (-np.log(expected)).astype(np.float32)
    delta_rule.gates_row.ctypes(
        address(x), address(zeros), address(a_log), address(zeros), len(x), address(decay), address(beta)
    )
    exact = np.exp(-np.exp(a_log.astype(np.float64)) * expected)
    np.testing.assert_allclose(decay, exact, rtol=9e-7)


@pytest.mark.parametrize("width", [16, 48, 128, 256])
def test_normalise_head(width: int) -> None:
    rng = np.random.default_rng(width)
    for scale in (1.0, 1e-4, 0.0):
        x = (rng.standard_normal(width) * scale).astype(np.float32)
        out = np.full(width + 1, 9, np.float32)
        delta_rule.normalise_head.ctypes(address(x), width, float_bits(0.0625), address(out))
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).sum() + 1e-6) * 0.0625
        np.testing.assert_allclose(out[:width], expected, rtol=1e-6, atol=0)
        assert out[width] == 9


class Head:
    """Inputs of some rows of one value head, in a buffer of q, k and v side by side."""

    def __init__(self, rows: int, key_dim: int, columns: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.key_dim, self.columns = key_dim, columns
        self.q, self.k = (rng.standard_normal((rows, key_dim)) / np.sqrt(key_dim) for _ in range(2))
        self.v = rng.standard_normal((rows, columns))
        self.rows = np.concatenate([self.q, self.k, self.v], axis=1).astype(np.float32)
        self.gates = np.stack([rng.uniform(0.5, 1, rows), rng.random(rows)], axis=1).astype(np.float32)
        self.state = rng.standard_normal((key_dim, columns), np.float32)

    def run(
        self, rows: slice, state: Float32 | None, first: int = 0, columns: int | None = None
    ) -> tuple[Float32, Float32]:
        """Results and state of these rows, of `columns` columns from `first`; the rest stays NaN."""
        columns = columns or self.columns
        inputs, gates = self.rows[rows], self.gates[rows]
        out = np.full((len(inputs), self.columns), np.nan, np.float32)
        following = np.full((self.key_dim, self.columns), np.nan, np.float32)
        q = address(inputs)
        delta_rule.delta_head.ctypes(
            len(inputs),
            q,
            q + 4 * self.key_dim,
            q + 4 * (2 * self.key_dim + first),
            inputs.strides[0],
            address(gates),
            address(gates) + 4,
            gates.strides[0],
            0 if state is None else address(state) + 4 * first,
            address(following) + 4 * first,
            self.key_dim,
            columns,
            address(out) + 4 * first,
            out.strides[0],
            following.strides[0],
        )
        return out, following

    def expected(self, state: Float32 | None) -> tuple[Float64, Float64]:
        s = np.zeros((self.key_dim, self.columns)) if state is None else state.astype(np.float64)
        out = []
        for (decay, beta), row in zip(
            self.gates.astype(np.float64), self.rows.astype(np.float64), strict=True
        ):
            q, k, v = np.split(row, [self.key_dim, 2 * self.key_dim])
            s = s * decay
            s = s + np.outer(k, (v - k @ s) * beta)
            out.append(q @ s)
        return np.array(out), s


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("key_dim", "columns"), [(1, 16), (7, 32), (32, 16), (33, 64), (128, 64), (128, 32)])
def test_delta_rule(key_dim: int, columns: int, given: bool) -> None:
    head = Head(11, key_dim, columns, seed=key_dim)
    state = head.state if given else None
    out, following = head.run(slice(None), state)
    expected, last = head.expected(state)
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(following, last, rtol=3e-6, atol=3e-6)


def test_the_parts_of_the_delta_rule_make_the_whole() -> None:
    """Gates, normalised queries and keys, and heads that share a key head, against the reference."""
    rng = np.random.default_rng(8)
    rows, key_heads, value_heads, key_dim, value_dim = 6, 2, 4, 32, 16
    keys = key_heads * key_dim
    qkv = rng.standard_normal((rows, 2 * keys + value_heads * value_dim), np.float32)
    a, b, decay, beta = (np.zeros((rows, 16), np.float32) for _ in range(4))
    a_log, dt_bias = np.zeros(16, np.float32), np.zeros(16, np.float32)
    for array in (a.T, b.T, a_log, dt_bias):
        array[:value_heads] = rng.standard_normal((*array[:value_heads].shape,))
    state = rng.standard_normal((value_heads, key_dim, value_dim), np.float32)
    small = (a[:, :value_heads], b[:, :value_heads], state, a_log[:value_heads], dt_bias[:value_heads])
    expected, last = delta_rule_reference(qkv, *small, key_heads=key_heads, key_dim=key_dim)
    for row in range(rows):
        gates = (a[row], b[row], a_log, dt_bias)
        delta_rule.gates_row.ctypes(*map(address, gates), 16, address(decay[row]), address(beta[row]))
        for head in range(2 * key_heads):
            place = address(qkv[row]) + head * key_dim * 4
            scale = key_dim**-0.5 if head < key_heads else 1.0
            delta_rule.normalise_head.ctypes(place, key_dim, float_bits(scale), place)
    out, following = np.zeros((rows, value_heads * value_dim), np.float32), np.zeros_like(state)
    for head in range(value_heads):
        query = address(qkv) + head // 2 * key_dim * 4
        delta_rule.delta_head.ctypes(
            rows,
            query,
            query + 4 * keys,
            address(qkv) + 4 * (2 * keys + head * value_dim),
            qkv.strides[0],
            address(decay) + 4 * head,
            address(beta) + 4 * head,
            decay.strides[0],
            address(state[head]),
            address(following[head]),
            key_dim,
            value_dim,
            address(out) + 4 * head * value_dim,
            out.strides[0],
            state.strides[1],
        )
    close("delta_rule", out, expected)
    close("delta_rule", following, last)


def test_delta_rule_is_made_of_chains_of_fused_steps() -> None:
    head = Head(3, 20, 16, seed=4)
    s = head.state
    expected = []
    for (decay, beta), row in zip(head.gates, head.rows, strict=True):
        q, k, v = np.split(row, [20, 40])
        s = s * decay
        known, total = np.zeros(16, np.float32), np.zeros(16, np.float32)
        for i in range(20):
            known = fused(s[i], k[i], known)
        delta = (v - known) * beta
        s = np.stack([fused(k[i], delta, s[i]) for i in range(20)])
        for i in range(20):
            total = fused(s[i], q[i], total)
        expected.append(total)
    out, following = head.run(slice(None), head.state)
    assert out.tobytes() == np.array(expected).tobytes()
    assert following.tobytes() == s.tobytes()


@pytest.mark.parametrize("columns", [16, 32])
def test_a_column_of_the_delta_rule_has_the_same_bits_in_any_company(columns: int) -> None:
    head = Head(5, 96, 64, seed=5)
    for state in (None, head.state):
        out, following = head.run(slice(None), state)
        for first in range(0, 64, columns):
            part, part_state = head.run(slice(None), state, first, columns)
            own = slice(first, first + columns)
            assert part[:, own].tobytes() == out[:, own].tobytes()
            assert part_state[:, own].tobytes() == following[:, own].tobytes()
            rest = np.delete(part, np.r_[own], axis=1)
            assert np.isnan(rest).all()
            assert np.isnan(np.delete(part_state, np.r_[own], axis=1)).all()


@pytest.mark.parametrize("cuts", [range(1, 9), (4,), (1, 3), (8,)])
def test_delta_rule_in_chunks_has_the_same_bits(cuts: Any) -> None:
    head = Head(9, 64, 32, seed=6)
    whole, last = head.run(slice(None), None)
    state, parts, start = None, [], 0
    for end in (*cuts, 9):
        out, state = head.run(slice(start, end), state)
        parts.append(out)
        start = end
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert state is not None
    assert state.tobytes() == last.tobytes()


def test_delta_rule_leaves_the_given_state_alone() -> None:
    head = Head(3, 32, 64, seed=7)
    before = head.state.tobytes()
    head.run(slice(None), head.state)
    assert head.state.tobytes() == before


# --- gates of a row -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 48, 128])
def test_gated_norm(width: int) -> None:
    rng = np.random.default_rng(width)
    x, z, gain = ((rng.standard_normal(width) * 5).astype(np.float32) for _ in range(3))
    expected = gated_rmsnorm_reference(x[None], z[None], gain, 1e-6, groups=1)[0]
    out, halves = np.full(width + 1, 9, np.float32), np.full(width + 1, 9, np.uint16)
    inputs = tuple(map(address, (x, z, gain)))
    gated_rmsnorm.gated_norm_head.ctypes(ACT_F32, *inputs, address(out), width, float_bits(1e-6))
    close("gated_rmsnorm", out[:width], expected)
    assert out[width] == 9
    check_rounding(
        out,
        halves,
        width,
        lambda act, to: gated_rmsnorm.gated_norm_head.ctypes(act, *inputs, to, width, float_bits(1e-6)),
    )


def check_rounding(exact: Float32, halves: npt.NDArray[np.uint16], width: int, run: Any) -> None:
    """As bfloat16 and as float32 rounded to it, the same row is `exact` rounded."""
    rounded = np.zeros(width, np.float32)
    run(ACT_ROUNDED, address(rounded))
    run(ACT_BF16, address(halves))
    expected = narrow_bf16(exact[:width])
    assert halves[:width].tobytes() == expected.tobytes()
    assert halves[width] == 9
    assert rounded.tobytes() == widen(expected.view(np.uint8), "BF16", (width,)).tobytes()
