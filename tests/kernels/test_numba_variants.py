"""Every numba kernel against its numpy twin, on awkward shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from caldrix_kernels.argmax.numba_cpu import argmax_row
from caldrix_kernels.argmax.reference import argmax
from caldrix_kernels.attention import numba_cpu as attention
from caldrix_kernels.attention.reference import attention as attention_reference
from caldrix_kernels.embed import numba_cpu as embed
from caldrix_kernels.formats import narrow_bf16, widen
from caldrix_kernels.intrinsics.vector import HAS_BF16
from caldrix_kernels.linear import numba_cpu as linear
from caldrix_kernels.linear.reference import linear as linear_reference
from caldrix_kernels.packing import numba_cpu as packing
from caldrix_kernels.rmsnorm import numba_cpu as rmsnorm
from caldrix_kernels.rmsnorm.reference import rmsnorm as rmsnorm_reference
from caldrix_kernels.rope import numba_cpu as rope
from caldrix_kernels.rope.reference import cos_sin, inverse_frequencies
from caldrix_kernels.rope.reference import rope as rope_reference
from caldrix_kernels.silu_mul import numba_cpu as silu_mul
from caldrix_kernels.silu_mul.reference import silu_mul as silu_mul_reference
from caldrix_kernels.step.layout import (
    ACT_BF16,
    ACT_F32,
    ACT_ROUNDED,
    BF16,
    BLOCK,
    F16,
    FLOAT32,
    FORMAT_BYTES,
    PANEL,
    TILE_STEP,
    panel_bytes,
    partial_bytes,
    round_up,
)

Float32 = npt.NDArray[np.float32]

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 23, 25)
TILES = {BF16: linear.tile_bf16, F16: linear.tile_f16, FLOAT32: linear.tile_f32}
FORMATS = {BF16: "BF16", F16: "F16", FLOAT32: "F32"}


def aligned(shape: tuple[int, ...], dtype: type = np.float32, fill: float = 0.0) -> npt.NDArray[Any]:
    """An array at a 64-byte address, as every buffer of the lane is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array: npt.NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def stored(matrix: Float32, form: int) -> npt.NDArray[np.uint8]:
    kinds: dict[int, Callable[[Float32], npt.NDArray[Any]]] = {
        BF16: narrow_bf16,
        F16: lambda m: m.astype(np.float16),
        FLOAT32: lambda m: m,
    }
    return np.ascontiguousarray(kinds[form](matrix)).reshape(-1).view(np.uint8)


def packed(data: npt.NDArray[np.uint8], form: int, rows: int, columns: int) -> npt.NDArray[Any]:
    padded, panels = round_up(columns, PANEL), -(-rows // PANEL)
    target = aligned((panels * PANEL * padded * FORMAT_BYTES[form],), np.uint8, 0xFF)
    zeros = np.zeros(columns * FORMAT_BYTES[form], np.uint8)
    addresses = np.full(panels * PANEL, zeros.ctypes.data, np.int64)
    addresses[:rows] = data.ctypes.data + np.arange(rows) * columns * FORMAT_BYTES[form]
    size = panel_bytes(form, padded)
    packing.pack_panels.ctypes(
        form, addresses.ctypes.data, 0, panels, columns, padded, target.ctypes.data, size
    )
    return target


def product(act: int, form: int, panels: npt.NDArray[Any], x: Float32, rows_out: int) -> Float32:
    """x @ w.T with the tile kernels, 32 outputs at a time."""
    columns = round_up(x.shape[1], PANEL)
    if act == ACT_BF16:
        inputs = aligned((len(x), columns + 16), np.uint16)
        inputs[:, : x.shape[1]] = narrow_bf16(x)
    else:
        inputs = aligned((len(x), columns + 16))
        inputs[:, : x.shape[1]] = x
    out = aligned((len(x), round_up(rows_out, PANEL)))
    for panel in range(out.shape[1] // PANEL):
        start = panels.ctypes.data + panel * panel_bytes(form, columns)
        target = out.ctypes.data + panel * PANEL * 4
        tile = linear.tile_dot if act == ACT_BF16 else TILES[form]
        tile.ctypes(
            len(x),
            start,
            TILE_STEP[form],
            inputs.ctypes.data,
            inputs.strides[0],
            columns,
            target,
            out.strides[0],
        )
    return np.asarray(out[:, :rows_out], np.float32)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows_out", "columns"), [(1, 1), (33, 7), (32, 31), (40, 64), (77, 100)])
def test_linear(form: int, rows_out: int, columns: int) -> None:
    rng = np.random.default_rng(rows_out)
    data = stored(rng.standard_normal((rows_out, columns), np.float32), form)
    weights = widen(data, FORMATS[form], (rows_out, columns))
    panels = packed(data, form, rows_out, columns)
    x = rng.standard_normal((max(ROWS), columns), np.float32)
    whole = product(ACT_F32, form, panels, x, rows_out)
    np.testing.assert_allclose(whole, linear_reference(x, weights), rtol=0, atol=2e-5)
    for rows in ROWS:
        part = product(ACT_F32, form, panels, x[:rows], rows_out)
        assert part.tobytes() == np.ascontiguousarray(whole[:rows]).tobytes()


def test_linear_is_one_chain_of_fused_steps() -> None:
    """Bit-equal to the definition, with the exact product and sum rounded once a step."""
    rng = np.random.default_rng(5)
    data = stored(rng.standard_normal((1, 96), np.float32), BF16)
    weights = widen(data, "BF16", (96,)).astype(np.longdouble)
    x = rng.standard_normal((1, 96), np.float32)
    total = np.float32(0)
    for w, value in zip(weights, x[0].astype(np.longdouble), strict=True):
        total = np.float32(w * value + np.longdouble(total))
    assert product(ACT_F32, BF16, packed(data, BF16, 1, 96), x, 1)[0, 0] == total


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bfloat16 dot product instruction")
def test_linear_with_bf16_activations() -> None:
    rng = np.random.default_rng(6)
    data = stored(rng.standard_normal((40, 70), np.float32), BF16)
    panels, x = packed(data, BF16, 40, 70), rng.standard_normal((25, 70), np.float32)
    expected = linear_reference(
        widen(narrow_bf16(x).view(np.uint8), "BF16", x.shape), widen(data, "BF16", (40, 70))
    )
    for rows in ROWS:
        part = product(ACT_BF16, BF16, panels, x[:rows], 40)
        np.testing.assert_allclose(part, expected[:rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [1, 15, 16, 40, 96])
def test_rmsnorm(width: int) -> None:
    rng = np.random.default_rng(width)
    padded = round_up(width, 16)
    x, gain, out = aligned((padded,)), aligned((padded,)), aligned((padded,), fill=9.0)
    x[:width], gain[:width] = rng.standard_normal(width), rng.standard_normal(width)
    expected = rmsnorm_reference(
        np.asarray(x[None, :width], np.float32), np.asarray(gain[:width], np.float32), eps=1e-5
    )[0]
    addresses = (x.ctypes.data, gain.ctypes.data, out.ctypes.data)
    epsilon = int(np.float32(1e-5).view(np.uint32))
    rmsnorm.norm_row.ctypes(ACT_F32, *addresses, padded, width, epsilon)
    np.testing.assert_allclose(out[:width], expected, rtol=1e-6, atol=1e-7)
    assert not np.any(out[width:])
    exact = np.asarray(out, np.float32).copy()
    rmsnorm.norm_row.ctypes(ACT_ROUNDED, *addresses, padded, width, epsilon)
    assert out.tobytes() == widen(narrow_bf16(exact).view(np.uint8), "BF16", (padded,)).tobytes()
    halves = aligned((padded,), np.uint16)
    rmsnorm.norm_row.ctypes(ACT_BF16, *addresses[:2], halves.ctypes.data, padded, width, epsilon)
    assert halves.tobytes() == narrow_bf16(exact).tobytes()


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (8, 8), (16, 16), (24, 24), (64, 64), (64, 32), (80, 20)]
)
def test_rope(head_dim: int, rotary_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    frequencies = inverse_frequencies("default", 10000.0, rotary_dim, 1.0, 1.0, 1.0, 0)
    cos, sin = cos_sin(frequencies, np.array([0, 1, 1000, 100_000]))
    heads = rng.standard_normal((4, head_dim), np.float32)
    expected = rope_reference(heads[:, :rotary_dim], cos, sin, heads=1, head_dim=rotary_dim)
    for row in range(4):
        table, head = np.concatenate([cos[row], sin[row]]), heads[row].copy()
        rope.rotate.ctypes(head.ctypes.data, table.ctypes.data, rotary_dim)
        np.testing.assert_allclose(head[:rotary_dim], expected[row], rtol=0, atol=1e-6)
        assert head[rotary_dim:].tobytes() == heads[row, rotary_dim:].tobytes()


def test_silu_mul() -> None:
    rng = np.random.default_rng(1)
    tile = aligned((7, 32))
    tile[...] = rng.standard_normal((7, 32)) * 30
    tile[0, :4] = (0.0, -200.0, 200.0, -87.5)
    expected = silu_mul_reference(np.asarray(tile[:, :16], np.float32), np.asarray(tile[:, 16:], np.float32))
    out = aligned((7, 16))
    silu_mul.silu_mul_tile.ctypes(ACT_F32, tile.ctypes.data, 128, out.ctypes.data, 64, 7)
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("form", FORMATS)
def test_embed(form: int) -> None:
    rng = np.random.default_rng(2)
    data = stored(rng.standard_normal((70, 37), np.float32), form)
    expected = widen(data, FORMATS[form], (70, 37))
    panels = packed(data, form, 70, 37)
    out = np.zeros(37, np.float32)
    for token in (0, 31, 32, 69):
        embed.embed_row_major(form, data.ctypes.data, 37 * FORMAT_BYTES[form], token, 37, out.ctypes.data)
        assert out.tobytes() == expected[token].tobytes()
        out[:] = 0
        embed.embed_panelled(form, panels.ctypes.data, panel_bytes(form, 64), token, 37, out.ctypes.data)
        assert out.tobytes() == expected[token].tobytes()


def paired(matrix: npt.NDArray[Any], pairs: int) -> npt.NDArray[Any]:
    """[..., k, n] -> [..., k / pairs, n, pairs]: numbers that one instruction takes stand side by side."""
    *rest, k, n = matrix.shape
    return np.ascontiguousarray(matrix.reshape(*rest, k // pairs, pairs, n).swapaxes(-1, -2))


def placed(k: Float32, v: Float32, q: Float32, halves: bool) -> tuple[npt.NDArray[Any], ...]:
    """Keys and values by block and queries by row, as the kernel reads them."""
    context, head_dim = k.shape
    form: Callable[[Float32], npt.NDArray[Any]] = narrow_bf16 if halves else lambda x: x
    pairs, kind = (2, np.uint16) if halves else (1, np.float32)
    panels = form(k).reshape(context // PANEL, PANEL, head_dim).transpose(0, 2, 1)
    wide = np.pad(v, ((0, 0), (0, round_up(head_dim, PANEL) - head_dim)))
    blocks = context // BLOCK
    sources = (paired(panels, pairs).reshape(blocks, -1), paired(form(wide), pairs).reshape(blocks, -1))
    found = []
    for source in (*sources, form(q).reshape(-1, head_dim)):
        found.append(aligned(source.shape, kind))
        found[-1][...] = source
    return tuple(found)


def test_a_power_of_two() -> None:
    """What a partial is scaled by when it is merged with another whose max is larger, which keeps its own."""
    falls = -np.concatenate([np.linspace(0, 125, 4001), np.arange(126.0), np.geomspace(1e-9, 1, 100)])
    for fall in falls.astype(np.float32):
        pair = ((0, 0), (1, fall))
        run, block = (np.array([acc] * PANEL + [top, 1] + [0] * 14, np.float32) for acc, top in pair)
        attention.merge_partials.ctypes(run.ctypes.data, block.ctypes.data, PANEL, 0, 1)
        exact = 2.0 ** float(fall)
        assert np.all(np.abs(run[:PANEL] - exact) <= (2e-7 * exact if fall else 0))
        assert run[PANEL] == 0


@pytest.mark.parametrize(("head_dim", "group"), [(8, 1), (16, 3), (24, 2), (64, 3), (80, 7)])
@pytest.mark.parametrize("first", [0, 1, 31, 32, 126, 127, 128, 270])
@pytest.mark.parametrize("window", [0, 1, 3, 128, 131, 1000])
@pytest.mark.parametrize("act", [ACT_F32, *([ACT_BF16] if HAS_BF16 else []), ACT_ROUNDED])
def test_attention(act: int, head_dim: int, group: int, first: int, window: int) -> None:
    """Rows first..first+2 of one key/value head, block by block, against plain softmax attention to base 2.

    Weights that are rounded to bfloat16 are wrong by 2**-8 of themselves at most.
    """
    rng = np.random.default_rng(head_dim + first)
    rows, context = 3, 3 * BLOCK
    width = round_up(head_dim, PANEL)
    k, v = (rng.standard_normal((context, head_dim), np.float32) for _ in range(2))
    q = rng.standard_normal((rows, group, head_dim), np.float32)
    if act != ACT_F32:
        k, v, q = (widen(narrow_bf16(x).view(np.uint8), "BF16", x.shape) for x in (k, v, q))
    dot = act == ACT_BF16
    tiles = (linear.tile_dot, linear.tile_dot_wide) if dot else (linear.tile_f32, linear.tile_f32_wide)
    keys, values, queries = placed(k, v, q, dot)
    stride = partial_bytes(head_dim)
    count = rows * group
    fresh, merged = (aligned((count, stride // 4)) for _ in range(2))
    scores = aligned((count, BLOCK))
    for block in range((first + rows - 1) // BLOCK + 1):
        attention.attend_block.ctypes(
            act,
            *(tile.address for tile in tiles),
            keys[block].ctypes.data,
            values[block].ctypes.data,
            head_dim,
            width,
            block,
            queries.ctypes.data,
            queries.strides[0],
            rows,
            group,
            first,
            window,
            scores.ctypes.data,
            (fresh if block > 0 else merged).ctypes.data,
        )
        skipped = max(0, block * BLOCK - first) * group
        if block > 0:
            pair = (merged[skipped].ctypes.data, fresh[skipped].ctypes.data)
            attention.merge_partials.ctypes(*pair, width, stride, count - skipped)
    out, gated, gates = (aligned((count, width)) for _ in range(3))
    gates[:] = rng.standard_normal((count, width), np.float32) * 8
    gates[:, :6] = (0.0, -0.0, -200.0, 200.0, -87.5, 88.5)
    for i in range(count):
        for gate, target in ((0, out[i]), (gates[i].ctypes.data, gated[i])):
            place = (merged[i].ctypes.data, width, gate, target.ctypes.data, width // 16)
            attention.finish_head.ctypes(ACT_F32, *place)
    sigmoid = 1 / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(gated, out * sigmoid, rtol=2e-6, atol=1e-9)
    for row in range(rows):
        length = first + row + 1
        single = (q[row].reshape(1, -1), k[:length, None])
        expected, most = (
            attention_reference(*single, part[:length, None], [first + row], scale=math.log(2), window=window)
            for part in (v, np.abs(v))
        )
        got = np.asarray(out[row * group : (row + 1) * group, :head_dim]).reshape(1, -1)
        allowed = 3e-5 if act == ACT_F32 else 3e-5 + most / 256
        assert np.all(np.abs(got - expected) <= allowed)


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 77, 640])
def test_argmax_is_the_lowest_of_the_highest_where_all_are_finite(width: int) -> None:
    """In any lane, and at the end; what stands behind the width has no part."""
    x = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    rows = [x, -np.abs(x), np.round(x), np.zeros_like(x), np.full_like(x, -3e38)]
    for value in (np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0):
        for place in sorted({0, width // 2, width - 1}):
            rows.append(np.zeros_like(x) if value == 0 else x.copy())
            rows[-1][place] = value
    found = np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        held = aligned((round_up(width, 16),), fill=np.inf)
        held[:width] = row
        argmax_row.ctypes(held.ctypes.data, width, found.ctypes.data + 8 * number)
    expected = argmax(np.array(rows))
    assert found.tolist() == expected.tolist()
    assert expected[3] == 0
    assert (expected < 0).sum() == 3 * len({0, width // 2, width - 1})
