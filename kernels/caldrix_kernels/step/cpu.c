// The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages.
// It follows step/numba_cpu.py function by function.
#include "kernels.h"

enum { ONE_BY_ONE = 1 << 30, TILE_ROW = AT_PANEL * 4, ONE_BITS = 0x3F800000 };

// The tile for a stored format and the way activations are stored in this step.
static kernel_8 tile_kernel(int64_t step, int64_t form)
{
    int dot = form == AT_BF16 && word(step, AT_ACT) == AT_ACT_BF16;
    return (kernel_8)kernel_at(step, dot ? AT_TILE_DOT : form);
}

static int64_t row_count(int64_t step, int64_t row)
{
    return word(row, AT_DOMAIN) == 1 ? word(step, AT_WANTED) : word(step, AT_ROWS);
}

static int64_t scratch_of(int64_t step, int64_t thread)
{
    return word(step, AT_SCRATCH) + thread * word(step, AT_SCRATCH_BYTES);
}

// Address of a linear's input. Few rows were normed by each thread for itself, see `norm_stage`.
static int64_t source_of(int64_t step, int64_t thread, int64_t row, int64_t rows)
{
    int64_t index = word(row, AT_SOURCE);
    if (index == AT_NORMED && rows <= AT_SMALL_ROWS)
        return word(step, AT_PRIVATE) + thread * word(step, AT_PRIVATE_BYTES);
    return address_at(step, index);
}

static int64_t embed_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_ROWS), item;
    int64_t columns = word(row, AT_COLUMNS), width = word(row, AT_TRUE_WIDTH);
    int64_t form = word(row, AT_FORMAT), table = address_at(step, word(row, AT_WEIGHT));
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t m = item - base;
        int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
        int64_t given = load_i64(word(step, AT_EMBEDDINGS) + 8 * m);
        int64_t token = load_i64(word(step, AT_TOKENS) + 8 * m);
        if (given != 0)
            memcpy((void *)out, (const void *)given, 4 * (size_t)width);
        else if (word(row, AT_PANELLED) == 1)
            embed_panelled(form, table, columns, token, width, out);
        else
            embed_row_major(form, table, word(row, AT_ROW_BYTES), token, width, out);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

// Copy the wanted rows, whatever form they are in, to the front of another buffer.
static int64_t gather_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_WANTED), stride = word(row, AT_SOURCE_STRIDE), item;
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t m = load_i64(word(step, AT_WANTED_ROWS) + 8 * (item - base));
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
static int64_t norm_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
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

// Few rows: claims shrink from a 1/(2 threads) part of the rest; many rows: one panel is work enough.
static int64_t share_of(int64_t step, int64_t rows)
{
    return rows <= AT_SMALL_ROWS ? 2 * word(step, AT_THREADS) : ONE_BY_ONE;
}

// Parts that a stage's rows are cut into. Neighbouring items share one, which stays in the cache.
static int64_t row_blocks(int64_t rows) { return (rows + AT_ROW_BLOCK - 1) / AT_ROW_BLOCK; }

// A packed matrix and the rows that meet it, as a row of the program and the step say.
typedef struct {
    kernel_8 tile;
    int64_t form, columns, step_bytes, weight, bias, x, x_stride;
} matrix;

static matrix matrix_of(int64_t step, int64_t thread, int64_t row, int64_t rows)
{
    int64_t form = word(row, AT_FORMAT), bias = word(row, AT_BIAS);
    return (matrix){
        .tile = tile_kernel(step, form),
        .form = form,
        .columns = word(row, AT_COLUMNS),
        .step_bytes = form == AT_F16 ? 64 : 128,
        .weight = address_at(step, word(row, AT_WEIGHT)),
        .bias = bias != 0 ? address_at(step, bias) : 0,
        .x = source_of(step, thread, row, rows),
        .x_stride = word(row, AT_SOURCE_STRIDE),
    };
}

// `count` rows from row m on times a panel, with its bias.
static void multiply(const matrix *by, int64_t panel, int64_t m, int64_t count, int64_t out, int64_t out_stride)
{
    int64_t w = by->weight + panel * panel_bytes(by->form, by->columns);
    int64_t x = by->x + m * by->x_stride;
    by->tile(count, w, by->step_bytes, x, by->x_stride, by->columns, out, out_stride);
    if (by->bias != 0) add_bias(out, out_stride, count, by->bias + panel * AT_PANEL * 4);
}

static void linear_epilogue(
    int64_t step, int64_t epilogue, int64_t scratch, int64_t out, int64_t stride, int64_t count)
{
    if (epilogue == AT_ADD)
        add_tile(scratch, TILE_ROW, out, stride, count);
    else if (epilogue == AT_SILU_MUL)
        ((kernel_6)kernel_at(step, AT_SILU_MUL_TILE))(
            word(step, AT_ACT), scratch, TILE_ROW, out, stride, count);
    else
        copy_tile(scratch, TILE_ROW, out, stride, count);
}

static int64_t linear_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t rows = row_count(step, row), item;
    if (rows == 0) return base;
    int64_t panels = word(row, AT_ITEMS), end = base + panels * row_blocks(rows);
    matrix by = matrix_of(step, thread, row, rows);
    int64_t target = address_at(step, word(row, AT_TARGET)), stride = word(row, AT_TARGET_STRIDE);
    int64_t epilogue = word(row, AT_EPILOGUE), share = share_of(step, rows), scratch = scratch_of(step, thread);
    int64_t column_bytes = AT_PANEL * 4;
    if (epilogue == AT_SILU_MUL) column_bytes = AT_PANEL / 2 * (word(step, AT_ACT) == AT_ACT_BF16 ? 2 : 4);
    while ((item = claim(step, base, end, 1, share)) >= 0) {
        int64_t size = claim_size(item, end, 1, share);
        for (int64_t unit = item - base; unit < item - base + size; unit++) {
            int64_t part = unit / panels, panel = unit % panels;
            int64_t last = smaller(rows, (part + 1) * AT_ROW_BLOCK);
            for (int64_t m = part * AT_ROW_BLOCK; m < last; m += AT_TILE_ROWS) {
                int64_t count = smaller(AT_TILE_ROWS, last - m);
                multiply(&by, panel, m, count, scratch, TILE_ROW);
                int64_t out = target + m * stride + panel * column_bytes;
                linear_epilogue(step, epilogue, scratch, out, stride, count);
            }
        }
        finish(step, end, size);
    }
    wait_finished(step, end);
    return end;
}

// Send row m of a finished q, k or v head where attention reads it: q roped and scaled, k roped.
static void place_head(int64_t step, int64_t row, int64_t head, int64_t m, int64_t source)
{
    int64_t q_heads = word(row, AT_Q_HEADS), kv_heads = word(row, AT_KV_HEADS);
    int64_t head_dim = word(row, AT_HEAD_DIM), rotary_dim = word(row, AT_ROTARY_DIM);
    int64_t position = load_i64(word(step, AT_POSITIONS) + 8 * m);
    int64_t value_width = round_up(head_dim, AT_PANEL);
    if (head < q_heads + kv_heads) {
        int64_t table = address_at(step, word(row, AT_ROPE_TABLE)) + position * rotary_dim * 4;
        ((kernel_3)kernel_at(step, AT_ROTATE))(source, table, rotary_dim);
    }
    if (head < q_heads) {
        int64_t group = q_heads / kv_heads;
        int64_t vectors = ((head / group) * word(step, AT_MAX_ROWS) + m) * group + head % group;
        int64_t out = address_at(step, word(row, AT_TARGET)) + vectors * word(row, AT_TARGET_STRIDE);
        scale_into(source, word(row, AT_SCALE), out, (head_dim + 15) >> 4);
        return;
    }
    int64_t state = load_i64(word(step, AT_SLOT_TABLE) + 8 * load_i64(word(step, AT_SLOTS) + 8 * m));
    state += position / AT_BLOCK * word(step, AT_STATE_BLOCK) + word(row, AT_STATE_OFFSET);
    int64_t place = position % AT_BLOCK;
    if (head < q_heads + kv_heads) {
        int64_t out = state + (head - q_heads) * AT_BLOCK * head_dim * 4;
        out += place / AT_PANEL * (AT_PANEL * 4) * head_dim + place % AT_PANEL * 4;
        for (int64_t i = 0; i < head_dim; i++) store_f32(out + i * AT_PANEL * 4, load_f32(source + 4 * i));
        return;
    }
    int64_t values = state + kv_heads * AT_BLOCK * head_dim * 4;
    int64_t out = values + ((head - q_heads - kv_heads) * AT_BLOCK + place) * value_width * 4;
    memcpy((void *)out, (const void *)source, 4 * (size_t)value_width);
}

// The q, k and v projections: an item is a whole head, so that rope finds both halves.
static int64_t heads_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t rows = row_count(step, row), item;
    if (rows == 0) return base;
    int64_t heads = word(row, AT_ITEMS), end = base + heads * row_blocks(rows);
    matrix by = matrix_of(step, thread, row, rows);
    int64_t share = share_of(step, rows), scratch = scratch_of(step, thread);
    int64_t panels = round_up(word(row, AT_HEAD_DIM), AT_PANEL) / AT_PANEL, head_bytes = panels * TILE_ROW;
    while ((item = claim(step, base, end, 1, share)) >= 0) {
        int64_t size = claim_size(item, end, 1, share);
        for (int64_t unit = item - base; unit < item - base + size; unit++) {
            int64_t part = unit / heads, head = unit % heads;
            int64_t last = smaller(rows, (part + 1) * AT_ROW_BLOCK);
            for (int64_t m = part * AT_ROW_BLOCK; m < last; m += AT_TILE_ROWS) {
                int64_t count = smaller(AT_TILE_ROWS, last - m);
                for (int64_t slice = 0; slice < panels; slice++)
                    multiply(&by, head * panels + slice, m, count, scratch + slice * TILE_ROW, head_bytes);
                for (int64_t i = 0; i < count; i++) place_head(step, row, head, m + i, scratch + i * head_bytes);
            }
        }
        finish(step, end, size);
    }
    wait_finished(step, end);
    return end;
}

// Write the group's finished heads of row m into the attended row. `spare`: a head of scratch.
static void finish_row(int64_t step, int64_t row, int64_t m, int64_t kv_head, int64_t partials, int64_t spare)
{
    int64_t head_dim = word(row, AT_HEAD_DIM), group = word(row, AT_Q_HEADS) / word(row, AT_KV_HEADS);
    int64_t value_width = round_up(head_dim, AT_PANEL), act = word(step, AT_ACT);
    int64_t size = act == AT_ACT_BF16 ? 2 : 4;
    kernel_5 finish_one = (kernel_5)kernel_at(step, AT_FINISH_HEAD);
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    for (int64_t i = 0; i < group; i++) {
        int64_t target = out + (kv_head * group + i) * head_dim * size;
        int64_t source = partials + i * partial_bytes(value_width);
        if (head_dim % 16 == 0) {
            finish_one(act, source, value_width, target, head_dim >> 4);
            continue;
        }
        // A whole vector would reach into the next head, which another thread may be writing.
        finish_one(act, source, value_width, spare, value_width >> 4);
        memcpy((void *)target, (const void *)spare, (size_t)(head_dim * size));
    }
}

// Partials of `count` rows from row m (position `first`) over one block.
static void attend(
    int64_t step, int64_t row, int64_t m, int64_t kv_head, int64_t block, int64_t count, int64_t first,
    int64_t scores, int64_t out)
{
    int64_t kv_heads = word(row, AT_KV_HEADS), head_dim = word(row, AT_HEAD_DIM);
    int64_t group = word(row, AT_Q_HEADS) / kv_heads, value_width = round_up(head_dim, AT_PANEL);
    int64_t state = load_i64(word(step, AT_SLOT_TABLE) + 8 * load_i64(word(step, AT_SLOTS) + 8 * m));
    state += block * word(step, AT_STATE_BLOCK) + word(row, AT_STATE_OFFSET);
    int64_t keys = state + kv_head * AT_BLOCK * head_dim * 4;
    int64_t values = state + kv_heads * AT_BLOCK * head_dim * 4 + kv_head * AT_BLOCK * value_width * 4;
    int64_t stride = word(row, AT_SOURCE_STRIDE);
    int64_t queries = address_at(step, word(row, AT_SOURCE));
    queries += (kv_head * word(step, AT_MAX_ROWS) + m) * group * stride;
    ((kernel_14)kernel_at(step, AT_ATTEND_BLOCK))(
        kernel_at(step, AT_TILE_F32), kernel_at(step, AT_TILE_F32_WIDE), keys, values, head_dim, value_width,
        block, queries, stride, count, group, first, scores, out);
}

// Few rows: an item is one block of one row and key/value head; the last to finish merges in order.
static int64_t attention_split(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t kv_heads = word(row, AT_KV_HEADS), group = word(row, AT_Q_HEADS) / kv_heads;
    int64_t value_width = round_up(word(row, AT_HEAD_DIM), AT_PANEL), stride = partial_bytes(value_width);
    int64_t blocks = word(step, AT_BLOCKS), lines = word(step, AT_RUNS) * kv_heads;
    int64_t end = base + blocks * lines, scores = scratch_of(step, thread), item;
    kernel_5 merge = (kernel_5)kernel_at(step, AT_MERGE_PARTIALS);
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t block = (item - base) / lines, line = (item - base) % lines;
        int64_t kv_head = line % kv_heads, m = load_i64(word(step, AT_RUN_ROWS) + 8 * (line / kv_heads));
        int64_t first = load_i64(word(step, AT_POSITIONS) + 8 * m), own_blocks = first / AT_BLOCK + 1;
        if (block < own_blocks) {
            int64_t partials = word(step, AT_PARTS) + line * blocks * group * stride;
            attend(step, row, m, kv_head, block, 1, first, scores, partials + block * group * stride);
            int64_t counter = word(step, AT_PART_COUNTS) + 8 * line;
            if (atomic_add(counter, 1) == own_blocks - 1) {
                atomic_store(counter, 0);
                for (int64_t other = 1; other < own_blocks; other++)
                    merge(partials, partials + other * group * stride, value_width, stride, group);
                finish_row(step, row, m, kv_head, partials, scores);
            }
        }
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

// Many rows: an item is one run of rows and one key/value head, over all its blocks.
static int64_t attention_whole(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    int64_t kv_heads = word(row, AT_KV_HEADS), group = word(row, AT_Q_HEADS) / kv_heads;
    int64_t value_width = round_up(word(row, AT_HEAD_DIM), AT_PANEL), stride = partial_bytes(value_width);
    int64_t runs = word(step, AT_RUNS), end = base + runs * kv_heads, scores = scratch_of(step, thread), item;
    kernel_5 merge = (kernel_5)kernel_at(step, AT_MERGE_PARTIALS);
    int64_t vectors = larger(AT_RUN_QUERIES, group);
    int64_t fresh = scores + vectors * AT_BLOCK * 4, merged = fresh + vectors * stride;
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        // The longest runs, at the end of a prompt, go first.
        int64_t kv_head = (item - base) % kv_heads, run = runs - 1 - (item - base) / kv_heads;
        int64_t m = load_i64(word(step, AT_RUN_ROWS) + 8 * run);
        int64_t count = load_i64(word(step, AT_RUN_LENGTHS) + 8 * run);
        int64_t first = load_i64(word(step, AT_POSITIONS) + 8 * m);
        attend(step, row, m, kv_head, 0, count, first, scores, merged);
        for (int64_t block = 1; block < (first + count - 1) / AT_BLOCK + 1; block++) {
            attend(step, row, m, kv_head, block, count, first, scores, fresh);
            // Rows before the block, at the start of a run, have no part in it.
            int64_t skipped = larger(0, block * AT_BLOCK - first) * group;
            merge(
                merged + skipped * stride, fresh + skipped * stride, value_width, stride,
                count * group - skipped);
        }
        for (int64_t i = 0; i < count; i++)
            finish_row(step, row, m + i, kv_head, merged + i * group * stride, scores);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

static int64_t run_stage(int64_t step, int64_t thread, int64_t base, int64_t row)
{
    switch (word(row, AT_OP)) {
    case AT_LINEAR: return linear_stage(step, thread, base, row);
    case AT_HEADS: return heads_stage(step, thread, base, row);
    case AT_NORM: return norm_stage(step, thread, base, row);
    case AT_ATTENTION:
        if (word(step, AT_SPLIT) == 1) return attention_split(step, thread, base, row);
        return attention_whole(step, thread, base, row);
    case AT_GATHER: return gather_stage(step, base, row);
    case AT_EMBED: return embed_stage(step, base, row);
    default: return base;
    }
}

// Run ops [begin, end); leaves the number after the last item in the block's BASE.
void run_step(int64_t step, int64_t thread)
{
    int64_t base = word(step, AT_BASE), stopped = word(step, AT_CONTROL) + AT_STOPPED, ticket = base + 1;
    for (int64_t op = word(step, AT_BEGIN); op < word(step, AT_END); op++) {
        base = run_stage(step, thread, base, word(step, AT_PROGRAM) + op * AT_ROW_WORDS * 8);
        if (atomic_load(stopped) == ticket) {
            // A slow thread may see this one stage early: the stage that ends the step is the named one.
            base = atomic_load(stopped + 8);
            wait_finished(step, base);
            break;
        }
    }
    store_i64(step + 8 * AT_BASE, base);
}

#define ENTRY(index, function) [index] = (void (*)(void))function

EXPORTED void (*const kernel_table[])(void) = {
    ENTRY(AT_TILE_BF16, tile_bf16),
    ENTRY(AT_TILE_F16, tile_f16),
    ENTRY(AT_TILE_F32, tile_f32),
    ENTRY(AT_TILE_DOT, tile_dot),
    ENTRY(AT_TILE_F32_WIDE, tile_f32_wide),
    ENTRY(AT_NORM_ROW, norm_row),
    ENTRY(AT_ROTATE, rotate),
    ENTRY(AT_SILU_MUL_TILE, silu_mul_tile),
    ENTRY(AT_ATTEND_BLOCK, attend_block),
    ENTRY(AT_MERGE_PARTIALS, merge_partials),
    ENTRY(AT_FINISH_HEAD, finish_head),
    ENTRY(AT_RUN_STEP, run_step),
};

EXPORTED const int64_t kernel_count = sizeof kernel_table / sizeof *kernel_table;
