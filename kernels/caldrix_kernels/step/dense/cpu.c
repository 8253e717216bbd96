// Items of embedding, norms, matrix products, gathers and the highest logit.
#include "stages.h"

void embed_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    int64_t form = word(row, AT_FORMAT), table = address_at(step, word(row, AT_WEIGHT));
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    int64_t given = entry(step, AT_EMBEDDINGS, m), token = entry(step, AT_TOKENS, m);
    int64_t width = word(row, AT_TRUE_WIDTH);
    if (given != 0)
        memcpy((void *)out, (const void *)given, 4 * (size_t)width);
    else if (word(row, AT_PANELLED) == 1)
        embed_panelled(form, table, word(row, AT_PANEL_BYTES), token, width, out);
    else
        embed_row_major(form, table, word(row, AT_ROW_BYTES), token, width, out);
}

// Copy a wanted row, whatever form it is in, to the front of another buffer.
void gather_item(int64_t step, int64_t thread, int64_t row, int64_t number)
{
    (void)thread;
    int64_t m = entry(step, AT_WANTED_ROWS, number), stride = word(row, AT_SOURCE_STRIDE);
    int64_t source = address_at(step, word(row, AT_SOURCE)) + m * stride;
    int64_t target = address_at(step, word(row, AT_TARGET)) + number * stride;
    memcpy((void *)target, (const void *)source, (size_t)stride);
}

void argmax_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    ((kernel_3)kernel_at(step, AT_ARGMAX_ROW))(x, word(row, AT_TRUE_WIDTH), out);
}

static void norm_into(int64_t step, int64_t row, int64_t m, int64_t target)
{
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
    int64_t gain = address_at(step, word(row, AT_WEIGHT)), out = target + m * word(row, AT_TARGET_STRIDE);
    kernel_7 norm = (kernel_7)kernel_at(step, AT_NORM_ROW);
    int64_t width = word(row, AT_COLUMNS), true_width = word(row, AT_TRUE_WIDTH);
    norm(word(step, AT_ACT), x, gain, out, width, true_width, word(row, AT_EPSILON));
}

void norm_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    norm_into(step, row, m, address_at(step, AT_NORMED));
}

void norm_alone(int64_t step, int64_t thread, int64_t row)
{
    int64_t own = word(step, AT_PRIVATE) + thread * word(step, AT_PRIVATE_BYTES);
    for (int64_t m = 0; m < row_count(step, row); m++) norm_into(step, row, m, own);
}

// A bound for the groups of that many rows.
//
// Items are counted without the route tables, in which a thread that comes late finds a later layer.
static int64_t most_groups(int64_t row, int64_t rows)
{
    int64_t places = rows * word(row, AT_TOP_K);
    return smaller(word(row, AT_EXPERTS), places) + places / AT_ROW_BLOCK;
}

// A panel and a part of the rows, or of the rows of an expert.
int64_t linear_items(int64_t step, int64_t row)
{
    int64_t rows = row_count(step, row);
    return word(row, AT_ITEMS) * (word(row, AT_EXPERTS) != 0 ? most_groups(row, rows) : row_blocks(rows));
}

// Send `count` rows of a finished tile, from row m on, to where the stage leaves panel `panel`.
static void put(int64_t step, int64_t row, int64_t panel, int64_t m, int64_t count, int64_t tile)
{
    int64_t act = word(step, AT_ACT), epilogue = word(row, AT_EPILOGUE), stride = word(row, AT_TARGET_STRIDE);
    int64_t column_bytes = TILE_ROW;
    if (epilogue == AT_SILU_MUL) column_bytes = AT_PANEL / 2 * act_bytes(act);
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * stride + panel * column_bytes;
    if (epilogue == AT_ADD)
        add_tile(tile, TILE_ROW, out, stride, count);
    else if (epilogue == AT_SILU_MUL)
        ((kernel_6)kernel_at(step, AT_SILU_MUL_TILE))(act, tile, TILE_ROW, out, stride, count);
    else
        copy_tile(tile, TILE_ROW, out, stride, count);
}

void linear_item(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    int64_t panels = word(row, AT_ITEMS), part = item / panels, panel = item % panels;
    int64_t m = part * AT_ROW_BLOCK, last = smaller(row_count(step, row), m + AT_ROW_BLOCK);
    matrix by = matrix_of(step, thread, row);
    int64_t w = by.weight + panel * by.panel_bytes, scratch = scratch_of(step, thread);
    if (word(row, AT_EXPERTS) != 0) {
        int64_t routes = address_at(step, word(row, AT_ROUTES));
        if (part >= word(routes, AT_GROUPS)) return;
        int64_t group = group_at(step, row, routes, part);
        w += word(group, 0) * panels * by.panel_bytes;
        m = word(group, 1);
        last = m + word(group, 2);
    }
    for (; m < last; m += AT_TILE_ROWS) {
        int64_t count = smaller(AT_TILE_ROWS, last - m);
        multiply(&by, w, panel, m, count, scratch, TILE_ROW);
        put(step, row, panel, m, count, scratch);
    }
}
