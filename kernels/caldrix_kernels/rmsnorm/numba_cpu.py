"""RMS norm of one row: sixteen partial sums (column mod 16), one fixed tree, then x * r * gain."""

import numpy as np
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import bits_to_float
from caldrix_kernels.step.layout import ACT_BF16, ACT_BYTES, ACT_F32, ACT_ROUNDED


@intrinsic
def sum_of_squares(typing, x, width):
    """sum of x[0:width]**2; width a multiple of 16."""

    def codegen(context, builder, signature, arguments):
        x, width = arguments

        def body(index, carried):
            value = v.load(builder, builder.add(x, builder.mul(index, v.const(64))), v.VF)
            return [v.fma(builder, value, value, carried[0])]

        total = v.counted_loop(builder, builder.lshr(width, v.const(4)), body, [v.lanes(0.0)])[0]
        return v.reduce(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64), codegen


def _make_scale(act):
    @intrinsic
    def scale(typing, x, factor, gain, out, width):
        """out = (x * factor) * gain, stored as an activation."""

        def codegen(context, builder, signature, arguments):
            x, factor, gain, out, width = arguments
            factor = v.broadcast(builder, factor, v.VF)

            def body(index, _):
                at = builder.mul(index, v.const(64))
                value = builder.fmul(v.load(builder, builder.add(x, at), v.VF), factor)
                value = builder.fmul(value, v.load(builder, builder.add(gain, at), v.VF))
                target = builder.add(out, builder.mul(index, v.const(16 * ACT_BYTES[act])))
                v.store_activation(builder, value, target, act)

            v.counted_loop(builder, builder.lshr(width, v.const(4)), body)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen

    return scale


_scale_f32, _scale_bf16, _scale_rounded = (_make_scale(act) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED))


@kernel(7)
def norm_row(act, x, gain, out, width, true_width, epsilon_bits):
    """x, gain: float32[width], zero beyond `true_width`; width a multiple of 16."""
    epsilon = bits_to_float(np.uint32(epsilon_bits))
    mean = sum_of_squares(x, width) / np.float32(true_width)
    factor = np.float32(1.0) / np.sqrt(mean + epsilon)
    if act == ACT_F32:
        _scale_f32(x, factor, gain, out, width)
    elif act == ACT_BF16:
        _scale_bf16(x, factor, gain, out, width)
    else:
        _scale_rounded(x, factor, gain, out, width)
