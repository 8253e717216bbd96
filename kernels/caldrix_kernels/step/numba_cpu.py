"""The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages."""

from typing import Any

import numpy as np

from caldrix_kernels.attention.numba_cpu import (
    attend_block,
    finish_head,
    merge_partials,
    partial_bytes,
)
from caldrix_kernels.embed.numba_cpu import embed_panelled, embed_row_major
from caldrix_kernels.intrinsics.jit import call, kernel, routine
from caldrix_kernels.intrinsics.memory import (
    atomic_add,
    atomic_load,
    atomic_store,
    load_f32,
    load_i64,
    load_u16,
    load_u32,
    store_f32,
    store_i64,
    store_u16,
    store_u32,
)
from caldrix_kernels.linear.numba_cpu import (
    HAS_BF16_DOT,
    add_bias,
    add_tile,
    copy_tile,
    pack_panels,
    panel_bytes,
    tile_bf16,
    tile_dot,
    tile_f16,
    tile_f32,
    tile_f32_wide,
)
from caldrix_kernels.rmsnorm.numba_cpu import norm_row
from caldrix_kernels.rope.numba_cpu import rotate, scale_into
from caldrix_kernels.schedule.numba_cpu import (
    MAX_CLAIM,
    address,
    claim,
    claim_size,
    finish,
    kernel_at,
    pool_thread,
    publish_and_run,
    wait_finished,
    word,
)
from caldrix_kernels.silu_mul.numba_cpu import silu_mul_tile
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import (
    ACT_BF16,
    ADD,
    ATTENTION,
    BLOCK,
    EMBED,
    GATHER,
    HEADS,
    LINEAR,
    NORM,
    PANEL,
    ROW_BLOCK,
    RUN_QUERIES,
    SILU_MUL,
    SMALL_ROWS,
    STOPPED,
    TILE_ROWS,
)

ONE_BY_ONE = 1 << 30
TILE_ROW = PANEL * 4
ONE_BITS = 0x3F800000


@routine("int64(int64, int64)")
def tile_kernel(step, form):
    """The tile for a stored format and the way activations are stored in this step."""
    if form == at.BF16 and word(step, at.ACT) == ACT_BF16:
        return kernel_at(step, at.TILE_DOT)
    return kernel_at(step, form)


@routine("int64(int64, int64)")
def row_count(step, row):
    return word(step, at.WANTED) if word(row, at.DOMAIN) == 1 else word(step, at.ROWS)


@routine("int64(int64, int64, int64, int64)")
def source_of(step, thread, row, rows):
    """Address of a linear's input. Few rows were normed by each thread for itself, see `norm_stage`."""
    index = word(row, at.SOURCE)
    if index == at.NORMED:
        if rows <= SMALL_ROWS:
            return word(step, at.PRIVATE) + thread * word(step, at.PRIVATE_BYTES)
        return address(step, at.NORMED)
    return address(step, index)


@routine("int64(int64, int64, int64)")
def embed_stage(step, base, row):
    rows = word(step, at.ROWS)
    end = base + rows
    width = word(row, at.COLUMNS)
    form, table = word(row, at.FORMAT), address(step, word(row, at.WEIGHT))
    while True:
        item = claim(step, base, end, 1, ONE_BY_ONE)
        if item < 0:
            break
        m = item - base
        out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
        given = load_i64(word(step, at.EMBEDDINGS) + 8 * m)
        token = load_i64(word(step, at.TOKENS) + 8 * m)
        if given != 0:
            for k in range(word(row, at.TRUE_WIDTH)):
                store_f32(out + 4 * k, load_f32(given + 4 * k))
        elif word(row, at.PANELLED) == 1:
            embed_panelled(form, table, width, token, word(row, at.TRUE_WIDTH), out)
        else:
            embed_row_major(form, table, word(row, at.ROW_BYTES), token, word(row, at.TRUE_WIDTH), out)
        finish(step, end, 1)
    wait_finished(step, end)
    return end


@routine("int64(int64, int64, int64)")
def gather_stage(step, base, row):
    """Copy the wanted rows, whatever form they are in, to the front of another buffer."""
    end = base + word(step, at.WANTED)
    stride = word(row, at.SOURCE_STRIDE)
    while True:
        item = claim(step, base, end, 1, ONE_BY_ONE)
        if item < 0:
            break
        m = load_i64(word(step, at.WANTED_ROWS) + 8 * (item - base))
        source = address(step, word(row, at.SOURCE)) + m * stride
        target = address(step, word(row, at.TARGET)) + (item - base) * stride
        for unit in range(0, stride, 4):
            store_u32(target + unit, load_u32(source + unit))
        finish(step, end, 1)
    wait_finished(step, end)
    return end


@routine("void(int64, int64, int64, int64)")
def norm_one(step, row, m, out):
    x = address(step, word(row, at.SOURCE)) + m * word(row, at.SOURCE_STRIDE)
    gain = address(step, word(row, at.WEIGHT))
    width, true_width = word(row, at.COLUMNS), word(row, at.TRUE_WIDTH)
    kernel = kernel_at(step, at.NORM_ROW)
    call(kernel, (word(step, at.ACT), x, gain, out, width, true_width, word(row, at.EPSILON)))


@routine("int64(int64, int64, int64, int64)")
def norm_stage(step, thread, base, row):
    """Few rows: every thread norms all of them into memory of its own, which is cheaper than a barrier."""
    rows = row_count(step, row)
    stride = word(row, at.TARGET_STRIDE)
    if rows <= SMALL_ROWS:
        private = word(step, at.PRIVATE) + thread * word(step, at.PRIVATE_BYTES)
        for m in range(rows):
            norm_one(step, row, m, private + m * stride)
        return base
    end = base + rows
    shared = address(step, at.NORMED)
    while True:
        item = claim(step, base, end, MAX_CLAIM, ONE_BY_ONE)
        if item < 0:
            break
        size = claim_size(item, end, MAX_CLAIM, ONE_BY_ONE)
        for m in range(item - base, item - base + size):
            norm_one(step, row, m, shared + m * stride)
        finish(step, end, size)
    wait_finished(step, end)
    return end


@routine("int64(int64, int64)")
def share_of(step, rows):
    """Few rows: claims shrink from a 1/(2 threads) part of the rest; many rows: one panel is work enough."""
    return 2 * word(step, at.THREADS) if rows <= SMALL_ROWS else ONE_BY_ONE


@routine("int64(int64)")
def row_blocks(rows):
    """Parts that a stage's rows are cut into. Neighbouring items share one, which stays in the cache."""
    return (rows + ROW_BLOCK - 1) // ROW_BLOCK


@routine("int64(int64, int64, int64, int64)")
def linear_stage(step, thread, base, row):
    rows = row_count(step, row)
    if rows == 0:
        return base
    panels = word(row, at.ITEMS)
    end = base + panels * row_blocks(rows)
    form, act, columns = word(row, at.FORMAT), word(step, at.ACT), word(row, at.COLUMNS)
    tile, silu_mul = tile_kernel(step, form), kernel_at(step, at.SILU_MUL_TILE)
    step_bytes = 64 if form == at.F16 else 128
    weight = address(step, word(row, at.WEIGHT))
    bias = address(step, word(row, at.BIAS)) if word(row, at.BIAS) != 0 else 0
    x, x_stride = source_of(step, thread, row, rows), word(row, at.SOURCE_STRIDE)
    target, stride = address(step, word(row, at.TARGET)), word(row, at.TARGET_STRIDE)
    epilogue, share = word(row, at.EPILOGUE), share_of(step, rows)
    scratch = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    column_bytes = PANEL * 4
    if epilogue == SILU_MUL:
        column_bytes = PANEL // 2 * (2 if act == ACT_BF16 else 4)
    while True:
        item = claim(step, base, end, 1, share)
        if item < 0:
            break
        size = claim_size(item, end, 1, share)
        for unit in range(item - base, item - base + size):
            part = 0 if unit < panels else unit // panels
            panel, m = unit - part * panels, part * ROW_BLOCK
            last = min(rows, m + ROW_BLOCK)
            w = weight + panel * panel_bytes(form, columns)
            while m < last:
                count = min(TILE_ROWS, last - m)
                call(tile, (count, w, step_bytes, x + m * x_stride, x_stride, columns, scratch, TILE_ROW))
                if bias != 0:
                    add_bias(scratch, TILE_ROW, count, bias + panel * PANEL * 4)
                out = target + m * stride + panel * column_bytes
                if epilogue == ADD:
                    add_tile(scratch, TILE_ROW, out, stride, count)
                elif epilogue == SILU_MUL:
                    call(silu_mul, (act, scratch, TILE_ROW, out, stride, count))
                else:
                    copy_tile(scratch, TILE_ROW, out, stride, count)
                m += count
        finish(step, end, size)
    wait_finished(step, end)
    return end


@routine("void(int64, int64, int64, int64, int64)")
def place_head(step, row, head, m, source):
    """Send row m of a finished q, k or v head where attention reads it: q roped and scaled, k roped."""
    q_heads, kv_heads = word(row, at.Q_HEADS), word(row, at.KV_HEADS)
    head_dim, rotary_dim = word(row, at.HEAD_DIM), word(row, at.ROTARY_DIM)
    position = load_i64(word(step, at.POSITIONS) + 8 * m)
    value_width = (head_dim + PANEL - 1) // PANEL * PANEL
    if head < q_heads + kv_heads:
        table = address(step, word(row, at.ROPE_TABLE)) + position * rotary_dim * 4
        call(kernel_at(step, at.ROTATE), (source, table, rotary_dim))
    if head < q_heads:
        group = q_heads // kv_heads
        vectors = ((head // group) * word(step, at.MAX_ROWS) + m) * group + head % group
        out = address(step, word(row, at.TARGET)) + vectors * word(row, at.TARGET_STRIDE)
        scale_into(source, word(row, at.SCALE), out, (head_dim + 15) >> 4)
        return
    state = load_i64(word(step, at.SLOT_TABLE) + 8 * load_i64(word(step, at.SLOTS) + 8 * m))
    state += position // BLOCK * word(step, at.STATE_BLOCK) + word(row, at.STATE_OFFSET)
    place = position % BLOCK
    if head < q_heads + kv_heads:
        out = state + (head - q_heads) * BLOCK * head_dim * 4
        out += place // PANEL * (PANEL * 4) * head_dim + place % PANEL * 4
        for i in range(head_dim):
            store_f32(out + i * PANEL * 4, load_f32(source + 4 * i))
        return
    values = state + kv_heads * BLOCK * head_dim * 4
    out = values + ((head - q_heads - kv_heads) * BLOCK + place) * value_width * 4
    scale_into(source, ONE_BITS, out, value_width >> 4)


@routine("int64(int64, int64, int64, int64)")
def heads_stage(step, thread, base, row):
    """The q, k and v projections: an item is a whole head, so that rope finds both halves."""
    rows = row_count(step, row)
    if rows == 0:
        return base
    heads = word(row, at.ITEMS)
    end = base + heads * row_blocks(rows)
    form, columns = word(row, at.FORMAT), word(row, at.COLUMNS)
    tile, step_bytes = tile_kernel(step, form), 64 if form == at.F16 else 128
    weight = address(step, word(row, at.WEIGHT))
    bias = address(step, word(row, at.BIAS)) if word(row, at.BIAS) != 0 else 0
    x, x_stride = source_of(step, thread, row, rows), word(row, at.SOURCE_STRIDE)
    share = share_of(step, rows)
    scratch = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    panels = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL
    head_bytes = panels * PANEL * 4
    while True:
        item = claim(step, base, end, 1, share)
        if item < 0:
            break
        size = claim_size(item, end, 1, share)
        for unit in range(item - base, item - base + size):
            part = 0 if unit < heads else unit // heads
            head, m = unit - part * heads, part * ROW_BLOCK
            last = min(rows, m + ROW_BLOCK)
            while m < last:
                count = min(TILE_ROWS, last - m)
                for slice_ in range(panels):
                    panel = head * panels + slice_
                    w, out = weight + panel * panel_bytes(form, columns), scratch + slice_ * TILE_ROW
                    call(tile, (count, w, step_bytes, x + m * x_stride, x_stride, columns, out, head_bytes))
                    if bias != 0:
                        add_bias(out, head_bytes, count, bias + panel * PANEL * 4)
                for i in range(count):
                    place_head(step, row, head, m + i, scratch + i * head_bytes)
                m += count
        finish(step, end, size)
    wait_finished(step, end)
    return end


@routine("void(int64, int64, int64, int64, int64, int64)")
def finish_row(step, row, m, kv_head, partials, spare):
    """Write the group's finished heads of row m into the attended row. `spare`: a head of scratch."""
    head_dim = word(row, at.HEAD_DIM)
    group = word(row, at.Q_HEADS) // word(row, at.KV_HEADS)
    value_width = (head_dim + PANEL - 1) // PANEL * PANEL
    act = word(step, at.ACT)
    size = 2 if act == ACT_BF16 else 4
    kernel = kernel_at(step, at.FINISH_HEAD)
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    for i in range(group):
        target = out + (kv_head * group + i) * head_dim * size
        source = partials + i * partial_bytes(value_width)
        if head_dim & 15 == 0:
            call(kernel, (act, source, value_width, target, head_dim >> 4))
        else:
            # A whole vector would reach into the next head, which another thread may be writing.
            call(kernel, (act, source, value_width, spare, value_width >> 4))
            for unit in range(head_dim * size // 2):
                store_u16(target + 2 * unit, load_u16(spare + 2 * unit))


@routine("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def attend(step, row, m, kv_head, block, count, first, scores, out):
    """Partials of `count` rows from row m (position `first`) over one block."""
    q_heads, kv_heads, head_dim = word(row, at.Q_HEADS), word(row, at.KV_HEADS), word(row, at.HEAD_DIM)
    group = q_heads // kv_heads
    value_width = (head_dim + PANEL - 1) // PANEL * PANEL
    state = load_i64(word(step, at.SLOT_TABLE) + 8 * load_i64(word(step, at.SLOTS) + 8 * m))
    state += block * word(step, at.STATE_BLOCK) + word(row, at.STATE_OFFSET)
    keys = state + kv_head * BLOCK * head_dim * 4
    values = state + kv_heads * BLOCK * head_dim * 4 + kv_head * BLOCK * value_width * 4
    stride = word(row, at.SOURCE_STRIDE)
    queries = address(step, word(row, at.SOURCE)) + (kv_head * word(step, at.MAX_ROWS) + m) * group * stride
    call(
        kernel_at(step, at.ATTEND_BLOCK),
        (
            kernel_at(step, at.TILE_F32),
            kernel_at(step, at.TILE_F32_WIDE),
            keys,
            values,
            head_dim,
            value_width,
            block,
            queries,
            stride,
            count,
            group,
            first,
            scores,
            out,
        ),
    )


@routine("int64(int64, int64, int64, int64)")
def attention_split(step, thread, base, row):
    """Few rows: an item is one block of one row and key/value head; the last to finish merges in order."""
    kv_heads = word(row, at.KV_HEADS)
    group = word(row, at.Q_HEADS) // kv_heads
    value_width = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL * PANEL
    stride = partial_bytes(value_width)
    blocks, lines = word(step, at.BLOCKS), word(step, at.RUNS) * kv_heads
    end = base + blocks * lines
    scores = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    merge = kernel_at(step, at.MERGE_PARTIALS)
    while True:
        item = claim(step, base, end, 1, ONE_BY_ONE)
        if item < 0:
            break
        block, line = (item - base) // lines, (item - base) % lines
        kv_head, m = line % kv_heads, load_i64(word(step, at.RUN_ROWS) + 8 * (line // kv_heads))
        first = load_i64(word(step, at.POSITIONS) + 8 * m)
        own_blocks = first // BLOCK + 1
        if block < own_blocks:
            partials = word(step, at.PARTS) + line * blocks * group * stride
            attend(step, row, m, kv_head, block, 1, first, scores, partials + block * group * stride)
            counter = word(step, at.PART_COUNTS) + 8 * line
            if atomic_add(counter, 1) == own_blocks - 1:
                atomic_store(counter, 0)
                for other in range(1, own_blocks):
                    part = partials + other * group * stride
                    call(merge, (partials, part, value_width, stride, group))
                finish_row(step, row, m, kv_head, partials, scores)
        finish(step, end, 1)
    wait_finished(step, end)
    return end


@routine("int64(int64, int64, int64, int64)")
def attention_whole(step, thread, base, row):
    """Many rows: an item is one run of rows and one key/value head, over all its blocks."""
    kv_heads = word(row, at.KV_HEADS)
    group = word(row, at.Q_HEADS) // kv_heads
    value_width = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL * PANEL
    stride = partial_bytes(value_width)
    runs = word(step, at.RUNS)
    end = base + runs * kv_heads
    scores = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    merge = kernel_at(step, at.MERGE_PARTIALS)
    vectors = max(RUN_QUERIES, group)
    fresh = scores + vectors * BLOCK * 4
    merged = fresh + vectors * stride
    while True:
        item = claim(step, base, end, 1, ONE_BY_ONE)
        if item < 0:
            break
        # The longest runs, at the end of a prompt, go first.
        kv_head, run = (item - base) % kv_heads, runs - 1 - (item - base) // kv_heads
        m = load_i64(word(step, at.RUN_ROWS) + 8 * run)
        count = load_i64(word(step, at.RUN_LENGTHS) + 8 * run)
        first = load_i64(word(step, at.POSITIONS) + 8 * m)
        attend(step, row, m, kv_head, 0, count, first, scores, merged)
        for block in range(1, (first + count - 1) // BLOCK + 1):
            attend(step, row, m, kv_head, block, count, first, scores, fresh)
            # Rows before the block, at the start of a run, have no part in it.
            skipped = max(0, block * BLOCK - first) * group
            near, far = merged + skipped * stride, fresh + skipped * stride
            call(merge, (near, far, value_width, stride, count * group - skipped))
        for i in range(count):
            finish_row(step, row, m + i, kv_head, merged + i * group * stride, scores)
        finish(step, end, 1)
    wait_finished(step, end)
    return end


@kernel(2)
def run_step(step, thread):
    """Run ops [begin, end); leaves the number after the last item in the block's BASE."""
    base = word(step, at.BASE)
    stopped = word(step, at.CONTROL) + STOPPED
    ticket = base + 1
    for op in range(word(step, at.BEGIN), word(step, at.END)):
        row = word(step, at.PROGRAM) + op * at.ROW_WORDS * 8
        code = word(row, at.OP)
        if code == LINEAR:
            base = linear_stage(step, thread, base, row)
        elif code == HEADS:
            base = heads_stage(step, thread, base, row)
        elif code == NORM:
            base = norm_stage(step, thread, base, row)
        elif code == ATTENTION:
            if word(step, at.SPLIT) == 1:
                base = attention_split(step, thread, base, row)
            else:
                base = attention_whole(step, thread, base, row)
        elif code == GATHER:
            base = gather_stage(step, base, row)
        elif code == EMBED:
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
}
