"""Embedding, norms, matrix products and gathers, cut into items."""

from caldrix_kernels.embed.numba_cpu import embed_panelled, embed_row_major
from caldrix_kernels.intrinsics.jit import call, routine
from caldrix_kernels.intrinsics.memory import load_f32, load_i64, load_u32, store_f32, store_u32
from caldrix_kernels.linear.numba_cpu import add_bias, add_tile, copy_tile
from caldrix_kernels.schedule.numba_cpu import (
    MAX_CLAIM,
    address,
    claim,
    claim_size,
    finish,
    kernel_at,
    wait_finished,
    word,
)
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import (
    ACT_BF16,
    ADD,
    PANEL,
    ROW_BLOCK,
    SILU_MUL,
    SMALL_ROWS,
    TILE_ROWS,
)

ONE_BY_ONE = 1 << 30
TILE_ROW = PANEL * 4


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
            embed_panelled(form, table, word(row, at.PANEL_BYTES), token, word(row, at.TRUE_WIDTH), out)
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


@routine("int64(int64, int64)")
def places_of(step, row):
    """How many rows the buffers of a row's experts have."""
    return word(step, at.MAX_ROWS) * word(row, at.TOP_K)


@routine("int64(int64, int64, int64, int64)")
def group_at(step, row, routes, number):
    """Address of a group of the route tables: expert, first place, places."""
    return routes + 8 * (at.ROUTE_TABLES + 4 * places_of(step, row) + 3 * number)


@routine("int64(int64, int64)")
def most_groups(row, rows):
    """A bound for the groups of that many rows.

    Items are counted without the route tables, in which a thread that comes late finds a later layer.
    """
    places = rows * word(row, at.TOP_K)
    return min(word(row, at.EXPERTS), places) + places // ROW_BLOCK


@routine("int64(int64, int64, int64, int64)")
def linear_stage(step, thread, base, row):
    rows = row_count(step, row)
    if rows == 0:
        return base
    panels = word(row, at.ITEMS)
    routes = address(step, word(row, at.ROUTES)) if word(row, at.EXPERTS) != 0 else 0
    groups = most_groups(row, rows) if routes != 0 else row_blocks(rows)
    end = base + panels * groups
    act, columns = word(step, at.ACT), word(row, at.COLUMNS)
    tile, silu_mul = tile_kernel(step, word(row, at.FORMAT)), kernel_at(step, at.SILU_MUL_TILE)
    step_bytes, panel_bytes = word(row, at.STEP_BYTES), word(row, at.PANEL_BYTES)
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
            w = weight + panel * panel_bytes
            if routes != 0:
                if part >= load_i64(routes + 8 * at.GROUPS):
                    continue
                group = group_at(step, row, routes, part)
                w += load_i64(group) * panels * panel_bytes
                m = load_i64(group + 8)
                last = m + load_i64(group + 16)
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
