"""Matrix products over packed weight panels.

A panel holds 32 output rows: two vectors whose lanes are output rows, so an input value is broadcast and no
sum crosses lanes. Every output is one sequential chain over k, one fused multiply-add a step: the
simplest order there is, and the same for any number of rows, threads, and any vector width.

Panel layouts, K columns (even, zero padded):

    BF16  [K/2][2 vectors][16 rows][2 k]   a 32-bit lane holds two neighbouring k of one row
    F16   [K][32 rows]
    F32   [K][32 rows]

The keys and values of attention are such panels too, with any stride: of F32, or of BF16 for form "dot".
"""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel, routine
from caldrix_kernels.intrinsics.vector import HAS_BF16, WIDE
from caldrix_kernels.step.layout import ACT_BF16, PREFETCH


def _bf16_step(builder, weights, count):
    """The two k of a lane, widened: bfloat16 is the high half of float32."""
    words = [v.load(builder, v.offset(builder, weights, 64 * i), v.VI, 64) for i in range(count)]
    low = [builder.bitcast(builder.shl(word, v.int_lanes(16)), v.VF) for word in words]
    high = [builder.bitcast(builder.and_(word, v.int_lanes(0xFFFF0000)), v.VF) for word in words]
    return [(low, 0), (high, 4)]


def _f16_step(builder, weights, count):
    return [
        (
            [
                builder.fpext(v.load(builder, v.offset(builder, weights, 32 * i), v.VF16, 32), v.VF)
                for i in range(count)
            ],
            0,
        )
    ]


def _f32_step(builder, weights, count):
    return [([v.load(builder, v.offset(builder, weights, 64 * i), v.VF, 4) for i in range(count)], 0)]


# format -> (columns a loop step takes, emitter of the step's widened weight vectors with x offsets)
_STEPS = {"bf16": (2, _bf16_step), "f16": (1, _f16_step), "f32": (1, _f32_step)}


def make_panel(rows, form, unroll=1, vectors=2):
    """An intrinsic panel(w, w_stride, x, x_stride, columns, out, out_stride), strides in bytes:
    out[m, 0:16 * vectors] = sum over k of x[m, k] * w[k, 0:16 * vectors] for m < rows.

    `w_stride` is the distance of loop steps. x is float32; for form "dot" x and w are bfloat16 and
    the instruction adds two products at a time (rounded differently: `--dtype bf16` only).
    """
    # A few rows take about as long as reading the weights, which then must not wait for each other. One row
    # is faster without, and twelve are too slow to wait for memory.
    ahead = form in ("bf16", "dot") and vectors == 2 and 2 <= rows <= 8

    @intrinsic
    def panel(typing, w, w_stride, x, x_stride, columns, out, out_stride):
        def codegen(context, builder, signature, arguments):
            w, w_stride, x, x_stride, columns, out, out_stride = arguments
            inputs = [builder.add(x, builder.mul(v.const(m), x_stride)) for m in range(rows)]
            per_step = 2 if form == "dot" else _STEPS[form][0]
            x_bytes = 4 if form == "dot" else 4 * per_step

            def body(index, carried):
                weights, accumulators = carried[0], carried[1:]
                for part in range(unroll):
                    step = builder.add(builder.mul(index, v.const(unroll)), v.const(part))
                    x_offset = builder.mul(step, v.const(x_bytes))
                    if ahead:
                        for line in (0, 64):
                            v.prefetch(builder, v.offset(builder, weights, PREFETCH + line))
                    accumulate = _dot_step if form == "dot" else _fma_step
                    accumulators = accumulate(builder, form, weights, inputs, x_offset, accumulators)
                    weights = builder.add(weights, w_stride)
                return [weights, *accumulators]

            zero = v.lanes(0.0)
            steps = builder.udiv(columns, v.const(per_step * unroll))
            result = v.counted_loop(builder, steps, body, [w, *[zero] * (vectors * rows)])[1:]
            for m in range(rows):
                row = builder.add(out, builder.mul(v.const(m), out_stride))
                for i in range(vectors):
                    v.store(builder, result[vectors * m + i], v.offset(builder, row, 64 * i))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return panel


def _fma_step(builder, form, weights, inputs, x_offset, accumulators):
    accumulators = list(accumulators)
    count = len(accumulators) // len(inputs)
    for vectors, byte in _STEPS[form][1](builder, weights, count):
        for m, row in enumerate(inputs):
            value = v.load(builder, builder.add(row, v.offset(builder, x_offset, byte)), v.F32)
            value = v.broadcast(builder, value, v.VF)
            for i in range(count):
                accumulators[count * m + i] = v.fma(builder, vectors[i], value, accumulators[count * m + i])
    return accumulators


def _dot_step(builder, form, weights, inputs, x_offset, accumulators):
    accumulators = list(accumulators)
    count = len(accumulators) // len(inputs)
    vectors = [v.load(builder, v.offset(builder, weights, 64 * i), v.VBF, 64) for i in range(count)]
    for m, row in enumerate(inputs):
        pair = v.load(builder, builder.add(row, x_offset), v.I32)
        pair = builder.bitcast(v.broadcast(builder, pair, v.VI), v.VBF)
        for i in range(count):
            place = count * m + i
            accumulators[place] = v.dot(builder, accumulators[place], vectors[i], pair)
    return accumulators


_bf16_1, _bf16_2, _bf16_3 = make_panel(1, "bf16", unroll=2), make_panel(2, "bf16"), make_panel(3, "bf16")
_bf16_4, _bf16_8, _bf16_12 = make_panel(4, "bf16"), make_panel(8, "bf16"), make_panel(12, "bf16")
_dot_1, _dot_4, _dot_12 = (make_panel(rows, "dot") for rows in (1, 4, 12))
_f16_1, _f16_3, _f16_4, _f16_12 = (make_panel(rows, "f16") for rows in (1, 3, 4, 12))
_f32_1, _f32_2, _f32_3, _f32_4, _f32_8, _f32_12 = (make_panel(rows, "f32") for rows in (1, 2, 3, 4, 8, 12))

_wide_1, _wide_2, _wide_3, _wide_6 = (make_panel(rows, "f32", vectors=4) for rows in (1, 2, 3, 6))
_wide_dot_1, _wide_dot_3, _wide_dot_6 = (make_panel(rows, "dot", vectors=4) for rows in (1, 3, 6))


@routine("int64(int64)")
def act_bytes(act):
    """Bytes of one stored activation, the x of a tile."""
    return 2 if act == ACT_BF16 else 4


# The tiles meet any row count greedily: sixteen 256-bit registers hold three rows of accumulators,
# thirty-two 512-bit ones twelve. A row's own arithmetic does not depend on the split.


@kernel(8)
def tile_bf16(rows, w, step, x, x_stride, columns, out, out_stride):
    if WIDE:
        while rows >= 12:
            _bf16_12(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 12 * x_stride, out + 12 * out_stride, rows - 12
        if rows >= 8:
            _bf16_8(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 8 * x_stride, out + 8 * out_stride, rows - 8
        if rows >= 4:
            _bf16_4(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 4 * x_stride, out + 4 * out_stride, rows - 4
    while rows >= 3:
        _bf16_3(w, step, x, x_stride, columns, out, out_stride)
        x, out, rows = x + 3 * x_stride, out + 3 * out_stride, rows - 3
    if rows == 2:
        _bf16_2(w, step, x, x_stride, columns, out, out_stride)
    elif rows == 1:
        _bf16_1(w, step, x, x_stride, columns, out, out_stride)


@kernel(8)
def tile_dot(rows, w, step, x, x_stride, columns, out, out_stride):
    if HAS_BF16:
        while rows >= 12:
            _dot_12(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 12 * x_stride, out + 12 * out_stride, rows - 12
        while rows >= 4:
            _dot_4(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 4 * x_stride, out + 4 * out_stride, rows - 4
        while rows >= 1:
            _dot_1(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + x_stride, out + out_stride, rows - 1


@kernel(8)
def tile_f16(rows, w, step, x, x_stride, columns, out, out_stride):
    if WIDE:
        while rows >= 12:
            _f16_12(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 12 * x_stride, out + 12 * out_stride, rows - 12
        while rows >= 4:
            _f16_4(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 4 * x_stride, out + 4 * out_stride, rows - 4
    while rows >= 3:
        _f16_3(w, step, x, x_stride, columns, out, out_stride)
        x, out, rows = x + 3 * x_stride, out + 3 * out_stride, rows - 3
    while rows >= 1:
        _f16_1(w, step, x, x_stride, columns, out, out_stride)
        x, out, rows = x + x_stride, out + out_stride, rows - 1


@kernel(8)
def tile_f32(rows, w, step, x, x_stride, columns, out, out_stride):
    if WIDE:
        while rows >= 12:
            _f32_12(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 12 * x_stride, out + 12 * out_stride, rows - 12
        if rows >= 8:
            _f32_8(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 8 * x_stride, out + 8 * out_stride, rows - 8
        if rows >= 4:
            _f32_4(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 4 * x_stride, out + 4 * out_stride, rows - 4
    while rows >= 3:
        _f32_3(w, step, x, x_stride, columns, out, out_stride)
        x, out, rows = x + 3 * x_stride, out + 3 * out_stride, rows - 3
    if rows == 2:
        _f32_2(w, step, x, x_stride, columns, out, out_stride)
    elif rows == 1:
        _f32_1(w, step, x, x_stride, columns, out, out_stride)


@kernel(8)
def tile_f32_wide(rows, w, step, x, x_stride, columns, out, out_stride):
    """64 outputs a row instead of 32: a row of values is read whole, in one stream."""
    if WIDE:
        while rows >= 6:
            _wide_6(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 6 * x_stride, out + 6 * out_stride, rows - 6
        while rows >= 3:
            _wide_3(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 3 * x_stride, out + 3 * out_stride, rows - 3
        if rows == 2:
            _wide_2(w, step, x, x_stride, columns, out, out_stride)
            return
    while rows >= 1:
        _wide_1(w, step, x, x_stride, columns, out, out_stride)
        x, out, rows = x + x_stride, out + out_stride, rows - 1


@kernel(8)
def tile_dot_wide(rows, w, step, x, x_stride, columns, out, out_stride):
    if HAS_BF16:
        while rows >= 6:
            _wide_dot_6(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 6 * x_stride, out + 6 * out_stride, rows - 6
        while rows >= 3:
            _wide_dot_3(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + 3 * x_stride, out + 3 * out_stride, rows - 3
        while rows >= 1:
            _wide_dot_1(w, step, x, x_stride, columns, out, out_stride)
            x, out, rows = x + x_stride, out + out_stride, rows - 1


@intrinsic
def add_bias(typing, tile, stride, rows, bias):
    """tile[m, 0:32] += bias[0:32]."""

    def codegen(context, builder, signature, arguments):
        tile, stride, rows, bias = arguments
        vectors = [v.load(builder, v.offset(builder, bias, 64 * i), v.VF) for i in range(2)]

        def body(index, _):
            row = builder.add(tile, builder.mul(index, stride))
            for i in range(2):
                place = v.offset(builder, row, 64 * i)
                v.store(builder, builder.fadd(v.load(builder, place, v.VF), vectors[i]), place)

        v.counted_loop(builder, rows, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _make_store(accumulate):
    @intrinsic
    def store_tile(typing, tile, tile_stride, out, out_stride, rows):
        """out[m, 0:32] = tile[m, 0:32], or += for the residual."""

        def codegen(context, builder, signature, arguments):
            tile, tile_stride, out, out_stride, rows = arguments

            def body(index, _):
                row = builder.add(tile, builder.mul(index, tile_stride))
                target = builder.add(out, builder.mul(index, out_stride))
                for i in range(2):
                    place = v.offset(builder, target, 64 * i)
                    value = v.load(builder, v.offset(builder, row, 64 * i), v.VF)
                    if accumulate:
                        value = builder.fadd(v.load(builder, place, v.VF), value)
                    v.store(builder, value, place)

            v.counted_loop(builder, rows, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return store_tile


copy_tile, add_tile = _make_store(False), _make_store(True)
