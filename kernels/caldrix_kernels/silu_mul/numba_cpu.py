"""silu(gate) * up on a tile whose 32 columns are 16 gates and their 16 ups."""

from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.step.layout import ACT_BF16, ACT_F32, ACT_ROUNDED


def _make_silu_mul(act):
    @intrinsic
    def silu_mul(typing, tile, tile_stride, out, out_stride, rows):
        def codegen(context, builder, signature, arguments):
            tile, tile_stride, out, out_stride, rows = arguments

            def body(index, _):
                row = builder.add(tile, builder.mul(index, tile_stride))
                gate = v.load(builder, row, v.VF)
                up = v.load(builder, v.offset(builder, row, 64), v.VF)
                value = builder.fmul(v.silu(builder, gate), up)
                target = builder.add(out, builder.mul(index, out_stride))
                v.store_activation(builder, value, target, act)

            v.counted_loop(builder, rows, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return silu_mul


_silu_f32, _silu_bf16, _silu_rounded = (_make_silu_mul(act) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED))


@kernel(6)
def silu_mul_tile(act, tile, tile_stride, out, out_stride, rows):
    """out[m, 0:16] = silu(tile[m, 0:16]) * tile[m, 16:32], stored as an activation."""
    if act == ACT_F32:
        _silu_f32(tile, tile_stride, out, out_stride, rows)
    elif act == ACT_BF16:
        _silu_bf16(tile, tile_stride, out, out_stride, rows)
    else:
        _silu_rounded(tile, tile_stride, out, out_stride, rows)
