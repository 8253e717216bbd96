"""x * sigmoid(gate) of one row."""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.step.layout import ACT_BF16, ACT_BYTES, ACT_F32, ACT_ROUNDED


def _make_sigmoid_mul(act):
    @intrinsic
    def sigmoid_mul(typing, x, gate, out, count):
        def codegen(context, builder, signature, arguments):
            x, gate, out, count = arguments

            def body(index, _):
                at = builder.mul(index, v.const(64))
                share = v.sigmoid(builder, v.load(builder, builder.add(gate, at), v.VF))
                value = builder.fmul(v.load(builder, builder.add(x, at), v.VF), share)
                target = builder.add(out, builder.mul(index, v.const(16 * ACT_BYTES[act])))
                v.store_activation(builder, value, target, act)

            v.counted_loop(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return sigmoid_mul


_mul_f32, _mul_bf16, _mul_rounded = (_make_sigmoid_mul(act) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED))


@kernel(5)
def sigmoid_mul_row(act, x, gate, out, count):
    """out[0:16 * count] = x * sigmoid(gate), stored as an activation; x, gate: float32; count >= 1."""
    if act == ACT_F32:
        _mul_f32(x, gate, out, count)
    elif act == ACT_BF16:
        _mul_bf16(x, gate, out, count)
    else:
        _mul_rounded(x, gate, out, count)
