"""Rotary embedding of one head in place: (a, b) -> (a cos - b sin, b cos + a sin).

The two of a pair stand half a rotary width apart.
"""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import load_f32, store_f32


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


@intrinsic
def scale_into(typing, source, scale_bits, out, count):
    """out[0:16 * count] = source[0:16 * count] * scale, the scale as float32 bits; count >= 1."""

    def codegen(context, builder, signature, arguments):
        source, scale_bits, out, count = arguments
        scale = builder.bitcast(builder.trunc(scale_bits, v.I32), v.F32)
        scale = v.broadcast(builder, scale, v.VF)

        def body(index, _):
            at = builder.mul(index, v.const(64))
            value = v.load(builder, builder.add(source, at), v.VF)
            v.store(builder, builder.fmul(value, scale), builder.add(out, at))

        v.counted_loop(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
