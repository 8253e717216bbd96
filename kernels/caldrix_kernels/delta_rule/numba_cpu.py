"""The gated delta rule of one value head, row after row, its state float32[key_dim][columns].

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025). A column of the state depends on no other
column; each of its sums is one chain over the key dimension with one fused step a key.
"""

import numpy as np
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


def _make_delta_rows(vectors):
    @intrinsic
    def delta_rows(
        typing,
        rows,
        q,
        k,
        value,
        row_stride,
        decay,
        beta,
        gate_stride,
        source,
        target,
        key_dim,
        stride,
        out,
        step,
    ):
        """`delta_head` over 16 * vectors columns. One pass over the state a row: while it is renewed by a
        row's delta it is decayed for the next row, and what it knows of that row's key is summed."""

        def codegen(context, builder, signature, arguments):
            rows, q, k, value, row_stride, decay, beta, gate_stride = arguments[:8]
            source, target, key_dim, stride, out, step = arguments[8:]
            zeros = [v.lanes(0.0)] * vectors

            def row_of(base, row, row_bytes):
                return builder.add(base, builder.mul(row, row_bytes))

            def scalar(address):
                return v.broadcast(builder, v.load(builder, address, v.F32), v.VF)

            def load_row(address):
                return [v.load(builder, v.offset(builder, address, 64 * i), v.VF) for i in range(vectors)]

            def store_row(parts, address):
                for i, part in enumerate(parts):
                    v.store(builder, part, v.offset(builder, address, 64 * i))

            def multiply_add(parts, factors, sums):
                return [v.fma(builder, *terms) for terms in zip(parts, factors, sums, strict=True)]

            def decayed(index, parts, fall, key_row, known):
                parts = [builder.fmul(part, fall) for part in parts]
                store_row(parts, row_of(target, index, stride))
                key = scalar(row_of(key_row, index, v.const(4)))
                return multiply_add(parts, [key] * vectors, known)

            def start(index, known):
                return decayed(index, load_row(row_of(source, index, stride)), first_fall, k, known)

            def one_row(row, known):
                query_row, key_row = row_of(q, row, row_stride), row_of(k, row, row_stride)
                share = scalar(row_of(beta, row, gate_stride))
                values = load_row(row_of(value, row, row_stride))
                deltas = [
                    builder.fmul(builder.fsub(new, old), share)
                    for new, old in zip(values, known, strict=True)
                ]
                # After the last row nothing decays; what its own key sums up again is dropped.
                following = builder.add(row, v.const(1))
                more = builder.icmp_signed("<", following, rows)
                following = builder.select(more, following, row)
                next_key = row_of(k, following, row_stride)
                fall = builder.select(more, scalar(row_of(decay, following, gate_stride)), v.lanes(1.0))

                def renew(index, sums):
                    key = scalar(row_of(key_row, index, v.const(4)))
                    query = scalar(row_of(query_row, index, v.const(4)))
                    parts = load_row(row_of(target, index, stride))
                    parts = multiply_add([key] * vectors, deltas, parts)
                    result = multiply_add(parts, [query] * vectors, sums[:vectors])
                    return result + decayed(index, parts, fall, next_key, sums[vectors:])

                sums = v.counted_loop(builder, key_dim, renew, zeros + zeros)
                store_row(sums[:vectors], row_of(out, row, step))
                return sums[vectors:]

            first_fall = scalar(decay)
            v.counted_loop(builder, rows, one_row, v.counted_loop(builder, key_dim, start, zeros))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 14), codegen

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
    places = (source, target, key_dim, value_stride, out, out_stride)
    if columns == 64:
        _delta_rows_64(*inputs, *places)
    elif columns == 32:
        _delta_rows_32(*inputs, *places)
    else:
        _delta_rows_16(*inputs, *places)
