"""The index of the highest of a row, in sixteen lanes."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import store_i64


@intrinsic
def _argmax(typing, x, width):
    def codegen(context, builder, signature, arguments):
        x, width = arguments
        limit = v.broadcast(builder, builder.trunc(width, v.I32), v.VI)

        def body(index, carried):
            tops, places, spoiled = carried
            numbers = v.lane_numbers(builder, index)
            part = v.load(builder, builder.add(x, builder.mul(index, v.const(64))), v.VF)
            inside = builder.icmp_signed("<", numbers, limit)
            higher = builder.and_(inside, builder.fcmp_ordered(">", part, tops))
            # A number less itself is 0 when it is finite, else no number.
            rest = builder.select(inside, builder.fsub(part, part), v.lanes(0.0))
            return [
                builder.select(higher, part, tops),
                builder.select(higher, numbers, places),
                builder.fadd(spoiled, rest),
            ]

        lowest = ir.Constant(v.VF, [float("-inf")] * v.LANES)
        count = builder.lshr(builder.add(width, v.const(v.LANES - 1)), v.const(4))
        start = [lowest, v.int_lanes(0), v.lanes(0.0)]
        tops, places, spoiled = v.counted_loop(builder, count, body, start)
        spoil = v.reduce(builder, spoiled, builder.fadd)
        finite = builder.fcmp_ordered("ord", spoil, spoil)
        return builder.select(finite, v.number_of_highest(builder, tops, places), v.const(-1))

    return types.int64(types.int64, types.int64), codegen


@kernel(3)
def argmax_row(x, width, out):
    """int64 at `out`: the lowest index of the highest of float32[width], -1 when any is not finite.

    Whole vectors are read: up to 15 floats more than `width`.
    """
    store_i64(out, _argmax(x, width))
