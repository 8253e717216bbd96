// The SPMD interpreter: every thread runs `run_step` over the same program, a table of fused stages.
// The stages are beside it, each in the file that follows its numba_cpu.py function by function.
#include "stages.h"

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
    case AT_ROUTE: return route_stage(step, base, row);
    case AT_DISPATCH: return dispatch_stage(step, thread, base, row);
    case AT_COMBINE: return combine_stage(step, base, row);
    case AT_CONV: return conv_stage(step, base, row);
    case AT_DELTA: return delta_stage(step, base, row);
    case AT_GATED_NORM: return gated_norm_stage(step, base, row);
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
    ENTRY(AT_ROUTE_ROW, route_row),
    ENTRY(AT_COMBINE_ROW, combine_row),
    ENTRY(AT_CONV_ROW, conv_row),
    ENTRY(AT_CONV_STATE, conv_state),
    ENTRY(AT_GATES_ROW, gates_row),
    ENTRY(AT_NORMALISE_HEAD, normalise_head),
    ENTRY(AT_DELTA_HEAD, delta_head),
    ENTRY(AT_GATED_NORM_HEAD, gated_norm_head),
};

EXPORTED const int64_t kernel_count = sizeof kernel_table / sizeof *kernel_table;
