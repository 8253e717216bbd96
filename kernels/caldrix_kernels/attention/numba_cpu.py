"""Softmax attention over fixed blocks of 64 absolute positions.

A block's partial result for one query is {acc[value width], max, sum}; partials are merged in block order
(the online softmax of Milakov and Gimelshein, 2018, as FlashAttention uses it). Blocks start at
absolute positions, so chunking, batching and the number of threads never change the order of a sum.

A block's keys of a head: [2][head_dim][32 positions] float32; values: [64 positions][value width] float32.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import call, kernel, routine
from caldrix_kernels.step.layout import BLOCK, PANEL

BLOCK_VECTORS = BLOCK // v.LANES


@intrinsic
def softmax_block(typing, scores, valid, maximum, total):
    """scores[0:64] -> exp(score - max), zero from `valid` on; writes the max and the sum (float32)."""

    def codegen(context, builder, signature, arguments):
        scores, valid, max_at, sum_at = arguments
        limit = v.broadcast(builder, builder.trunc(valid, v.I32), v.VI)
        minus_infinity = ir.Constant(v.VF, [float("-inf")] * v.LANES)
        masked = []
        for i in range(BLOCK_VECTORS):
            lane_numbers = ir.Constant(v.VI, list(range(v.LANES * i, v.LANES * (i + 1))))
            keep = builder.icmp_signed("<", lane_numbers, limit)
            value = v.load(builder, v.offset(builder, scores, 64 * i), v.VF)
            masked.append((keep, builder.select(keep, value, minus_infinity)))
        low, high = (v.maximum(builder, masked[i][1], masked[i + 1][1]) for i in (0, 2))
        top = v.reduce(builder, v.maximum(builder, low, high), lambda a, b: v.maximum(builder, a, b))
        top_lanes = v.broadcast(builder, top, v.VF)
        weights = []
        for i, (keep, value) in enumerate(masked):
            weight = v.exp(builder, builder.fsub(value, top_lanes))
            weight = builder.select(keep, weight, v.lanes(0.0))
            weights.append(weight)
            v.store(builder, weight, v.offset(builder, scores, 64 * i))
        low, high = (builder.fadd(weights[i], weights[i + 1]) for i in (0, 2))
        v.store(builder, top, max_at)
        v.store(builder, v.reduce(builder, builder.fadd(low, high), builder.fadd), sum_at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _merge(typing, run, block, width):

    def codegen(context, builder, signature, arguments):
        run, block, width = arguments
        at_max = builder.shl(width, v.const(2))
        at_sum = builder.add(at_max, v.const(4))

        def scalar(base, at):
            return v.broadcast(builder, v.load(builder, builder.add(base, at), v.F32), v.VF)

        run_max, block_max = scalar(run, at_max), scalar(block, at_max)
        run_sum, block_sum = scalar(run, at_sum), scalar(block, at_sum)
        top = v.maximum(builder, run_max, block_max)
        run_scale = v.exp(builder, builder.fsub(run_max, top))
        block_scale = v.exp(builder, builder.fsub(block_max, top))
        total = v.fma(builder, block_sum, block_scale, builder.fmul(run_sum, run_scale))
        zero = ir.Constant(v.I32, 0)
        v.store(builder, builder.extract_element(top, zero), builder.add(run, at_max))
        v.store(builder, builder.extract_element(total, zero), builder.add(run, at_sum))

        def body(index, _):
            at = builder.mul(index, v.const(64))
            place = builder.add(run, at)
            value = builder.fmul(v.load(builder, place, v.VF), run_scale)
            v.store(
                builder,
                v.fma(builder, v.load(builder, builder.add(block, at), v.VF), block_scale, value),
                place,
            )

        v.counted_loop(builder, builder.lshr(width, v.const(4)), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel(3)
def merge_partial(run, block, width):
    """Merge the partial `block` into `run`; both {acc[width], max, sum}, width a multiple of 16."""
    _merge(run, block, width)


def _make_finish(act):
    @intrinsic
    def finish(typing, run, width, out, count):
        """out[0:16 * count] = acc / sum, stored as an activation; count >= 1."""

        def codegen(context, builder, signature, arguments):
            run, width, out, count = arguments
            at_sum = builder.add(builder.shl(width, v.const(2)), v.const(4))
            total = v.broadcast(builder, v.load(builder, builder.add(run, at_sum), v.F32), v.VF)

            def body(index, _):
                value = v.load(builder, builder.add(run, builder.mul(index, v.const(64))), v.VF)
                target = builder.add(out, builder.mul(index, v.const(16 * v.ACT_BYTES[act])))
                v.store_activation(builder, builder.fdiv(value, total), target, act)

            v.counted_loop(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return finish


_finish_f32, _finish_bf16, _finish_rounded = (
    _make_finish(act) for act in (v.ACT_F32, v.ACT_BF16, v.ACT_ROUNDED)
)


@kernel(5)
def finish_head(act, run, width, out, count):
    if act == v.ACT_F32:
        _finish_f32(run, width, out, count)
    elif act == v.ACT_BF16:
        _finish_bf16(run, width, out, count)
    else:
        _finish_rounded(run, width, out, count)


@routine("int64(int64)")
def partial_bytes(value_width):
    """Size of {acc, max, sum}, kept a multiple of 64."""
    return value_width * 4 + 64


@kernel(13)
def attend_block(
    tile, keys, values, head_dim, value_width, block, queries, query_stride, rows, group, first, scores, out
):
    """Partials of `rows` neighbouring positions (from `first`) times `group` query heads over one block.

    queries: float32[rows * group][head_dim]; scores: scratch float32[rows * group][64];
    out: partials[rows * group]; tile: address of linear's tile_f32. Rows whose position lies before
    the block get a sum of zero.
    """
    count = rows * group
    visible = min(BLOCK, first + rows - block * BLOCK)
    half = PANEL * head_dim * 4
    call(tile, (count, keys, 128, queries, query_stride, head_dim, scores, 256))
    if visible > PANEL:
        call(tile, (count, keys + half, 128, queries, query_stride, head_dim, scores + 128, 256))
    stride = partial_bytes(value_width)
    for i in range(count):
        valid = min(BLOCK, first + i // group + 1 - block * BLOCK)
        at_max = out + i * stride + value_width * 4
        softmax_block(scores + i * 256, valid, at_max, at_max + 4)
    for column in range(0, value_width, PANEL):
        place = values + column * 4
        call(tile, (count, place, value_width * 4, scores, 256, visible, out + column * 4, stride))
