"""Mixture of experts: which experts a row goes to, and the weighted sum of what they made of it.

Softmax and sums across a row as everywhere: sixteen lanes (expert mod 16), then the fixed tree.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import load_f32, load_i64, store_f32, store_i64

LARGEST = float(np.finfo(np.float32).max)
PICKED = float("-inf")  # stands for the score of an expert that was picked, or is none


@intrinsic
def _make_finite(typing, scores, experts):
    """Clamp scores[0:experts], NaN to the lowest; PICKED up to a multiple of 16. Returns the largest."""

    def codegen(context, builder, signature, arguments):
        scores, experts = arguments
        limit = v.broadcast(builder, builder.trunc(experts, v.I32), v.VI)
        picked = ir.Constant(v.VF, [PICKED] * v.LANES)

        def body(index, tops):
            place = builder.add(scores, builder.mul(index, v.const(64)))
            part = v.maximum(builder, v.load(builder, place, v.VF), v.lanes(-LARGEST))
            part = v.minimum(builder, part, v.lanes(LARGEST))
            part = builder.select(
                builder.icmp_signed("<", v.lane_numbers(builder, index), limit), part, picked
            )
            v.store(builder, part, place)
            return [v.maximum(builder, part, tops[0])]

        count = builder.lshr(builder.add(experts, v.const(15)), v.const(4))
        tops = v.counted_loop(builder, count, body, [picked])[0]
        return v.reduce(builder, tops, lambda a, b: v.maximum(builder, a, b))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _sum_of_powers(typing, scores, highest, count):
    """The sum of exp(score - highest) over scores[0:16 * count]; that of PICKED is nothing beside a 1."""

    def codegen(context, builder, signature, arguments):
        scores, highest, count = arguments
        highest = v.broadcast(builder, highest, v.VF)

        def body(index, sums):
            part = v.load(builder, builder.add(scores, builder.mul(index, v.const(64))), v.VF)
            power = v.exp(builder, builder.fsub(part, highest))
            return [builder.fadd(sums[0], power)]

        sums = v.counted_loop(builder, count, body, [v.lanes(0.0)])[0]
        return v.reduce(builder, sums, builder.fadd)

    return types.float32(types.int64, types.float32, types.int64), codegen


@intrinsic
def _power(typing, exponent):
    """exp of one float32, with the bits that a lane gets."""

    def codegen(context, builder, signature, arguments):
        power = v.exp(builder, v.broadcast(builder, arguments[0], v.VF))
        return builder.extract_element(power, ir.Constant(v.I32, 0))

    return types.float32(types.float32), codegen


@intrinsic
def _largest(typing, scores, count):
    """The lowest id of the largest of scores[0:16 * count]."""

    def codegen(context, builder, signature, arguments):
        scores, count = arguments

        def body(index, carried):
            best, ids = carried
            part = v.load(builder, builder.add(scores, builder.mul(index, v.const(64))), v.VF)
            better = builder.fcmp_ordered(">", part, best)
            return [
                builder.select(better, part, best),
                builder.select(better, v.lane_numbers(builder, index), ids),
            ]

        nothing = ir.Constant(v.VF, [PICKED] * v.LANES)
        best, ids = v.counted_loop(builder, count, body, [nothing, v.int_lanes(0)])
        return v.number_of_highest(builder, best, ids)

    return types.int64(types.int64, types.int64), codegen


@kernel(6)
def route_row(scores, experts, top_k, normalise, ids, weights):
    """The top_k experts of the highest scores, the lower id among equals, weighted by softmax.

    scores: float32[experts, rounded up to 16], overwritten; ids: int64[top_k], ascending; weights:
    float32[top_k], the softmax over all scores, divided by the sum of those picked (in that order) where
    `normalise` is 1. top_k <= experts. Infinite scores count as the largest finite ones. A NaN counts as the
    lowest, and all weights become NaN, so that no logit hides it.
    """
    spoiled = False
    for expert in range(experts):
        score = load_f32(scores + expert * 4)
        spoiled |= score != score
    highest = _make_finite(scores, experts)
    count = (experts + 15) >> 4
    total = _sum_of_powers(scores, highest, count)
    for picked in range(top_k):
        best = _largest(scores, count)
        weight = _power(load_f32(scores + best * 4) - highest) / total
        store_f32(scores + best * 4, np.float32(PICKED))
        place = picked
        while place > 0 and load_i64(ids + (place - 1) * 8) > best:
            store_i64(ids + place * 8, load_i64(ids + (place - 1) * 8))
            store_f32(weights + place * 4, load_f32(weights + (place - 1) * 4))
            place -= 1
        store_i64(ids + place * 8, best)
        store_f32(weights + place * 4, weight)
    if normalise == 1:
        total = np.float32(0.0)
        for i in range(top_k):
            total += load_f32(weights + i * 4)
        for i in range(top_k):
            store_f32(weights + i * 4, load_f32(weights + i * 4) / total)
    if spoiled:
        for i in range(top_k):
            store_f32(weights + i * 4, np.float32(np.nan))


@intrinsic
def _combine(typing, out, count, parts, stride, places, weights, top_k):
    def codegen(context, builder, signature, arguments):
        out, count, parts, stride, places, weights, top_k = arguments

        def columns(index, _):
            at = builder.mul(index, v.const(64))

            def expert(i, sums):
                place = v.load(builder, builder.add(places, builder.mul(i, v.const(8))), v.I64, align=8)
                weight = v.load(builder, builder.add(weights, builder.mul(i, v.const(4))), v.F32)
                part = builder.add(builder.add(parts, builder.mul(place, stride)), at)
                part = v.load(builder, part, v.VF)
                return [v.fma(builder, v.broadcast(builder, weight, v.VF), part, sums[0])]

            total = v.counted_loop(builder, top_k, expert, [v.lanes(0.0)])[0]
            target = builder.add(out, at)
            v.store(builder, builder.fadd(v.load(builder, target, v.VF), total), target)

        v.counted_loop(builder, count, columns)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@kernel(7)
def combine_row(out, width, parts, stride, places, weights, top_k):
    """out[0:width] += the sum over i < top_k, in order, of weights[i] times row places[i] of `parts`.

    out: float32[width], a multiple of 16; parts: float32 rows, `stride` bytes apart; places: int64[top_k];
    weights: float32[top_k]; top_k >= 1. The sum is a chain of fused steps and is added to `out` once.
    """
    _combine(out, width >> 4, parts, stride, places, weights, top_k)
