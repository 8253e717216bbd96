"""RMS norm of one head times a gain, then times silu of a gate. Sums as in rmsnorm."""

import numpy as np
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import bits_to_float
from caldrix_kernels.rmsnorm.numba_cpu import sum_of_squares
from caldrix_kernels.step.layout import ACT_BF16, ACT_BYTES, ACT_F32, ACT_ROUNDED


def _make_gated_scale(act):
    @intrinsic
    def gated_scale(typing, x, factor, z, gain, out, width):
        """out = ((x * factor) * gain) * silu(z), stored as an activation."""

        def codegen(context, builder, signature, arguments):
            x, factor, z, gain, out, width = arguments
            factor = v.broadcast(builder, factor, v.VF)

            def body(index, _):
                at = builder.mul(index, v.const(64))
                value = builder.fmul(v.load(builder, builder.add(x, at), v.VF), factor)
                value = builder.fmul(value, v.load(builder, builder.add(gain, at), v.VF))
                gate = v.silu(builder, v.load(builder, builder.add(z, at), v.VF))
                target = builder.add(out, builder.mul(index, v.const(16 * ACT_BYTES[act])))
                v.store_activation(builder, builder.fmul(value, gate), target, act)

            v.counted_loop(builder, builder.lshr(width, v.const(4)), body)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, *[types.int64] * 4), codegen

    return gated_scale


_scale_f32, _scale_bf16, _scale_rounded = (_make_gated_scale(act) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED))


@kernel(7)
def gated_norm_head(act, x, z, gain, out, width, epsilon_bits):
    """x, z, gain: float32[width], a multiple of 16; epsilon as float32 bits."""
    epsilon = bits_to_float(np.uint32(epsilon_bits))
    mean = sum_of_squares(x, width) / np.float32(width)
    factor = np.float32(1.0) / np.sqrt(mean + epsilon)
    if act == ACT_F32:
        _scale_f32(x, factor, z, gain, out, width)
    elif act == ACT_BF16:
        _scale_bf16(x, factor, z, gain, out, width)
    else:
        _scale_rounded(x, factor, z, gain, out, width)
