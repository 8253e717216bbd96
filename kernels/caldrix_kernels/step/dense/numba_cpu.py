"""Items of the stages of every decoder: embedding, norms, matrix products, gathers and the highest logit."""

from caldrix_kernels.embed.numba_cpu import embed_panelled, embed_row_major
from caldrix_kernels.intrinsics.jit import call, routine
from caldrix_kernels.intrinsics.memory import load_f32, load_i64, load_u32, store_f32, store_u32
from caldrix_kernels.linear.numba_cpu import act_bytes, add_bias, add_tile, copy_tile
from caldrix_kernels.schedule.numba_cpu import address, kernel_at, word
from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import ACT_BF16, ADD, PANEL, ROW_BLOCK, SILU_MUL, SMALL_ROWS, TILE_ROWS

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
    """Address of a linear's input. Few rows were normed by each thread for itself, see `norm_alone`."""
    index = word(row, at.SOURCE)
    if index == at.NORMED:
        if rows <= SMALL_ROWS:
            return word(step, at.PRIVATE) + thread * word(step, at.PRIVATE_BYTES)
        return address(step, at.NORMED)
    return address(step, index)


@routine("void(int64, int64, int64)")
def embed_item(step, row, m):
    form, table = word(row, at.FORMAT), address(step, word(row, at.WEIGHT))
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


@routine("void(int64, int64, int64)")
def copy_row(source, target, size):
    """Copy a row of that many bytes, whatever form it is in."""
    for unit in range(0, size, 4):
        store_u32(target + unit, load_u32(source + unit))


@routine("void(int64, int64, int64)")
def gather_item(step, row, number):
    """Copy a wanted row to the front of another buffer."""
    m = load_i64(word(step, at.WANTED_ROWS) + 8 * number)
    stride = word(row, at.SOURCE_STRIDE)
    source, target = address(step, word(row, at.SOURCE)), address(step, word(row, at.TARGET))
    copy_row(source + m * stride, target + number * stride, stride)


@routine("void(int64, int64, int64)")
def argmax_item(step, row, m):
    x = address(step, word(row, at.SOURCE)) + m * word(row, at.SOURCE_STRIDE)
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    call(kernel_at(step, at.ARGMAX_ROW), (x, word(row, at.TRUE_WIDTH), out))


@routine("void(int64, int64, int64, int64)")
def norm_item(step, row, m, target):
    x = address(step, word(row, at.SOURCE)) + m * word(row, at.SOURCE_STRIDE)
    gain, out = address(step, word(row, at.WEIGHT)), target + m * word(row, at.TARGET_STRIDE)
    width, true_width = word(row, at.COLUMNS), word(row, at.TRUE_WIDTH)
    kernel = kernel_at(step, at.NORM_ROW)
    call(kernel, (word(step, at.ACT), x, gain, out, width, true_width, word(row, at.EPSILON)))


@routine("void(int64, int64, int64)")
def norm_alone(step, thread, row):
    """Few rows: every thread norms all of them into memory of its own, which is cheaper than a barrier."""
    for m in range(row_count(step, row)):
        norm_item(step, row, m, word(step, at.PRIVATE) + thread * word(step, at.PRIVATE_BYTES))


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


@routine("int64(int64, int64)")
def linear_items(step, row):
    """A panel and a part of the rows, or of the rows of an expert."""
    rows = row_count(step, row)
    parts = most_groups(row, rows) if word(row, at.EXPERTS) != 0 else row_blocks(rows)
    return word(row, at.ITEMS) * parts


@routine("void(int64, int64, int64, int64, int64)")
def linear_run(step, thread, row, first, end):
    """Items first..end-1, so that what they share is looked up once."""
    panels, rows, routes = word(row, at.ITEMS), row_count(step, row), 0
    if word(row, at.EXPERTS) != 0:
        routes = address(step, word(row, at.ROUTES))
    panel_bytes, columns = word(row, at.PANEL_BYTES), word(row, at.COLUMNS)
    weight = address(step, word(row, at.WEIGHT))
    bias = address(step, word(row, at.BIAS)) if word(row, at.BIAS) != 0 else 0
    act, epilogue = word(step, at.ACT), word(row, at.EPILOGUE)
    tile, silu_mul = tile_kernel(step, word(row, at.FORMAT)), kernel_at(step, at.SILU_MUL_TILE)
    x, x_stride = source_of(step, thread, row, rows), word(row, at.SOURCE_STRIDE)
    step_bytes, column_bytes = word(row, at.STEP_BYTES), TILE_ROW
    if epilogue == SILU_MUL:
        column_bytes = PANEL // 2 * act_bytes(act)
    target, stride = address(step, word(row, at.TARGET)), word(row, at.TARGET_STRIDE)
    scratch = word(step, at.SCRATCH) + thread * word(step, at.SCRATCH_BYTES)
    for item in range(first, end):
        part = 0 if item < panels else item // panels
        panel, m = item - part * panels, part * ROW_BLOCK
        last = min(rows, m + ROW_BLOCK)
        w = weight + panel * panel_bytes
        if routes != 0:
            if part >= load_i64(routes + 8 * at.GROUPS):
                continue
            group = group_at(step, row, routes, part)
            w += load_i64(group) * panels * panel_bytes
            m = load_i64(group + 8)
            last = m + load_i64(group + 16)
        out = target + panel * column_bytes
        while m < last:
            count = min(TILE_ROWS, last - m)
            call(tile, (count, w, step_bytes, x + m * x_stride, x_stride, columns, scratch, TILE_ROW))
            if bias != 0:
                add_bias(scratch, TILE_ROW, count, bias + panel * TILE_ROW)
            if epilogue == ADD:
                add_tile(scratch, TILE_ROW, out + m * stride, stride, count)
            elif epilogue == SILU_MUL:
                call(silu_mul, (act, scratch, TILE_ROW, out + m * stride, stride, count))
            else:
                copy_tile(scratch, TILE_ROW, out + m * stride, stride, count)
            m += count
