"""Items of attention: heads to where it reads them, then blocks of one row or whole runs of rows."""

from caldrix_kernels.attention.numba_cpu import partial_bytes
from caldrix_kernels.intrinsics.jit import call, routine
from caldrix_kernels.intrinsics.memory import (
    atomic_add,
    atomic_store,
    load_i64,
    load_u16,
    load_u32,
    store_u16,
    store_u32,
)
from caldrix_kernels.linear.numba_cpu import act_bytes, add_bias
from caldrix_kernels.rope.numba_cpu import ONE_BITS, scale_into
from caldrix_kernels.schedule.numba_cpu import address, kernel_at, word
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.dense.numba_cpu import (
    TILE_ROW,
    copy_row,
    row_blocks,
    row_count,
    source_of,
    tile_kernel,
)
from caldrix_kernels.step.layout import (
    ACT_BF16,
    ACT_F32,
    BLOCK,
    PANEL,
    ROW_BLOCK,
    RUN_QUERIES,
    TILE_ROWS,
)


@routine("int64(int64, int64)")
def ends_sequence(step, m):
    """Whether row m is the last of its sequence in this step: rows of a sequence stand together."""
    slots = word(step, at.SLOTS)
    return m + 1 == word(step, at.ROWS) or load_i64(slots + 8 * m + 8) != load_i64(slots + 8 * m)


@routine("void(int64, int64, int64, int64, int64)")
def place_pairs(source, out, place, width, last):
    """Values of position `place` of a block, bfloat16[width], beside those of the position it is paired with.

    An even `last` position has no partner yet: a zero, for what stood there before may be no number.
    """
    out += place // 2 * width * 4
    if place & 1 == 0 and last:
        for i in range(width):
            store_u32(out + 4 * i, load_u16(source + 2 * i))
        return
    out += place % 2 * 2
    for i in range(width):
        store_u16(out + 4 * i, load_u16(source + 2 * i))


@routine("void(int64, int64, int64, int64, int64, int64, int64)")
def turn_heads(step, row, gain, m, count, source, stride):
    """Norm, where there is a `gain`, and rope of a q or k head in rows m to m + count - 1."""
    head_dim, rotary_dim = word(row, at.HEAD_DIM), word(row, at.ROTARY_DIM)
    if gain != 0:
        width, epsilon, gain = (head_dim + 15) & ~15, word(row, at.EPSILON), address(step, gain)
        norm_row = kernel_at(step, at.NORM_ROW)
        for i in range(count):
            x = source + i * stride
            call(norm_row, (ACT_F32, x, gain, x, width, head_dim, epsilon))
    rotate, table = kernel_at(step, at.ROTATE), address(step, word(row, at.ROPE_TABLE))
    positions = word(step, at.POSITIONS) + 8 * m
    for i in range(count):
        place = table + load_i64(positions + 8 * i) * rotary_dim * 4
        call(rotate, (source + i * stride, place, rotary_dim))


@routine("int64(int64, int64, int64, int64)")
def state_of(step, row, m, position):
    """Where this layer's keys and values of the block of row m's `position` begin."""
    state = load_i64(word(step, at.SLOT_TABLE) + 8 * load_i64(word(step, at.SLOTS) + 8 * m))
    return state + position // BLOCK * word(step, at.STATE_BLOCK) + word(row, at.STATE_OFFSET)


@routine("void(int64, int64, int64, int64, int64, int64, int64)")
def place_queries(step, row, head, m, count, source, stride):
    """Scaled, and the heads of a row that share keys beside each other."""
    act, width, scale = word(step, at.ACT), (word(row, at.HEAD_DIM) + 15) >> 4, word(row, at.SCALE)
    group = word(row, at.Q_HEADS) // word(row, at.KV_HEADS)
    kv_head, out_stride = head // group, word(row, at.TARGET_STRIDE)
    vectors = (kv_head * word(step, at.MAX_ROWS) + m) * group + head - kv_head * group
    out = address(step, word(row, at.TARGET)) + vectors * out_stride
    for i in range(count):
        scale_into(act, source + i * stride, scale, out + i * group * out_stride, width)


@routine("void(int64, int64, int64, int64, int64, int64, int64)")
def place_keys(step, row, kv_head, m, count, source, stride):
    act, head_dim = word(step, at.ACT), word(row, at.HEAD_DIM)
    size, positions = act_bytes(act), word(step, at.POSITIONS)
    for i in range(count):
        x, position = source + i * stride, load_i64(positions + 8 * (m + i))
        place = position % BLOCK
        out = state_of(step, row, m + i, position) + kv_head * BLOCK * head_dim * size
        out += place // PANEL * (PANEL * size) * head_dim + place % PANEL * 4
        scale_into(act, x, ONE_BITS, x, (head_dim + 15) >> 4)
        for k in range(head_dim * size >> 2):
            store_u32(out + k * PANEL * 4, load_u32(x + 4 * k))


@routine("void(int64, int64, int64, int64, int64, int64, int64)")
def place_values(step, row, kv_head, m, count, source, stride):
    act, head_dim = word(step, at.ACT), word(row, at.HEAD_DIM)
    width, positions = (head_dim + PANEL - 1) // PANEL * PANEL, word(step, at.POSITIONS)
    before = (word(row, at.KV_HEADS) * head_dim + kv_head * width) * BLOCK * act_bytes(act)
    for i in range(count):
        x, position = source + i * stride, load_i64(positions + 8 * (m + i))
        out, place = state_of(step, row, m + i, position) + before, position % BLOCK
        if act == ACT_BF16:
            scale_into(act, x, ONE_BITS, x, width >> 4)
            place_pairs(x, out, place, width, ends_sequence(step, m + i))
        else:
            scale_into(act, x, ONE_BITS, out + place * width * 4, width >> 4)


@routine("void(int64, int64, int64, int64, int64, int64, int64)")
def place_heads(step, row, head, m, count, source, stride):
    """Send a finished q, k or v head of rows m to m + count - 1 where attention reads it.

    source: float32[count][panels of the head], `stride` bytes apart.
    """
    q_heads, kv_heads = word(row, at.Q_HEADS), word(row, at.KV_HEADS)
    if head < q_heads:
        turn_heads(step, row, word(row, at.Q_GAIN), m, count, source, stride)
        place_queries(step, row, head, m, count, source, stride)
    elif head < q_heads + kv_heads:
        turn_heads(step, row, word(row, at.K_GAIN), m, count, source, stride)
        place_keys(step, row, head - q_heads, m, count, source, stride)
    else:
        place_values(step, row, head - q_heads - kv_heads, m, count, source, stride)


@routine("int64(int64, int64)")
def head_items(step, row):
    return word(row, at.ITEMS) * row_blocks(row_count(step, row))


@routine("void(int64, int64, int64, int64, int64)")
def head_run(step, thread, row, first, end):
    """Items first..end-1: whole heads of q, k or v for a part of the rows, so that rope finds both halves."""
    heads, rows = word(row, at.ITEMS), row_count(step, row)
    panels = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL
    head_bytes = panels * TILE_ROW
    tile, columns = tile_kernel(step, word(row, at.FORMAT)), word(row, at.COLUMNS)
    step_bytes, panel_bytes = word(row, at.STEP_BYTES), word(row, at.PANEL_BYTES)
    weight = address(step, word(row, at.WEIGHT))
    bias = address(step, word(row, at.BIAS)) if word(row, at.BIAS) != 0 else 0
    x, x_stride = source_of(step, thread, row, rows), word(row, at.SOURCE_STRIDE)
    scratch = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    for item in range(first, end):
        part = 0 if item < heads else item // heads
        head, m = item - part * heads, part * ROW_BLOCK
        last = min(rows, m + ROW_BLOCK)
        while m < last:
            count = min(TILE_ROWS, last - m)
            for slice_ in range(panels):
                panel = head * panels + slice_
                w, out = weight + panel * panel_bytes, scratch + slice_ * TILE_ROW
                call(tile, (count, w, step_bytes, x + m * x_stride, x_stride, columns, out, head_bytes))
                if bias != 0:
                    add_bias(out, head_bytes, count, bias + panel * TILE_ROW)
            place_heads(step, row, head, m, count, scratch, head_bytes)
            m += count


@routine("void(int64, int64, int64, int64, int64, int64)")
def finish_row(step, row, m, kv_head, partials, spare):
    """Write the group's finished heads of row m, gated if need be, into the attended row.

    `spare`: a head of scratch.
    """
    head_dim = word(row, at.HEAD_DIM)
    group = word(row, at.Q_HEADS) // word(row, at.KV_HEADS)
    value_width = (head_dim + PANEL - 1) // PANEL * PANEL
    act = word(step, at.ACT)
    size = act_bytes(act)
    kernel = kernel_at(step, at.FINISH_HEAD)
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    gates = 0
    if word(row, at.GATE) != 0:
        gates = address(step, word(row, at.GATE)) + m * word(row, at.GATE_STRIDE)
    for i in range(group):
        head = kv_head * group + i
        target = out + head * head_dim * size
        gate = gates + head * head_dim * 4 if gates != 0 else 0
        source = partials + i * partial_bytes(value_width)
        if head_dim & 15 == 0:
            call(kernel, (act, source, value_width, gate, target, head_dim >> 4))
        else:
            # A whole vector would reach into the next head, which another thread may be writing.
            call(kernel, (act, source, value_width, gate, spare, (head_dim + 15) >> 4))
            for unit in range(head_dim * size // 2):
                store_u16(target + 2 * unit, load_u16(spare + 2 * unit))


@routine("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def attend(step, row, m, kv_head, block, count, first, scores, out):
    """Partials of `count` rows from row m (position `first`) over one block."""
    q_heads, kv_heads, head_dim = word(row, at.Q_HEADS), word(row, at.KV_HEADS), word(row, at.HEAD_DIM)
    group = q_heads // kv_heads
    value_width = (head_dim + PANEL - 1) // PANEL * PANEL
    state = state_of(step, row, m, block * BLOCK)
    act = word(step, at.ACT)
    size = act_bytes(act)
    keys = state + kv_head * BLOCK * head_dim * size
    values = state + (kv_heads * head_dim + kv_head * value_width) * BLOCK * size
    stride = word(row, at.SOURCE_STRIDE)
    queries = address(step, word(row, at.SOURCE)) + (kv_head * word(step, at.MAX_ROWS) + m) * group * stride
    call(
        kernel_at(step, at.ATTEND_BLOCK),
        (
            act,
            kernel_at(step, at.TILE_DOT if act == ACT_BF16 else at.TILE_F32),
            kernel_at(step, at.TILE_DOT_WIDE if act == ACT_BF16 else at.TILE_F32_WIDE),
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
            word(row, at.WINDOW),
            scores,
            out,
        ),
    )


@routine("int64(int64, int64)")
def first_block(row, position):
    """The first block that the row at a position sees."""
    window = word(row, at.WINDOW)
    return max(0, position - window + 1) // BLOCK if window > 0 else 0


@routine("int64(int64, int64)")
def attention_items(step, row):
    """Few rows: a block, a row and a key/value head. Many rows: a run of rows and a key/value head."""
    blocks = word(step, at.BLOCKS) if word(step, at.SPLIT) == 1 else 1
    return blocks * word(step, at.RUNS) * word(row, at.KV_HEADS)


@routine("void(int64, int64, int64, int64)")
def attend_one_block(step, thread, row, item):
    """One block of one row; the last of a row to finish merges them in order."""
    kv_heads = word(row, at.KV_HEADS)
    group = word(row, at.Q_HEADS) // kv_heads
    value_width = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL * PANEL
    size = group * partial_bytes(value_width)
    lines = word(step, at.RUNS) * kv_heads
    block, line = item // lines, item % lines
    kv_head, m = line % kv_heads, load_i64(word(step, at.RUN_ROWS) + 8 * (line // kv_heads))
    position = load_i64(word(step, at.POSITIONS) + 8 * m)
    begin, end = first_block(row, position), position // BLOCK + 1
    if not begin <= block < end:
        return
    scores = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    partials = word(step, at.PARTS) + line * word(step, at.BLOCKS) * size
    attend(step, row, m, kv_head, block, 1, position, scores, partials + block * size)
    counter = word(step, at.PART_COUNTS) + 8 * line
    if atomic_add(counter, 1) == end - begin - 1:
        atomic_store(counter, 0)
        merged = partials + begin * size
        for other in range(1, end - begin):
            merge = (merged, merged + other * size, value_width, partial_bytes(value_width), group)
            call(kernel_at(step, at.MERGE_PARTIALS), merge)
        finish_row(step, row, m, kv_head, merged, scores)


@routine("void(int64, int64, int64, int64)")
def attend_run(step, thread, row, item):
    """One run of rows over all its blocks."""
    runs = word(step, at.RUNS)
    group = word(row, at.Q_HEADS) // word(row, at.KV_HEADS)
    value_width = (word(row, at.HEAD_DIM) + PANEL - 1) // PANEL * PANEL
    stride = partial_bytes(value_width)
    scores = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    vectors = max(RUN_QUERIES, group)
    fresh = scores + vectors * BLOCK * 4
    merged = fresh + vectors * stride
    # Head by head, whose keys and values stay in the cache; the longest runs, at a prompt's end, go first.
    kv_head, run = item // runs, runs - 1 - item % runs
    m = load_i64(word(step, at.RUN_ROWS) + 8 * run)
    count = load_i64(word(step, at.RUN_LENGTHS) + 8 * run)
    first = load_i64(word(step, at.POSITIONS) + 8 * m)
    begin, window = first_block(row, first), word(row, at.WINDOW)
    attend(step, row, m, kv_head, begin, count, first, scores, merged)
    for block in range(begin + 1, (first + count - 1) // BLOCK + 1):
        attend(step, row, m, kv_head, block, count, first, scores, fresh)
        # Rows before the block, at the start of a run, have no part in it; for those at its end it
        # may be the first block in their window.
        skipped = max(0, block * BLOCK - first)
        fresh_from = count
        if window > 0:
            fresh_from = max(skipped, min(count, block * BLOCK + window - 1 - first))
        near, far = merged + skipped * group * stride, fresh + skipped * group * stride
        if fresh_from > skipped:
            merge = (near, far, value_width, stride, (fresh_from - skipped) * group)
            call(kernel_at(step, at.MERGE_PARTIALS), merge)
        if count > fresh_from:
            skip = fresh_from * group * stride
            copy_row(fresh + skip, merged + skip, (count - fresh_from) * group * stride)
    for i in range(count):
        finish_row(step, row, m + i, kv_head, merged + i * group * stride, scores)


@routine("void(int64, int64, int64, int64)")
def attention_item(step, thread, row, item):
    if word(step, at.SPLIT) == 1:
        attend_one_block(step, thread, row, item)
    else:
        attend_run(step, thread, row, item)
