// Softmax attention over fixed blocks of absolute positions; see attention/numba_cpu.py.
//
// A block's keys of a head: [BLOCK/32][head_dim][32 positions] float32; values: [BLOCK][value width] float32.
// As bfloat16: [BLOCK/32][head_dim/2][32 positions][2] and [BLOCK/2][value width][2 positions].
#include "kernels.h"
#include "vector.h"

enum { BLOCK_VECTORS = AT_BLOCK / LANES, SCORE_BYTES = 4 * AT_BLOCK };

// The vectors of a block made one, neighbours first.
#define FOLD(name, combine)                                                                 \
    INLINE vf name(const vf parts[BLOCK_VECTORS])                                           \
    {                                                                                       \
        vf folded[BLOCK_VECTORS];                                                           \
        memcpy(folded, parts, sizeof folded);                                               \
        UNROLLED for (int step = 1; step < BLOCK_VECTORS; step *= 2)                        \
            UNROLLED for (int i = 0; i < BLOCK_VECTORS; i += 2 * step)                      \
                folded[i] = combine(folded[i], folded[i + step]);                           \
        return folded[0];                                                                   \
    }
FOLD(fold_max, v_max)
FOLD(fold_sum, v_add)

// scores[0:BLOCK] -> 2**(score - max) as activations, zero outside [low, high). The max and the sum of what was
// not rounded yet, float32, go to `max_at`.
INLINE void softmax_block(int64_t act, int64_t scores, int64_t low, int64_t high, int64_t max_at)
{
    vf parts[BLOCK_VECTORS];
    UNROLLED for (int i = 0; i < BLOCK_VECTORS; i++)
    {
        vf part = v_load(scores + 64 * i);
        parts[i] = v_keep(low - LANES * i, high - LANES * i, part, -__builtin_inff());
    }
    float top = v_largest(fold_max(parts));
    vf top_lanes = v_lanes(top);
    UNROLLED for (int i = 0; i < BLOCK_VECTORS; i++)
    {
        vf power = v_exp2(v_sub(parts[i], top_lanes));
        parts[i] = v_keep(low - LANES * i, high - LANES * i, power, 0.0f);
        store_activation(scores + LANES * i * act_bytes(act), parts[i], act);
    }
    store_f32(max_at, top);
    store_f32(max_at + 4, v_sum(fold_sum(parts)));
}

static void merge(int64_t run, int64_t block, int64_t width)
{
    int64_t at_max = 4 * width, at_sum = at_max + 4;
    float run_max = load_f32(run + at_max), block_max = load_f32(block + at_max);
    float run_sum = load_f32(run + at_sum), block_sum = load_f32(block + at_sum);
    // The larger of the two keeps its scale: exp2(0) is exactly 1.
    float rise = block_max - run_max;
    int rises = rise > 0.0f;
    vf decay = v_exp2(v_lanes(rises ? -rise : rise));
    vf run_scale = rises ? decay : v_lanes(1.0f), block_scale = rises ? v_lanes(1.0f) : decay;
    vf total = v_fma(v_lanes(block_sum), block_scale, v_mul(v_lanes(run_sum), run_scale));
    store_f32(run + at_max, run_max > block_max ? run_max : block_max);
    store_f32(run + at_sum, v_first(total));
    for (int64_t at = 0; at < 4 * width; at += 64) {
        vf value = v_mul(v_load(run + at), run_scale);
        v_store(run + at, v_fma(v_load(block + at), block_scale, value));
    }
}

// Merge `count` partials at `block` into those at `run`: {acc[width], max, sum}, `stride` bytes apart.
void merge_partials(int64_t run, int64_t block, int64_t width, int64_t stride, int64_t count)
{
    for (int64_t i = 0; i < count; i++) merge(run + i * stride, block + i * stride, width);
}

// out[0:16 * count] = acc / sum, times sigmoid(gate) unless `gate` is 0, stored as an activation.
void finish_head(int64_t act, int64_t run, int64_t width, int64_t gate, int64_t out, int64_t count)
{
    vf total = v_load_lanes(run + 4 * width + 4);
    for (int64_t i = 0; i < count; i++) {
        vf value = v_div(v_load(run + 64 * i), total);
        if (gate != 0) value = v_mul(value, v_sigmoid(v_load(gate + 64 * i)));
        store_activation(out + LANES * i * act_bytes(act), value, act);
    }
}

// Partials of `rows` neighbouring positions (from `first`) times `group` query heads over one block.
//
// queries: activations[rows * group][head_dim]; scores: scratch float32[rows * group][BLOCK];
// out: partials[rows * group]; tile, tile_wide: addresses of linear's tiles for the activations. A
// `window` over 0 hides what lies so far back. Rows that see nothing of the block get a sum of zero.
void attend_block(
    int64_t act, int64_t tile, int64_t tile_wide, int64_t keys, int64_t values, int64_t head_dim,
    int64_t value_width, int64_t block, int64_t queries, int64_t query_stride, int64_t rows, int64_t group,
    int64_t first, int64_t window, int64_t scores, int64_t out)
{
    int64_t count = rows * group, start = block * AT_BLOCK;
    int64_t visible = smaller(AT_BLOCK, first + rows - start);
    int64_t panel_bytes = AT_PANEL * head_dim * act_bytes(act);
    kernel_8 narrow = (kernel_8)tile, wide = (kernel_8)tile_wide;
    for (int64_t column = 0; column < visible; column += AT_PANEL)
        narrow(
            count, keys + column / AT_PANEL * panel_bytes, AT_PANEL * 4, queries, query_stride, head_dim,
            scores + 4 * column, SCORE_BYTES);
    int64_t stride = partial_bytes(value_width), maxima = out + value_width * 4;
    // The row r of the run sees columns back + r <= column < ahead + r of the block.
    int64_t ahead = first + 1 - start, back = window > 0 ? ahead - window : -(1 << 30);
    for (int64_t i = 0; i < count; i++)
        softmax_block(act, scores + i * SCORE_BYTES, back + i / group, ahead + i / group, maxima + i * stride);
    if (act == AT_ACT_BF16) visible = round_up(visible, 2);
    int64_t column = 0;
    for (; column + 2 * AT_PANEL <= value_width; column += 2 * AT_PANEL)
        wide(count, values + column * 4, value_width * 4, scores, SCORE_BYTES, visible, out + column * 4, stride);
    if (column < value_width)
        narrow(count, values + column * 4, value_width * 4, scores, SCORE_BYTES, visible, out + column * 4, stride);
}
