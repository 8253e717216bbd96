"""Every kernel of the table on awkward shapes and numbers, and whole steps, for whoever compares compilers.

Memory comes from malloc, at 64-byte addresses and to the byte as large as the kernels are told, so that a
process with the address sanitizer sees a kernel that reaches out of it.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from caldrix_kernels.step import layout as at
from caldrixd.lanes.cpu import CpuProgram
from caldrixd.lanes.kernels import Kernels
from caldrixd.lanes.lane import Rows
from caldrixd.lanes.lowering import lower
from tests.support import models

Array = npt.NDArray[Any]
Case = Callable[["Bench"], Iterator[Array]]

ACTS = (at.ACT_F32, at.ACT_BF16, at.ACT_ROUNDED)
ACT_TYPES = {at.ACT_F32: np.float32, at.ACT_BF16: np.uint16, at.ACT_ROUNDED: np.float32}
ROWS = (1, 2, 3, 5, 12, 13, 23)
COLUMNS = (32, 64, 96)
# Of attention: head size and queries a key head; block and position of the first row.
HEADS = ((8, 1), (10, 3), (64, 3), (80, 7), (128, 1))
PLACES = ((0, 0), (0, 30), (0, 61), (0, 125), (1, 127), (1, 128), (1, 400), (2, 270))
AWKWARD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38, -3e38, 88.5, -87.5, -104.0)
_malloc = ctypes.CDLL(None)


def memory(shape: tuple[int, ...], dtype: type = np.float32) -> Array:
    """Zeros from malloc."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    place = ctypes.c_void_p()
    assert _malloc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    buffer = (ctypes.c_uint8 * size).from_address(place.value or 0)
    weakref.finalize(buffer, _malloc.free, place)
    array: Array = np.frombuffer(memoryview(buffer), np.uint8).view(dtype).reshape(shape)
    array[...] = 0
    return array


class Bench:
    """Calls kernels of one compiler with random numbers that depend on the case alone."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        self.kernels = kernels
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))

    def call(self, index: int, *arguments: int | Array) -> None:
        """An array stands for its address."""
        words = [int(a.ctypes.data) if isinstance(a, np.ndarray) else int(a) for a in arguments]
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(words))
        kind(int(self.kernels.table[index]))(*words)

    def normal(self, *shape: int, scale: float = 1.0, awkward: bool = False) -> Array:
        """Random float32; with `awkward` every number of AWKWARD is among them where there is room."""
        values = memory(shape)
        values[...] = self._rng.standard_normal(shape) * scale
        if awkward:
            flat = values.reshape(-1)
            places = self._rng.permutation(flat.size)[: len(AWKWARD)]
            flat[places] = AWKWARD[: len(places)]
        return values

    def halves(self, *shape: int) -> Array:
        """Random bfloat16."""
        values = memory(shape, np.uint16)
        values[...] = self.normal(*shape).view(np.uint32) >> 16
        return values

    def panels(self, form: int, rows: int, columns: int, awkward: bool = False) -> tuple[Array, int]:
        """A random matrix in panels, and the bytes of one."""
        size = at.FORMAT_BYTES[form]
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.normal(rows, columns, awkward=awkward)
            if form == at.F16:
                stored = values.astype(np.float16).view(np.uint16)
            elif form == at.BF16:
                stored = (values.view(np.uint32) >> 16).astype(np.uint16)
            else:
                stored = values
        source = memory(stored.shape, stored.dtype.type)
        source[...] = stored
        padded = at.round_up(columns, at.PANEL)
        panel = at.panel_bytes(form, padded)
        target = memory((rows // at.PANEL * panel,), np.uint8)
        target[...] = 0xFF
        addresses = source.ctypes.data + np.arange(rows, dtype=np.int64) * columns * size
        self.kernels.pack_panels(
            form, addresses.ctypes.data, 0, rows // at.PANEL, columns, padded, target.ctypes.data, panel
        )
        return target, panel


def bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def run(kernels: Kernels, name: str) -> list[Array]:
    """What a case writes; any NaN in float32 is the same NaN, since compilers may swap factors."""
    results = []
    for array in CASES[name](Bench(kernels, name)):
        if array.dtype == np.float32:
            array = np.where(np.isnan(array), np.float32(np.nan), array)
        results.append(np.array(array))
    return results


def _pack(bench: Bench) -> Iterator[Array]:
    for form in (at.BF16, at.F16, at.FLOAT32):
        for columns in (1, 15, 16, 31, 33, 64, 100):
            yield bench.panels(form, 64, columns)[0]


def _tile(index: int, form: int, vectors: int = 2) -> Case:
    def case(bench: Bench) -> Iterator[Array]:
        for awkward in (False, True):
            for columns in COLUMNS:
                if vectors == 2:
                    w = bench.panels(form, at.PANEL, columns, awkward)[0]
                else:
                    w = bench.normal(columns, 16 * vectors, awkward=awkward)
                for rows in ROWS:
                    x = bench.normal(rows, columns + 16, awkward=awkward)
                    out = memory((rows, 16 * vectors + 16))
                    step = 64 * vectors if vectors > 2 else at.TILE_STEP[form]
                    bench.call(index, rows, w, step, x, x.strides[0], columns, out, out.strides[0])
                    yield out

    return case


def _tile_dot(index: int, vectors: int = 2) -> Case:
    def case(bench: Bench) -> Iterator[Array]:
        for columns in (*COLUMNS, 6, 10):
            w = bench.halves(columns // 2, vectors * 16, 2)
            for rows in ROWS:
                x, out = bench.halves(rows, columns + 16), memory((rows, vectors * 16))
                step = w.strides[0]
                bench.call(index, rows, w, step, x, x.strides[0], columns, out, out.strides[0])
                yield out

    return case


def _norm_row(bench: Bench) -> Iterator[Array]:
    for act in ACTS:
        for width, scale in ((1, 1.0), (13, 1e-20), (16, 1e15), (40, 1.0), (96, 1.0), (576, 30.0)):
            padded = at.round_up(width, 16)
            x, gain = memory((padded,)), memory((padded,))
            x[:width], gain[:width] = bench.normal(width, scale=scale), bench.normal(width)
            out = memory((padded,), ACT_TYPES[act])
            bench.call(at.NORM_ROW, act, x, gain, out, padded, width, bits(1e-5))
            yield out


def _rotate(bench: Bench) -> Iterator[Array]:
    for rotary_dim in (2, 8, 20, 24, 32, 64, 128):
        head, table = bench.normal(rotary_dim), bench.normal(rotary_dim)
        bench.call(at.ROTATE, head, table, rotary_dim)
        yield head


def _silu_mul(bench: Bench) -> Iterator[Array]:
    for act in ACTS:
        for rows in ROWS:
            tile = bench.normal(rows, 32, scale=20.0, awkward=act == at.ACT_F32)
            out = memory((rows, 16), ACT_TYPES[act])
            bench.call(at.SILU_MUL_TILE, act, tile, tile.strides[0], out, out.strides[0], rows)
            yield out


def _attend_block(*acts: int) -> Case:
    def case(bench: Bench) -> Iterator[Array]:
        for act, (head_dim, group), (block, first), window in product(acts, HEADS, PLACES, (0, 1, 40)):
            dot, rows, width = act == at.ACT_BF16, 3, at.round_up(head_dim, at.PANEL)
            count, stride = rows * group, at.partial_bytes(head_dim)
            numbers = bench.halves if dot else bench.normal
            keys, values = numbers(at.BLOCK, head_dim), numbers(at.BLOCK, width)
            queries, scores = numbers(count, head_dim), memory((count, at.BLOCK))
            out = memory((count, stride // 4))
            tiles = (at.TILE_DOT, at.TILE_DOT_WIDE) if dot else (at.TILE_F32, at.TILE_F32_WIDE)
            kernels = (bench.kernels.table[tile] for tile in tiles)
            shape = (head_dim, width, block, queries, queries.strides[0], rows, group, first, window)
            bench.call(at.ATTEND_BLOCK, act, *kernels, keys, values, *shape, scores, out)
            yield out
            yield scores

    return case


def _partials(bench: Bench, count: int, width: int) -> Array:
    """{acc, max, sum}, some with nothing in them."""
    parts = bench.normal(count, width + 16, scale=3.0)
    parts[:, width + 1] = np.abs(parts[:, width + 1]) + 1
    parts[::3, width], parts[::3, width + 1] = -np.inf, 0.0
    return parts


def _merge_partials(bench: Bench) -> Iterator[Array]:
    for width in (32, 64, 96):
        for count in (1, 5, 12):
            merged, fresh = _partials(bench, count, width), _partials(bench, count, width)
            fresh[1:, width] = bench.normal(count - 1, scale=60.0) if count > 1 else []
            bench.call(at.MERGE_PARTIALS, merged, fresh, width, merged.strides[0], count)
            yield merged


def _finish_head(bench: Bench) -> Iterator[Array]:
    for act in ACTS:
        for width in (32, 64, 96):
            for gated in (False, True):
                part = _partials(bench, 2, width)[1]
                gate = bench.normal(width, scale=30.0)
                out = memory((width,), ACT_TYPES[act])
                given = gate if gated else 0
                bench.call(at.FINISH_HEAD, act, part, width, given, out, width // 16)
                yield out


def _route_row(bench: Bench) -> Iterator[Array]:
    for experts, top_k in ((1, 1), (7, 2), (16, 16), (40, 3), (128, 8)):
        for kind in ("plain", "ties", "awkward"):
            for normalise in (0, 1):
                scores = memory((at.round_up(experts, 16),))
                scores[:experts] = bench.normal(experts, scale=4.0, awkward=kind == "awkward")
                if kind == "ties":
                    scores[:experts] = np.round(scores[:experts])
                ids, weights = memory((top_k,), np.int64), memory((top_k,))
                bench.call(at.ROUTE_ROW, scores, experts, top_k, normalise, ids, weights)
                yield ids
                yield weights


def _combine_row(bench: Bench) -> Iterator[Array]:
    for width, top_k in ((16, 1), (48, 2), (96, 8)):
        out, parts, weights = bench.normal(width), bench.normal(20, width + 16), bench.normal(top_k)
        places = memory((top_k,), np.int64)
        places[...] = np.arange(top_k) * 2 + 1
        bench.call(at.COMBINE_ROW, out, width, parts, parts.strides[0], places, weights, top_k)
        yield out


def _conv(bench: Bench) -> Iterator[Array]:
    channels = 48
    for taps in (1, 2, 4):
        for kept in (False, True):
            for available in (0, 1, 2, 5):
                rows, weight = bench.normal(available + 1, channels + 16), bench.normal(taps, channels)
                before = bench.normal(max(taps - 1, 1), channels)
                state, x = before if kept else 0, rows[available]
                out, after = memory((channels,)), memory((max(taps - 1, 1), channels))
                stride = rows.strides[0]
                bench.call(at.CONV_ROW, x, stride, available, state, weight, channels, taps, out)
                bench.call(at.CONV_STATE, x, stride, available + 1, state, after, channels, taps)
                yield out
                yield after


def _gates_row(bench: Bench) -> Iterator[Array]:
    for heads in (16, 48):
        inputs = [bench.normal(heads, scale=20.0, awkward=True) for _ in range(4)]
        decay, beta = memory((heads,)), memory((heads,))
        bench.call(at.GATES_ROW, *inputs, heads, decay, beta)
        yield decay
        yield beta


def _normalise_head(bench: Bench) -> Iterator[Array]:
    for width, scale in ((16, 1.0), (48, 1e-25), (128, 1e10)):
        x, out = bench.normal(width, scale=scale), memory((width,))
        bench.call(at.NORMALISE_HEAD, x, width, bits(0.125), out)
        yield out


def _delta_head(bench: Bench) -> Iterator[Array]:
    for columns in (16, 32, 64):
        for key_dim, rows in ((16, 1), (48, 2), (32, 7)):
            for kept in (False, True):
                wide = columns + 16
                q, k = bench.normal(rows, key_dim), bench.normal(rows, key_dim)
                value = memory((rows, max(key_dim, columns)))
                value[...] = bench.normal(*value.shape)
                q, k = (_widened(part, value.shape[1]) for part in (q, k))
                decay, beta = np.abs(bench.normal(rows, 16)) / 4, np.abs(bench.normal(rows, 16)) / 4
                before, after = bench.normal(key_dim, wide), memory((key_dim, wide))
                out = memory((rows, columns))
                state = before if kept else 0
                inputs = (rows, q, k, value, value.strides[0], decay, beta, decay.strides[0], state, after)
                bench.call(at.DELTA_HEAD, *inputs, key_dim, columns, out, out.strides[0], after.strides[0])
                yield out
                yield after


def _widened(rows: Array, width: int) -> Array:
    wide = memory((len(rows), width))
    wide[:, : rows.shape[1]] = rows
    return wide


def _gated_norm_head(bench: Bench) -> Iterator[Array]:
    for act in ACTS:
        for width in (16, 48, 128):
            x, gain, z = bench.normal(width), bench.normal(width), bench.normal(width, scale=20.0)
            out = memory((width,), ACT_TYPES[act])
            bench.call(at.GATED_NORM_HEAD, act, x, z, gain, out, width, bits(1e-6))
            yield out


def _argmax_row(bench: Bench) -> Iterator[Array]:
    for width in (1, 15, 16, 17, 77, 640):
        for awkward in (False, True):
            x = bench.normal(at.round_up(width, 16), awkward=awkward)
            for row in (x, np.round(x)):
                held, out = memory(row.shape), memory((1,), np.int64)
                held[...] = row
                bench.call(at.ARGMAX_ROW, held, width, out)
                yield out


# For an instruction that rounds in a way of its own, where there is one.
DOT_CASES: dict[str, Case] = {
    "tile_dot": _tile_dot(at.TILE_DOT),
    "tile_dot_wide": _tile_dot(at.TILE_DOT_WIDE, vectors=4),
    "attend_block with dots": _attend_block(at.ACT_BF16),
}

# All kernels but RUN_STEP, which needs a whole program.
CASES: dict[str, Case] = DOT_CASES | {
    "pack_panels": _pack,
    "tile_bf16": _tile(at.TILE_BF16, at.BF16),
    "tile_f16": _tile(at.TILE_F16, at.F16),
    "tile_f32": _tile(at.TILE_F32, at.FLOAT32),
    "tile_f32_wide": _tile(at.TILE_F32_WIDE, at.FLOAT32, vectors=4),
    "norm_row": _norm_row,
    "rotate": _rotate,
    "silu_mul_tile": _silu_mul,
    "attend_block": _attend_block(at.ACT_F32, at.ACT_ROUNDED),
    "merge_partials": _merge_partials,
    "finish_head": _finish_head,
    "route_row": _route_row,
    "combine_row": _combine_row,
    "conv": _conv,
    "gates_row": _gates_row,
    "normalise_head": _normalise_head,
    "delta_head": _delta_head,
    "gated_norm_head": _gated_norm_head,
    "argmax_row": _argmax_row,
}


def steps(kernels: Kernels, name: str, dtype: str) -> list[bytes]:
    """Logits of a prompt in chunks on one to three threads, then of two sequences in one step."""
    plan, tensors = models.opened(models.tiny(name))
    run = CpuProgram(lower(plan), plan, tensors, kernels, 2)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, plan.vocab_size, 100)]
    results = []

    def step(slots: list[int], positions: range | list[int], tokens: list[int], threads: int) -> None:
        rows = Rows(slots, positions, tokens, range(len(tokens)))
        results.append(run.step(rows, threads=threads, dtype=dtype).values.tobytes())
        for slot, last in dict(zip(slots, positions, strict=True)).items():
            run.commit(slot, last + 1)

    for chunk, threads, count in ((100, 2, 100), (7, 3, 100), (1, 1, 12)):
        slot = run.allocate(128)
        for start in range(0, count, chunk):
            part = ids[start : start + chunk]
            step([slot] * len(part), range(start, start + len(part)), part, threads)
        run.release(slot)
    first, second = run.allocate(128), run.allocate(128)
    step([first] * 40, range(40), ids[:40], 2)
    step([first, *[second] * 20], [40, *range(20)], [ids[40], *ids[:20]], 2)
    step([first, second], [41, 20], ids[:2], 2)
    run.close()
    return results
