// Items of attention: heads to where it reads them, then blocks of one row or whole runs of rows.
#include "stages.h"

// Address of the op's part of the state of row m's sequence in a block.
static int64_t state_of(int64_t step, int64_t row, int64_t m, int64_t block)
{
    int64_t state = entry(step, AT_SLOT_TABLE, entry(step, AT_SLOTS, m));
    return state + block * word(step, AT_STATE_BLOCK) + word(row, AT_STATE_OFFSET);
}

static int64_t value_width_of(int64_t row) { return round_up(word(row, AT_HEAD_DIM), AT_PANEL); }

static int64_t group_of(int64_t row) { return word(row, AT_Q_HEADS) / word(row, AT_KV_HEADS); }

// Norm, where the op has gains, and rope of one query or key head.
static void turn_head(int64_t step, int64_t row, int64_t head, int64_t position, int64_t source)
{
    int64_t head_dim = word(row, AT_HEAD_DIM), rotary_dim = word(row, AT_ROTARY_DIM);
    int64_t gain = word(row, head < word(row, AT_Q_HEADS) ? AT_Q_GAIN : AT_K_GAIN);
    if (gain != 0) {
        kernel_7 norm = (kernel_7)kernel_at(step, AT_NORM_ROW);
        norm(
            AT_ACT_F32, source, address_at(step, gain), source, round_up(head_dim, 16), head_dim,
            word(row, AT_EPSILON));
    }
    int64_t table = address_at(step, word(row, AT_ROPE_TABLE)) + position * rotary_dim * 4;
    ((kernel_3)kernel_at(step, AT_ROTATE))(source, table, rotary_dim);
}

// Whether row m is the last of its sequence in this step: rows of a sequence stand together.
static int ends_sequence(int64_t step, int64_t m)
{
    return m + 1 == word(step, AT_ROWS) || entry(step, AT_SLOTS, m + 1) != entry(step, AT_SLOTS, m);
}

// Values of position `place` of a block, bfloat16[width], beside those of the position it is paired with.
//
// An even `last` position has no partner yet: a zero, for what stood there before may be no number.
static void place_pairs(int64_t source, int64_t out, int64_t place, int64_t width, int last)
{
    out += place / 2 * width * 4;
    if (place % 2 == 0 && last) {
        for (int64_t i = 0; i < width; i++) store_u32(out + 4 * i, load_u16(source + 2 * i));
        return;
    }
    out += place % 2 * 2;
    for (int64_t i = 0; i < width; i++) store_u16(out + 4 * i, load_u16(source + 2 * i));
}

// Send row m of a finished q, k or v head where attention reads it: q roped and scaled, k roped.
static void place_head(int64_t step, int64_t row, int64_t head, int64_t m, int64_t source)
{
    int64_t q_heads = word(row, AT_Q_HEADS), kv_heads = word(row, AT_KV_HEADS);
    int64_t head_dim = word(row, AT_HEAD_DIM), position = entry(step, AT_POSITIONS, m);
    int64_t act = word(step, AT_ACT), size = act_bytes(act);
    if (head < q_heads + kv_heads) turn_head(step, row, head, position, source);
    if (head < q_heads) {
        int64_t group = group_of(row);
        int64_t vectors = ((head / group) * word(step, AT_MAX_ROWS) + m) * group + head % group;
        int64_t out = address_at(step, word(row, AT_TARGET)) + vectors * word(row, AT_TARGET_STRIDE);
        scale_into(act, source, word(row, AT_SCALE), out, (head_dim + 15) >> 4);
        return;
    }
    int64_t state = state_of(step, row, m, position / AT_BLOCK), place = position % AT_BLOCK;
    if (head < q_heads + kv_heads) {
        int64_t out = state + (head - q_heads) * AT_BLOCK * head_dim * size;
        out += place / AT_PANEL * (AT_PANEL * size) * head_dim + place % AT_PANEL * 4;
        scale_into(act, source, ONE_BITS, source, (head_dim + 15) >> 4);
        for (int64_t i = 0; i < head_dim * size / 4; i++)
            store_u32(out + i * AT_PANEL * 4, load_u32(source + 4 * i));
        return;
    }
    int64_t width = value_width_of(row);
    int64_t out = state + (kv_heads * head_dim + (head - q_heads - kv_heads) * width) * AT_BLOCK * size;
    if (act == AT_ACT_BF16) {
        scale_into(act, source, ONE_BITS, source, width >> 4);
        place_pairs(source, out, place, width, ends_sequence(step, m));
    } else {
        scale_into(act, source, ONE_BITS, out + place * width * 4, width >> 4);
    }
}

int64_t head_items(int64_t step, int64_t row)
{
    return word(row, AT_ITEMS) * row_blocks(row_count(step, row));
}

// A whole head of q, k or v for a part of the rows, so that rope finds both halves.
void head_item(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    int64_t heads = word(row, AT_ITEMS), head = item % heads, m = item / heads * AT_ROW_BLOCK;
    int64_t last = smaller(row_count(step, row), m + AT_ROW_BLOCK), scratch = scratch_of(step, thread);
    int64_t panels = value_width_of(row) / AT_PANEL, head_bytes = panels * TILE_ROW;
    matrix by = matrix_of(step, thread, row);
    for (; m < last; m += AT_TILE_ROWS) {
        int64_t count = smaller(AT_TILE_ROWS, last - m);
        for (int64_t slice = 0; slice < panels; slice++) {
            int64_t panel = head * panels + slice, w = by.weight + panel * by.panel_bytes;
            multiply(&by, w, panel, m, count, scratch + slice * TILE_ROW, head_bytes);
        }
        for (int64_t i = 0; i < count; i++) place_head(step, row, head, m + i, scratch + i * head_bytes);
    }
}

// Write the group's finished heads of row m, gated if need be, into the attended row.
//
// `spare`: a head of scratch.
static void finish_row(int64_t step, int64_t row, int64_t m, int64_t kv_head, int64_t partials, int64_t spare)
{
    int64_t head_dim = word(row, AT_HEAD_DIM), group = group_of(row), width = value_width_of(row);
    int64_t act = word(step, AT_ACT), size = act_bytes(act), gates = 0;
    kernel_6 finish_one = (kernel_6)kernel_at(step, AT_FINISH_HEAD);
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    if (word(row, AT_GATE) != 0) gates = address_at(step, word(row, AT_GATE)) + m * word(row, AT_GATE_STRIDE);
    for (int64_t i = 0; i < group; i++) {
        int64_t head = kv_head * group + i, target = out + head * head_dim * size;
        int64_t gate = gates != 0 ? gates + head * head_dim * 4 : 0;
        int64_t source = partials + i * partial_bytes(width);
        if (head_dim % 16 == 0) {
            finish_one(act, source, width, gate, target, head_dim >> 4);
            continue;
        }
        // A whole vector would reach into the next head, which another thread may be writing.
        finish_one(act, source, width, gate, spare, (head_dim + 15) >> 4);
        memcpy((void *)target, (const void *)spare, (size_t)(head_dim * size));
    }
}

// Partials of `count` rows from row m (position `first`) over one block.
static void attend(
    int64_t step, int64_t row, int64_t m, int64_t kv_head, int64_t block, int64_t count, int64_t first,
    int64_t scores, int64_t out)
{
    int64_t head_dim = word(row, AT_HEAD_DIM), group = group_of(row), width = value_width_of(row);
    int64_t state = state_of(step, row, m, block);
    int64_t act = word(step, AT_ACT), size = act_bytes(act), dot = act == AT_ACT_BF16;
    int64_t keys = state + kv_head * AT_BLOCK * head_dim * size;
    int64_t values = state + (word(row, AT_KV_HEADS) * head_dim + kv_head * width) * AT_BLOCK * size;
    int64_t stride = word(row, AT_SOURCE_STRIDE), queries = address_at(step, word(row, AT_SOURCE));
    queries += (kv_head * word(step, AT_MAX_ROWS) + m) * group * stride;
    int64_t tile = kernel_at(step, dot ? AT_TILE_DOT : AT_TILE_F32);
    int64_t tile_wide = kernel_at(step, dot ? AT_TILE_DOT_WIDE : AT_TILE_F32_WIDE);
    ((kernel_16)kernel_at(step, AT_ATTEND_BLOCK))(
        act, tile, tile_wide, keys, values, head_dim, width, block, queries, stride, count, group, first,
        word(row, AT_WINDOW), scores, out);
}

// The first block that the row at a position sees.
static int64_t first_block(int64_t row, int64_t position)
{
    int64_t window = word(row, AT_WINDOW);
    return window > 0 ? larger(0, position - window + 1) / AT_BLOCK : 0;
}

// Few rows: a block, a row and a key/value head. Many rows: a run of rows and a key/value head.
int64_t attention_items(int64_t step, int64_t row)
{
    int64_t blocks = word(step, AT_SPLIT) == 1 ? word(step, AT_BLOCKS) : 1;
    return blocks * word(step, AT_RUNS) * word(row, AT_KV_HEADS);
}

// One block of one row; the last of a row to finish merges them in order.
static void attend_one_block(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    int64_t kv_heads = word(row, AT_KV_HEADS), group = group_of(row), width = value_width_of(row);
    int64_t size = group * partial_bytes(width), lines = word(step, AT_RUNS) * kv_heads;
    int64_t block = item / lines, line = item % lines;
    int64_t kv_head = line % kv_heads, m = entry(step, AT_RUN_ROWS, line / kv_heads);
    int64_t position = entry(step, AT_POSITIONS, m);
    int64_t begin = first_block(row, position), end = position / AT_BLOCK + 1;
    if (block < begin || block >= end) return;
    int64_t scores = scratch_of(step, thread);
    int64_t partials = word(step, AT_PARTS) + line * word(step, AT_BLOCKS) * size;
    attend(step, row, m, kv_head, block, 1, position, scores, partials + block * size);
    int64_t counter = word(step, AT_PART_COUNTS) + 8 * line;
    if (atomic_add(counter, 1) != end - begin - 1) return;
    atomic_store(counter, 0);
    int64_t merged = partials + begin * size;
    kernel_5 merge = (kernel_5)kernel_at(step, AT_MERGE_PARTIALS);
    for (int64_t other = 1; other < end - begin; other++)
        merge(merged, merged + other * size, width, partial_bytes(width), group);
    finish_row(step, row, m, kv_head, merged, scores);
}

// Merge a block's partials of a run of `count` rows, at `fresh`, into those at `merged`.
static void merge_run(
    int64_t step, int64_t row, int64_t block, int64_t first, int64_t count, int64_t fresh, int64_t merged)
{
    int64_t width = value_width_of(row), window = word(row, AT_WINDOW), group = group_of(row);
    int64_t stride = partial_bytes(width);
    // Rows before the block, at the start of a run, have no part in it; for those at its end it
    // may be the first block in their window.
    int64_t skipped = larger(0, block * AT_BLOCK - first), fresh_from = count;
    if (window > 0) fresh_from = larger(skipped, smaller(count, block * AT_BLOCK + window - 1 - first));
    int64_t begin = skipped * group * stride, end = fresh_from * group * stride;
    int64_t size = count * group * stride;
    kernel_5 merge = (kernel_5)kernel_at(step, AT_MERGE_PARTIALS);
    if (fresh_from > skipped)
        merge(merged + begin, fresh + begin, width, stride, (fresh_from - skipped) * group);
    if (size > end) memcpy((void *)(merged + end), (const void *)(fresh + end), (size_t)(size - end));
}

// One run of rows over all its blocks.
static void attend_run(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    int64_t kv_heads = word(row, AT_KV_HEADS), group = group_of(row);
    int64_t stride = partial_bytes(value_width_of(row)), vectors = larger(AT_RUN_QUERIES, group);
    int64_t scores = scratch_of(step, thread), fresh = scores + vectors * AT_BLOCK * 4;
    int64_t merged = fresh + vectors * stride;
    // The longest runs, at the end of a prompt, go first.
    int64_t kv_head = item % kv_heads, run = word(step, AT_RUNS) - 1 - item / kv_heads;
    int64_t m = entry(step, AT_RUN_ROWS, run), count = entry(step, AT_RUN_LENGTHS, run);
    int64_t first = entry(step, AT_POSITIONS, m), begin = first_block(row, first);
    attend(step, row, m, kv_head, begin, count, first, scores, merged);
    for (int64_t block = begin + 1; block < (first + count - 1) / AT_BLOCK + 1; block++) {
        attend(step, row, m, kv_head, block, count, first, scores, fresh);
        merge_run(step, row, block, first, count, fresh, merged);
    }
    for (int64_t i = 0; i < count; i++)
        finish_row(step, row, m + i, kv_head, merged + i * group * stride, scores);
}

void attention_item(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    if (word(step, AT_SPLIT) == 1)
        attend_one_block(step, thread, row, item);
    else
        attend_run(step, thread, row, item);
}
