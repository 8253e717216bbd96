// The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages.
// What an item of a stage is stands beside it, in the files that follow their numba_cpu.py.
#include "stages.h"

enum { ONE_BY_ONE = 1 << 30, NORM_CLAIM = 8 };

static int64_t wanted_items(int64_t step, int64_t row)
{
    (void)row;
    return word(step, AT_WANTED);
}

static int64_t dispatch_items(int64_t step, int64_t row)
{
    return row_count(step, row) * word(row, AT_TOP_K);
}

typedef struct {
    int64_t (*items)(int64_t step, int64_t row);
    void (*run_item)(int64_t step, int64_t thread, int64_t row, int64_t item);
} stage;

static const stage stages[] = {
    [AT_EMBED] = {row_count, embed_item},
    [AT_NORM] = {row_count, norm_item},
    [AT_LINEAR] = {linear_items, linear_item},
    [AT_HEADS] = {head_items, head_item},
    [AT_ATTENTION] = {attention_items, attention_item},
    [AT_GATHER] = {wanted_items, gather_item},
    [AT_ROUTE] = {row_count, route_item},
    [AT_DISPATCH] = {dispatch_items, dispatch_item},
    [AT_COMBINE] = {row_count, combine_item},
    [AT_CONV] = {row_count, conv_item},
    [AT_DELTA] = {delta_items, delta_item},
    [AT_GATED_NORM] = {row_count, gated_norm_item},
    [AT_ARGMAX] = {row_count, argmax_item},
};

// Products of few rows: a claim takes an equal part of what is left, else one item.
static int64_t share_of(int64_t step, int64_t row, int64_t code)
{
    int few = row_count(step, row) <= AT_SMALL_ROWS;
    return few && (code == AT_LINEAR || code == AT_HEADS) ? word(step, AT_THREADS) : ONE_BY_ONE;
}

// Take items until there are none, then wait for those of others; the number after the last item.
static int64_t run_stage(int64_t step, int64_t thread, int64_t row, int64_t code, int64_t base)
{
    const stage *of = &stages[code];
    int64_t end = base + of->items(step, row), least = code == AT_NORM ? NORM_CLAIM : 1, item;
    int64_t share = share_of(step, row, code);
    while ((item = claim(step, base, end, least, share)) >= 0) {
        int64_t size = claim_size(item, end, least, share);
        for (int64_t unit = item - base; unit < item - base + size; unit++)
            of->run_item(step, thread, row, unit);
        finish(step, end, size);
    }
    wait_finished(step, end);
    return end;
}

// Run ops [begin, end); leaves the number after the last item in the block's BASE.
void run_step(int64_t step, int64_t thread)
{
    int64_t base = word(step, AT_BASE), stopped = word(step, AT_CONTROL) + AT_STOPPED, ticket = base + 1;
    for (int64_t op = word(step, AT_BEGIN); op < word(step, AT_END); op++) {
        int64_t row = word(step, AT_PROGRAM) + op * AT_ROW_WORDS * 8, code = word(row, AT_OP);
        if (code == AT_NORM && row_count(step, row) <= AT_SMALL_ROWS) {
            norm_alone(step, thread, row);
            continue;
        }
        base = run_stage(step, thread, row, code, base);
        if (atomic_load(stopped) >= ticket) {
            // A slow thread may see this one stage early, or not before a later step was stopped too: the
            // named stage is the last of its step, or stands behind it.
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
    ENTRY(AT_TILE_DOT_WIDE, tile_dot_wide),
    ENTRY(AT_NORM_ROW, norm_row),
    ENTRY(AT_ROTATE, rotate),
    ENTRY(AT_SILU_MUL_TILE, silu_mul_tile),
    ENTRY(AT_ATTEND_BLOCK, attend_block),
    ENTRY(AT_MERGE_PARTIALS, merge_partials),
    ENTRY(AT_FINISH_HEAD, finish_head),
    ENTRY(AT_RUN_STEP, run_step),
    ENTRY(AT_ROUTE_ROW, route_row),
    ENTRY(AT_COMBINE_ROW, combine_row),
    ENTRY(AT_CONV_ROW, conv_row),
    ENTRY(AT_CONV_STATE, conv_state),
    ENTRY(AT_GATES_ROW, gates_row),
    ENTRY(AT_NORMALISE_HEAD, normalise_head),
    ENTRY(AT_DELTA_HEAD, delta_head),
    ENTRY(AT_GATED_NORM_HEAD, gated_norm_head),
    ENTRY(AT_ARGMAX_ROW, argmax_row),
};

EXPORTED const int64_t kernel_count = sizeof kernel_table / sizeof *kernel_table;
