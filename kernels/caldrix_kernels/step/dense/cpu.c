// Embedding, norms, matrix products and gathers, cut into items.
#include "stages.h"

int64_t embed_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_ROWS), width = word(row, AT_TRUE_WIDTH), item;
    int64_t form = word(row, AT_FORMAT), table = address_at(step, word(row, AT_WEIGHT));
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t m = item - base, given = entry(step, AT_EMBEDDINGS, m), token = entry(step, AT_TOKENS, m);
        int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
        if (given != 0)
            memcpy((void *)out, (const void *)given, 4 * (size_t)width);
        else if (word(row, AT_PANELLED) == 1)
            embed_panelled(form, table, word(row, AT_PANEL_BYTES), token, width, out);
        else
            embed_row_major(form, table, word(row, AT_ROW_BYTES), token, width, out);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

// Copy the wanted rows, whatever form they are in, to the front of another buffer.
int64_t gather_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_WANTED), stride = word(row, AT_SOURCE_STRIDE), item;
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t m = entry(step, AT_WANTED_ROWS, item - base);
        int64_t source = address_at(step, word(row, AT_SOURCE)) + m * stride;
        int64_t target = address_at(step, word(row, AT_TARGET)) + (item - base) * stride;
        memcpy((void *)target, (const void *)source, (size_t)stride);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

static void norm_one(int64_t step, int64_t row, int64_t m, int64_t out)
{
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
    int64_t gain = address_at(step, word(row, AT_WEIGHT));
    kernel_7 norm = (kernel_7)kernel_at(step, AT_NORM_ROW);
    norm(
        word(step, AT_ACT), x, gain, out, word(row, AT_COLUMNS), word(row, AT_TRUE_WIDTH), word(row, AT_EPSILON));
}

// Few rows: every thread norms all of them into memory of its own, which is cheaper than a barrier.
int64_t norm_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t rows = row_count(step, row), stride = word(row, AT_TARGET_STRIDE);
    if (rows <= AT_SMALL_ROWS) {
        int64_t own = word(step, AT_PRIVATE) + thread * word(step, AT_PRIVATE_BYTES);
        for (int64_t m = 0; m < rows; m++) norm_one(step, row, m, own + m * stride);
        return base;
    }
    int64_t end = base + rows, shared = address_at(step, AT_NORMED), item;
    while ((item = claim(step, base, end, MAX_CLAIM, ONE_BY_ONE)) >= 0) {
        int64_t size = claim_size(item, end, MAX_CLAIM, ONE_BY_ONE);
        for (int64_t m = item - base; m < item - base + size; m++) norm_one(step, row, m, shared + m * stride);
        finish(step, end, size);
    }
    wait_finished(step, end);
    return end;
}

// A bound for the groups of that many rows.
//
// Items are counted without the route tables, in which a thread that comes late finds a later layer.
static int64_t most_groups(int64_t row, int64_t rows)
{
    int64_t places = rows * word(row, AT_TOP_K);
    return smaller(word(row, AT_EXPERTS), places) + places / AT_ROW_BLOCK;
}

// Where a linear's products go.
typedef struct {
    int64_t act, epilogue, target, stride, column_bytes;
    kernel_6 silu_mul;
} sink;

static sink sink_of(int64_t step, int64_t row)
{
    int64_t epilogue = word(row, AT_EPILOGUE), act = word(step, AT_ACT), column_bytes = AT_PANEL * 4;
    if (epilogue == AT_SILU_MUL) column_bytes = AT_PANEL / 2 * (act == AT_ACT_BF16 ? 2 : 4);
    return (sink){
        .act = act,
        .epilogue = epilogue,
        .target = address_at(step, word(row, AT_TARGET)),
        .stride = word(row, AT_TARGET_STRIDE),
        .column_bytes = column_bytes,
        .silu_mul = (kernel_6)kernel_at(step, AT_SILU_MUL_TILE),
    };
}

static void put(const sink *to, int64_t panel, int64_t m, int64_t count, int64_t scratch)
{
    int64_t out = to->target + m * to->stride + panel * to->column_bytes;
    if (to->epilogue == AT_ADD)
        add_tile(scratch, TILE_ROW, out, to->stride, count);
    else if (to->epilogue == AT_SILU_MUL)
        to->silu_mul(to->act, scratch, TILE_ROW, out, to->stride, count);
    else
        copy_tile(scratch, TILE_ROW, out, to->stride, count);
}

int64_t linear_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t rows = row_count(step, row), item;
    if (rows == 0) return base;
    int64_t panels = word(row, AT_ITEMS);
    int64_t routes = word(row, AT_EXPERTS) != 0 ? address_at(step, word(row, AT_ROUTES)) : 0;
    int64_t end = base + panels * (routes != 0 ? most_groups(row, rows) : row_blocks(rows));
    matrix by = matrix_of(step, thread, row, rows);
    sink to = sink_of(step, row);
    int64_t share = share_of(step, rows), scratch = scratch_of(step, thread);
    while ((item = claim(step, base, end, 1, share)) >= 0) {
        int64_t size = claim_size(item, end, 1, share);
        for (int64_t unit = item - base; unit < item - base + size; unit++) {
            int64_t part = unit / panels, panel = unit % panels, m = part * AT_ROW_BLOCK;
            int64_t last = smaller(rows, m + AT_ROW_BLOCK), w = by.weight + panel * by.panel_bytes;
            if (routes != 0) {
                if (part >= word(routes, AT_GROUPS)) continue;
                int64_t group = group_at(step, row, routes, part);
                w += word(group, 0) * panels * by.panel_bytes;
                m = word(group, 1);
                last = m + word(group, 2);
            }
            for (; m < last; m += AT_TILE_ROWS) {
                int64_t count = smaller(AT_TILE_ROWS, last - m);
                multiply(&by, w, panel, m, count, scratch, TILE_ROW);
                put(&to, panel, m, count, scratch);
            }
        }
        finish(step, end, size);
    }
    wait_finished(step, end);
    return end;
}
