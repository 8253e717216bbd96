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

// Norm, where there is a `gain`, and rope of a q or k head in rows m to m + count - 1.
static void turn_heads(
    int64_t step, int64_t row, int64_t gain, int64_t m, int64_t count, int64_t source, int64_t stride)
{
    int64_t head_dim = word(row, AT_HEAD_DIM), rotary_dim = word(row, AT_ROTARY_DIM);
    int64_t table = address_at(step, word(row, AT_ROPE_TABLE)), epsilon = word(row, AT_EPSILON);
    kernel_7 norm = (kernel_7)kernel_at(step, AT_NORM_ROW);
    kernel_3 turn = (kernel_3)kernel_at(step, AT_ROTATE);
    if (gain != 0) gain = address_at(step, gain);
    for (int64_t i = 0; i < count; i++) {
        int64_t x = source + i * stride;
        if (gain != 0) norm(AT_ACT_F32, x, gain, x, round_up(head_dim, 16), head_dim, epsilon);
        turn(x, table + entry(step, AT_POSITIONS, m + i) * rotary_dim * 4, rotary_dim);
    }
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

// Scaled, and the heads of a row that share keys beside each other.
static void place_queries(
    int64_t step, int64_t row, int64_t head, int64_t m, int64_t count, int64_t source, int64_t stride)
{
    int64_t act = word(step, AT_ACT), group = group_of(row), out_stride = word(row, AT_TARGET_STRIDE);
    int64_t vectors = (head / group * word(step, AT_MAX_ROWS) + m) * group + head % group;
    int64_t out = address_at(step, word(row, AT_TARGET)) + vectors * out_stride;
    int64_t width = (word(row, AT_HEAD_DIM) + 15) >> 4;
    for (int64_t i = 0; i < count; i++)
        scale_into(act, source + i * stride, word(row, AT_SCALE), out + i * group * out_stride, width);
}

static void place_keys(
    int64_t step, int64_t row, int64_t kv_head, int64_t m, int64_t count, int64_t source, int64_t stride)
{
    int64_t act = word(step, AT_ACT), size = act_bytes(act), head_dim = word(row, AT_HEAD_DIM);
    for (int64_t i = 0; i < count; i++) {
        int64_t x = source + i * stride, position = entry(step, AT_POSITIONS, m + i);
        int64_t place = position % AT_BLOCK, block = state_of(step, row, m + i, position / AT_BLOCK);
        int64_t out = block + (kv_head * AT_BLOCK + place / AT_PANEL * AT_PANEL) * head_dim * size;
        out += place % AT_PANEL * 4;
        scale_into(act, x, ONE_BITS, x, (head_dim + 15) >> 4);
        for (int64_t k = 0; k < head_dim * size / 4; k++)
            store_u32(out + k * AT_PANEL * 4, load_u32(x + 4 * k));
    }
}

static void place_values(
    int64_t step, int64_t row, int64_t kv_head, int64_t m, int64_t count, int64_t source, int64_t stride)
{
    int64_t act = word(step, AT_ACT), head_dim = word(row, AT_HEAD_DIM), width = value_width_of(row);
    int64_t before = (word(row, AT_KV_HEADS) * head_dim + kv_head * width) * AT_BLOCK * act_bytes(act);
    for (int64_t i = 0; i < count; i++) {
        int64_t x = source + i * stride, position = entry(step, AT_POSITIONS, m + i);
        int64_t place = position % AT_BLOCK, out = state_of(step, row, m + i, position / AT_BLOCK) + before;
        if (act == AT_ACT_BF16) {
            scale_into(act, x, ONE_BITS, x, width >> 4);
            place_pairs(x, out, place, width, ends_sequence(step, m + i));
        } else {
            scale_into(act, x, ONE_BITS, out + place * width * 4, width >> 4);
        }
    }
}

// Send a finished q, k or v head of rows m to m + count - 1, `stride` bytes apart, where attention reads it.
static void place_heads(
    int64_t step, int64_t row, int64_t head, int64_t m, int64_t count, int64_t source, int64_t stride)
{
    int64_t q_heads = word(row, AT_Q_HEADS), kv_heads = word(row, AT_KV_HEADS);
    if (head < q_heads) {
        turn_heads(step, row, word(row, AT_Q_GAIN), m, count, source, stride);
        place_queries(step, row, head, m, count, source, stride);
    } else if (head < q_heads + kv_heads) {
        turn_heads(step, row, word(row, AT_K_GAIN), m, count, source, stride);
        place_keys(step, row, head - q_heads, m, count, source, stride);
    } else {
        place_values(step, row, head - q_heads - kv_heads, m, count, source, stride);
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
        place_heads(step, row, head, m, count, scratch, head_bytes);
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
    int64_t stride = partial_bytes(value_width_of(row)), group = group_of(row);
    int64_t vectors = larger(AT_RUN_QUERIES, group);
    int64_t scores = scratch_of(step, thread), fresh = scores + vectors * AT_BLOCK * 4;
    int64_t merged = fresh + vectors * stride;
    // Head by head, whose keys and values stay in the cache; the longest runs, at a prompt's end, go first.
    int64_t runs = word(step, AT_RUNS), kv_head = item / runs, run = runs - 1 - item % runs;
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
