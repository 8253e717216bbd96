"""The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages."""

from typing import Any

import numpy as np

from caldrix_kernels.attention.numba_cpu import attend_block, finish_head, merge_partials
from caldrix_kernels.causal_conv.numba_cpu import conv_row, conv_state
from caldrix_kernels.delta_rule.numba_cpu import delta_head, gates_row, normalise_head
from caldrix_kernels.experts.numba_cpu import combine_row, route_row
from caldrix_kernels.gated_rmsnorm.numba_cpu import gated_norm_head
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import atomic_load, store_i64
from caldrix_kernels.linear.numba_cpu import (
    HAS_BF16_DOT,
    tile_bf16,
    tile_dot,
    tile_f16,
    tile_f32,
    tile_f32_wide,
)
from caldrix_kernels.packing.numba_cpu import pack_panels
from caldrix_kernels.rmsnorm.numba_cpu import norm_row
from caldrix_kernels.rope.numba_cpu import rotate
from caldrix_kernels.schedule.numba_cpu import pool_thread, publish_and_run, wait_finished, word
from caldrix_kernels.silu_mul.numba_cpu import silu_mul_tile
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.attention.numba_cpu import attention_split, attention_whole, heads_stage
from caldrix_kernels.step.delta.numba_cpu import conv_stage, delta_stage, gated_norm_stage
from caldrix_kernels.step.dense.numba_cpu import embed_stage, gather_stage, linear_stage, norm_stage
from caldrix_kernels.step.experts.numba_cpu import combine_stage, dispatch_stage, route_stage


@kernel(2)
def run_step(step, thread):
    """Run ops [begin, end); leaves the number after the last item in the block's BASE."""
    base = word(step, at.BASE)
    stopped = word(step, at.CONTROL) + at.STOPPED
    ticket = base + 1
    for op in range(word(step, at.BEGIN), word(step, at.END)):
        row = word(step, at.PROGRAM) + op * at.ROW_WORDS * 8
        code = word(row, at.OP)
        if code == at.LINEAR:
            base = linear_stage(step, thread, base, row)
        elif code == at.HEADS:
            base = heads_stage(step, thread, base, row)
        elif code == at.NORM:
            base = norm_stage(step, thread, base, row)
        elif code == at.ATTENTION:
            if word(step, at.SPLIT) == 1:
                base = attention_split(step, thread, base, row)
            else:
                base = attention_whole(step, thread, base, row)
        elif code == at.GATHER:
            base = gather_stage(step, base, row)
        elif code == at.ROUTE:
            base = route_stage(step, base, row)
        elif code == at.DISPATCH:
            base = dispatch_stage(step, thread, base, row)
        elif code == at.COMBINE:
            base = combine_stage(step, base, row)
        elif code == at.CONV:
            base = conv_stage(step, base, row)
        elif code == at.DELTA:
            base = delta_stage(step, base, row)
        elif code == at.GATED_NORM:
            base = gated_norm_stage(step, base, row)
        elif code == at.EMBED:
            base = embed_stage(step, base, row)
        if atomic_load(stopped) == ticket:
            # A slow thread may see this one stage early: the stage that ends the step is the named one.
            base = atomic_load(stopped + 8)
            wait_finished(step, base)
            break
    store_i64(step + 8 * at.BASE, base)


def compiled() -> dict[str, Any]:
    """The fields of lanes.kernels.Kernels, but for the name."""
    table = np.array([KERNELS[number].address for number in range(len(KERNELS))], np.int64)
    return {
        "table": table,
        "pack_panels": pack_panels.ctypes,
        "publish_and_run": publish_and_run,
        "pool_thread": pool_thread,
        "bf16_dot": HAS_BF16_DOT,
    }


KERNELS = {
    at.TILE_BF16: tile_bf16,
    at.TILE_F16: tile_f16,
    at.TILE_F32: tile_f32,
    at.TILE_DOT: tile_dot,
    at.TILE_F32_WIDE: tile_f32_wide,
    at.NORM_ROW: norm_row,
    at.ROTATE: rotate,
    at.SILU_MUL_TILE: silu_mul_tile,
    at.ATTEND_BLOCK: attend_block,
    at.MERGE_PARTIALS: merge_partials,
    at.FINISH_HEAD: finish_head,
    at.RUN_STEP: run_step,
    at.ROUTE_ROW: route_row,
    at.COMBINE_ROW: combine_row,
    at.CONV_ROW: conv_row,
    at.CONV_STATE: conv_state,
    at.GATES_ROW: gates_row,
    at.NORMALISE_HEAD: normalise_head,
    at.DELTA_HEAD: delta_head,
    at.GATED_NORM_HEAD: gated_norm_head,
}
