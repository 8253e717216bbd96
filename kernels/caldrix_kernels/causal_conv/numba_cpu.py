"""A short causal convolution of each channel, one row at a time, then silu.

The inputs before a row are the rows above it in the buffer and, before those, the state.
"""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel


@intrinsic
def _conv(typing, x, stride, earlier, first, available, weight, row_bytes, taps, out):
    """Taps first..taps-1; of those, the ones over `available` rows back are rows of `earlier`."""

    def codegen(context, builder, signature, arguments):
        x, stride, earlier, first, available, weight, row_bytes, taps, out = arguments
        count = builder.sub(taps, first)

        def channels(index, _):
            at = builder.mul(index, v.const(64))

            def tap(step, sums):
                j = builder.add(step, first)
                back = builder.sub(builder.sub(taps, v.const(1)), j)
                here = builder.sub(x, builder.mul(back, stride))
                before = builder.add(earlier, builder.mul(builder.add(j, available), row_bytes))
                row = builder.select(builder.icmp_signed("<=", back, available), here, before)
                value = v.load(builder, builder.add(row, at), v.VF)
                factors = builder.add(weight, builder.mul(j, row_bytes))
                factor = v.load(builder, builder.add(factors, at), v.VF)
                return [v.fma(builder, factor, value, sums[0])]

            total = v.counted_loop(builder, count, tap, [v.lanes(0.0)])[0]
            v.store(builder, v.silu(builder, total), builder.add(out, at))

        v.counted_loop(builder, builder.lshr(row_bytes, v.const(6)), channels)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@kernel(8)
def conv_row(x, stride, available, state, weight, channels, taps, out):
    """out = silu(sum over j of weight[j] * the row taps-1-j back), float32[channels], a multiple of 16.

    x: the row, with `available` rows before it in the buffer, `stride` bytes apart; weight:
    float32[taps][channels]; state: float32[taps - 1][channels], oldest first, what came before the buffer, or
    0 for nothing.
    """
    first = 0
    if state == 0:
        first = max(0, taps - 1 - available)
    _conv(x, stride, state, first, available, weight, channels * 4, taps, out)


@intrinsic
def _copy_vectors(typing, source, target, count):
    def codegen(context, builder, signature, arguments):
        source, target, count = arguments

        def body(index, _):
            at = builder.mul(index, v.const(64))
            v.store(builder, v.load(builder, builder.add(source, at), v.VF), builder.add(target, at))

        v.counted_loop(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _zero_vectors(typing, target, count):
    def codegen(context, builder, signature, arguments):
        target, count = arguments

        def body(index, _):
            v.store(builder, v.lanes(0.0), builder.add(target, builder.mul(index, v.const(64))))

        v.counted_loop(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), codegen


@kernel(7)
def conv_state(x, stride, count, state, target, channels, taps):
    """target: the last taps - 1 inputs, oldest first, after `count` rows of which x is the last.

    Laid out as the state of `conv_row`, which stands elsewhere.
    """
    row_bytes = channels * 4
    for row in range(taps - 1):
        back = taps - 2 - row
        place = target + row * row_bytes
        if back < count:
            _copy_vectors(x - back * stride, place, channels >> 4)
        elif state == 0:
            _zero_vectors(place, channels >> 4)
        else:
            _copy_vectors(state + (row + count) * row_bytes, place, channels >> 4)
