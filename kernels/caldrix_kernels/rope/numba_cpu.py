"""Rotary embedding of one head in place: (a, b) -> (a cos - b sin, b cos + a sin).

The two of a pair stand half a rotary width apart.
"""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel, routine
from caldrix_kernels.intrinsics.memory import load_f32, store_f32
from caldrix_kernels.step.layout import ACT_BF16, ACT_BYTES, ACT_F32, ACT_ROUNDED

ONE_BITS = 0x3F800000


@intrinsic
def _rotate_vectors(typing, head, table, half):
    """The first `half` (a multiple of 16) pairs; table is [cos[half] | sin[half]]."""

    def codegen(context, builder, signature, arguments):
        head, table, half = arguments
        half_bytes = builder.shl(half, v.const(2))

        def body(index, _):
            at = builder.mul(index, v.const(64))
            first, cos_at = builder.add(head, at), builder.add(table, at)
            second, sin_at = builder.add(first, half_bytes), builder.add(cos_at, half_bytes)
            a, b = v.load(builder, first, v.VF), v.load(builder, second, v.VF)
            cos, sin = v.load(builder, cos_at, v.VF), v.load(builder, sin_at, v.VF)
            v.store(builder, builder.fsub(builder.fmul(a, cos), builder.fmul(b, sin)), first)
            v.store(builder, builder.fadd(builder.fmul(b, cos), builder.fmul(a, sin)), second)

        v.counted_loop(builder, builder.lshr(half, v.const(4)), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel(3)
def rotate(head, table, rotary_dim):
    """head: float32[>= rotary_dim]; table: float32[cos | sin] of the position, rotary_dim / 2 each."""
    half = rotary_dim >> 1
    if half & 15 == 0:
        _rotate_vectors(head, table, half)
        return
    for i in range(half):
        a = load_f32(head + 4 * i)
        b = load_f32(head + 4 * (half + i))
        cos = load_f32(table + 4 * i)
        sin = load_f32(table + 4 * (half + i))
        store_f32(head + 4 * i, a * cos - b * sin)
        store_f32(head + 4 * (half + i), b * cos + a * sin)


def _make_scale(act):
    @intrinsic
    def scale(typing, source, scale_bits, out, count):
        def codegen(context, builder, signature, arguments):
            source, scale_bits, out, count = arguments
            scale = builder.bitcast(builder.trunc(scale_bits, v.I32), v.F32)
            scale = v.broadcast(builder, scale, v.VF)

            def body(index, _):
                value = v.load(builder, builder.add(source, builder.mul(index, v.const(64))), v.VF)
                target = builder.add(out, builder.mul(index, v.const(16 * ACT_BYTES[act])))
                v.store_activation(builder, builder.fmul(value, scale), target, act)

            v.counted_loop(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return scale


_scale_f32, _scale_bf16, _scale_rounded = (_make_scale(act) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED))


@routine("void(int64, int64, int64, int64, int64)")
def scale_into(act, source, scale_bits, out, count):
    """out[0:16 * count] = source[0:16 * count] * scale, stored as an activation; count >= 1.

    The scale is given as float32 bits. `out` may be `source`.
    """
    if act == ACT_F32:
        _scale_f32(source, scale_bits, out, count)
    elif act == ACT_BF16:
        _scale_bf16(source, scale_bits, out, count)
    else:
        _scale_rounded(source, scale_bits, out, count)
