"""The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages."""

from typing import Any

import numpy as np

from caldrix_kernels.argmax.numba_cpu import argmax_row
from caldrix_kernels.attention.numba_cpu import attend_block, finish_head, merge_partials
from caldrix_kernels.causal_conv.numba_cpu import conv_row, conv_state
from caldrix_kernels.delta_rule.numba_cpu import delta_head, gates_row, normalise_head
from caldrix_kernels.experts.numba_cpu import combine_row, route_row
from caldrix_kernels.gated_rmsnorm.numba_cpu import gated_norm_head
from caldrix_kernels.intrinsics.jit import kernel, routine
from caldrix_kernels.intrinsics.memory import atomic_load, store_i64
from caldrix_kernels.intrinsics.vector import HAS_BF16
from caldrix_kernels.linear.numba_cpu import (
    tile_bf16,
    tile_dot,
    tile_dot_wide,
    tile_f16,
    tile_f32,
    tile_f32_wide,
)
from caldrix_kernels.packing.numba_cpu import pack_panels
from caldrix_kernels.rmsnorm.numba_cpu import norm_row
from caldrix_kernels.rope.numba_cpu import rotate
from caldrix_kernels.schedule.numba_cpu import (
    address,
    claim,
    claim_size,
    finish,
    pool_thread,
    publish_and_run,
    wait_finished,
    word,
)
from caldrix_kernels.silu_mul.numba_cpu import silu_mul_tile
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.attention.numba_cpu import attention_item, attention_items, head_items, head_run
from caldrix_kernels.step.delta.numba_cpu import conv_item, delta_item, delta_items, gated_norm_item
from caldrix_kernels.step.dense.numba_cpu import (
    argmax_item,
    embed_item,
    gather_item,
    linear_items,
    linear_run,
    norm_alone,
    norm_item,
    row_count,
)
from caldrix_kernels.step.experts.numba_cpu import combine_item, dispatch_item, route_item
from caldrix_kernels.step.layout import SMALL_ROWS

ONE_BY_ONE = 1 << 30
# Rows that are normed by a claim.
NORM_CLAIM = 8


@routine("int64(int64, int64, int64)")
def item_count(step, row, code):
    """The items of a stage: known from the step and the program alone, so that no thread can differ."""
    if code == at.LINEAR:
        return linear_items(step, row)
    if code == at.HEADS:
        return head_items(step, row)
    if code == at.ATTENTION:
        return attention_items(step, row)
    if code == at.DELTA:
        return delta_items(step, row)
    if code == at.GATHER:
        return word(step, at.WANTED)
    if code == at.DISPATCH:
        return row_count(step, row) * word(row, at.TOP_K)
    return row_count(step, row)


@routine("void(int64, int64, int64, int64, int64)")
def run_item(step, thread, row, code, item):
    if code == at.ATTENTION:
        attention_item(step, thread, row, item)
    elif code == at.NORM:
        norm_item(step, row, item, address(step, at.NORMED))
    elif code == at.EMBED:
        embed_item(step, row, item)
    elif code == at.GATHER:
        gather_item(step, row, item)
    elif code == at.ROUTE:
        route_item(step, row, item)
    elif code == at.DISPATCH:
        dispatch_item(step, thread, row, item)
    elif code == at.COMBINE:
        combine_item(step, row, item)
    elif code == at.CONV:
        conv_item(step, row, item)
    elif code == at.DELTA:
        delta_item(step, row, item)
    elif code == at.GATED_NORM:
        gated_norm_item(step, row, item)
    elif code == at.ARGMAX:
        argmax_item(step, row, item)


@routine("void(int64, int64, int64, int64, int64, int64)")
def run_items(step, thread, row, code, first, end):
    """Items first..end-1 of a stage."""
    if code == at.LINEAR:
        linear_run(step, thread, row, first, end)
    elif code == at.HEADS:
        head_run(step, thread, row, first, end)
    else:
        for item in range(first, end):
            run_item(step, thread, row, code, item)


@routine("int64(int64, int64, int64)")
def share_of(step, row, code):
    """Products of few rows: a claim takes an equal part of what is left, else one item.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): long runs of memory to read and few claims, and
    small ones at the end, where threads of different speed meet.
    """
    few = row_count(step, row) <= SMALL_ROWS
    return word(step, at.THREADS) if few and code in (at.LINEAR, at.HEADS) else ONE_BY_ONE


@routine("int64(int64, int64, int64, int64, int64)")
def run_stage(step, thread, row, code, base):
    """Take items until there are none, then wait for those of others; the number after the last item."""
    end = base + item_count(step, row, code)
    least = NORM_CLAIM if code == at.NORM else 1
    share = share_of(step, row, code)
    while True:
        item = claim(step, base, end, least, share)
        if item < 0:
            break
        size = claim_size(item, end, least, share)
        run_items(step, thread, row, code, item - base, item - base + size)
        finish(step, end, size)
    wait_finished(step, end)
    return end


@kernel(2)
def run_step(step, thread):
    """Run ops [begin, end); leaves the number after the last item in the block's BASE."""
    base = word(step, at.BASE)
    stopped = word(step, at.CONTROL) + at.STOPPED
    ticket = base + 1
    for op in range(word(step, at.BEGIN), word(step, at.END)):
        row = word(step, at.PROGRAM) + op * at.ROW_WORDS * 8
        code = word(row, at.OP)
        if code == at.NORM and row_count(step, row) <= SMALL_ROWS:
            norm_alone(step, thread, row)
            continue
        base = run_stage(step, thread, row, code, base)
        if atomic_load(stopped) >= ticket:
            # A slow thread may see this one stage early, or not before a later step was stopped too: the
            # named stage is the last of its step, or stands behind it.
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
        "bf16_dot": HAS_BF16,
    }


KERNELS = {
    at.TILE_BF16: tile_bf16,
    at.TILE_F16: tile_f16,
    at.TILE_F32: tile_f32,
    at.TILE_DOT: tile_dot,
    at.TILE_F32_WIDE: tile_f32_wide,
    at.TILE_DOT_WIDE: tile_dot_wide,
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
    at.ARGMAX_ROW: argmax_row,
}
