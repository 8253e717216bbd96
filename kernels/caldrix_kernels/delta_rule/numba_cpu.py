"""The gated delta rule of one value head, row after row, its state float32[key_dim][columns].

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025). A column of the state depends on no other
column; each of its sums is one chain over the key dimension with one fused step a key.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import bits_to_float
from caldrix_kernels.rmsnorm.numba_cpu import sum_of_squares

NORM_EPSILON = 1e-6  # part of the definition of a normalised query or key


@intrinsic
def _gates(typing, a, b, a_log, dt_bias, count, decay, beta):
    def codegen(context, builder, signature, arguments):
        a, b, a_log, dt_bias, count, decay, beta = arguments

        def body(index, _):
            at = builder.mul(index, v.const(64))
            rate = v.exp(builder, v.load(builder, builder.add(a_log, at), v.VF))
            bias = v.load(builder, builder.add(dt_bias, at), v.VF)
            step = v.softplus(builder, builder.fadd(v.load(builder, builder.add(a, at), v.VF), bias))
            fall = builder.fsub(v.lanes(-0.0), builder.fmul(rate, step))
            v.store(builder, v.exp(builder, fall), builder.add(decay, at))
            share = v.sigmoid(builder, v.load(builder, builder.add(b, at), v.VF))
            v.store(builder, share, builder.add(beta, at))

        v.counted_loop(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@kernel(7)
def gates_row(a, b, a_log, dt_bias, heads, decay, beta):
    """decay = exp(-exp(a_log) * softplus(a + dt_bias)), beta = sigmoid(b).

    All are float32[heads], heads a multiple of 16.
    """
    _gates(a, b, a_log, dt_bias, heads >> 4, decay, beta)


@intrinsic
def _scale_twice(typing, x, first, second, out, count):
    """out[0:16 * count] = (x * first) * second."""

    def codegen(context, builder, signature, arguments):
        x, first, second, out, count = arguments
        first, second = v.broadcast(builder, first, v.VF), v.broadcast(builder, second, v.VF)

        def body(index, _):
            at = builder.mul(index, v.const(64))
            value = builder.fmul(v.load(builder, builder.add(x, at), v.VF), first)
            v.store(builder, builder.fmul(value, second), builder.add(out, at))

        v.counted_loop(builder, count, body)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.float32, types.int64, types.int64), codegen


@kernel(4)
def normalise_head(x, width, scale_bits, out):
    """out = x / sqrt(sum x**2 + 1e-6) * scale; float32[width], a multiple of 16; scale as float32 bits."""
    length = np.sqrt(sum_of_squares(x, width) + np.float32(NORM_EPSILON))
    scale = bits_to_float(np.uint32(scale_bits))
    _scale_twice(x, np.float32(1.0) / length, scale, out, width >> 4)


@intrinsic
def _fill_zero(typing, target, stride, rows, count):
    """Zeros in 16 * count columns of `rows` rows, `stride` bytes apart."""

    def codegen(context, builder, signature, arguments):
        target, stride, rows, count = arguments

        def fill_row(row, _):
            start = builder.add(target, builder.mul(row, stride))

            def fill(column, _):
                v.store(builder, v.lanes(0.0), builder.add(start, builder.mul(column, v.const(64))))

            v.counted_loop(builder, count, fill)

        v.counted_loop(builder, rows, fill_row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


class _Head(NamedTuple):
    """The arguments of `delta_head` as LLVM values, int64."""

    rows: ir.Value
    q: ir.Value
    k: ir.Value
    value: ir.Value
    row_stride: ir.Value
    decay: ir.Value
    beta: ir.Value
    gate_stride: ir.Value
    source: ir.Value
    target: ir.Value
    key_dim: ir.Value
    value_stride: ir.Value
    out: ir.Value
    out_stride: ir.Value


def _row(builder, base, index, stride):
    return builder.add(base, builder.mul(index, stride))


def _scalar(builder, base, index, stride):
    return v.broadcast(builder, v.load(builder, _row(builder, base, index, stride), v.F32), v.VF)


def _load(builder, address, vectors):
    return [v.load(builder, v.offset(builder, address, 64 * i), v.VF) for i in range(vectors)]


def _store(builder, parts, address):
    for i, part in enumerate(parts):
        v.store(builder, part, v.offset(builder, address, 64 * i))


def _multiply_add(builder, parts, factor, sums):
    return [v.fma(builder, part, factor, total) for part, total in zip(parts, sums, strict=True)]


def _decay(builder, head, index, parts, fall, key_row, known):
    """Store the state of one key, decayed for a row, and add to what it knows of the row's key."""
    parts = [builder.fmul(part, fall) for part in parts]
    _store(builder, parts, _row(builder, head.target, index, head.value_stride))
    return _multiply_add(builder, parts, _scalar(builder, key_row, index, v.const(4)), known)


def _one_row(builder, head, row, known):
    """One pass over the state: renewed by this row's delta, read, and decayed for the next row."""
    vectors = len(known)
    query_row = _row(builder, head.q, row, head.row_stride)
    key_row = _row(builder, head.k, row, head.row_stride)
    share = _scalar(builder, head.beta, row, head.gate_stride)
    values = _load(builder, _row(builder, head.value, row, head.row_stride), vectors)
    deltas = [builder.fmul(builder.fsub(new, old), share) for new, old in zip(values, known, strict=True)]
    # After the last row nothing decays; what its own key sums up again is dropped.
    following = builder.add(row, v.const(1))
    more = builder.icmp_signed("<", following, head.rows)
    following = builder.select(more, following, row)
    next_key = _row(builder, head.k, following, head.row_stride)
    next_fall = _scalar(builder, head.decay, following, head.gate_stride)
    fall = builder.select(more, next_fall, v.lanes(1.0))

    def renew(index, sums):
        key = _scalar(builder, key_row, index, v.const(4))
        query = _scalar(builder, query_row, index, v.const(4))
        parts = _load(builder, _row(builder, head.target, index, head.value_stride), vectors)
        parts = _multiply_add(builder, deltas, key, parts)
        result = _multiply_add(builder, parts, query, sums[:vectors])
        return result + _decay(builder, head, index, parts, fall, next_key, sums[vectors:])

    sums = v.counted_loop(builder, head.key_dim, renew, [v.lanes(0.0)] * (2 * vectors))
    _store(builder, sums[:vectors], _row(builder, head.out, row, head.out_stride))
    return sums[vectors:]


def _make_delta_rows(vectors):
    @intrinsic
    def delta_rows(typing, arguments):
        """`delta_head` over 16 * vectors columns."""

        def codegen(context, builder, signature, values):
            head = _Head(*[builder.extract_value(values[0], i) for i in range(len(_Head._fields))])
            fall = _scalar(builder, head.decay, v.const(0), v.const(0))

            def start(index, known):
                parts = _load(builder, _row(builder, head.source, index, head.value_stride), vectors)
                return _decay(builder, head, index, parts, fall, head.k, known)

            known = v.counted_loop(builder, head.key_dim, start, [v.lanes(0.0)] * vectors)
            v.counted_loop(builder, head.rows, lambda row, known: _one_row(builder, head, row, known), known)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, len(_Head._fields))), codegen

    return delta_rows


_delta_rows_16, _delta_rows_32, _delta_rows_64 = (_make_delta_rows(vectors) for vectors in (1, 2, 4))


@kernel(15)
def delta_head(
    rows,
    q,
    k,
    value,
    row_stride,
    decay,
    beta,
    gate_stride,
    state,
    target,
    key_dim,
    columns,
    out,
    out_stride,
    value_stride,
):
    """`rows` >= 1 rows in order, on the first `columns` (16, 32 or 64) columns of a value head.

    A row: S = S * decay; d = (v - S^T k) * beta; S = S + k d^T; out = S^T q. q, k: float32[key_dim]; v,
    out: float32[columns]; decay, beta: one float32; each pointer is the first row's. q, k, v lie `row_stride`
    bytes apart from row to row, decay and beta `gate_stride`. `state` (0: zeros) is read and `target`,
    elsewhere, written: float32[key_dim][columns] with `value_stride` bytes from key to key.
    """
    source = state
    if state == 0:
        _fill_zero(target, value_stride, key_dim, columns >> 4)
        source = target
    inputs = (rows, q, k, value, row_stride, decay, beta, gate_stride)
    head = (*inputs, source, target, key_dim, value_stride, out, out_stride)
    if columns == 64:
        _delta_rows_64(head)
    elif columns == 32:
        _delta_rows_32(head)
    else:
        _delta_rows_16(head)
