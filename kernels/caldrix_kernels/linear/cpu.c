// Matrix products over packed weight panels; layouts and order of sums are said in linear/numba_cpu.py.
#include "kernels.h"
#include "vector.h"

EXPORTED const int64_t has_bf16_dot = HAS_BF16;

// Thirty-two wide registers hold the sums of twelve rows; sixteen narrower ones those of three.
enum { WIDE = REGISTER_LANES == 16, DOT = AT_FLOAT32 + 1 };
// Most registers of sums: twelve rows of a panel on wide registers, three on narrow ones, one row of a wide
// tile on four-lane ones.
enum { MOST_SUMS = WIDE ? 24 : 32 };

// Register `i` of a loop step's weights, widened: of BF16 the even (part 0) or odd k of each lane.
INLINE reg weights_at(int form, int part, int64_t w, int i)
{
    if (form == AT_BF16) {
        ireg words = load_ireg(w + 4 * REGISTER_LANES * i);
        return part == 0 ? (reg)(words << 16) : reg_upper_bf16(words);
    }
    if (form == AT_F16) return reg_widen_f16(load_half_reg(w + 2 * REGISTER_LANES * i));
    return load_reg(w + 4 * REGISTER_LANES * i);
}

// Address of row m of x: three pointers and their multiples reach twelve rows without a register for each.
#define ROW(m) (x_rows[(m) / 4] + (m) % 4 * x_stride)

// One k of each lane. Wide registers keep the weights and broadcast the inputs one by one; narrow ones, which
// are fewer, keep the inputs.
INLINE void fma_step(
    int form, int part, int rows, int count, int64_t w, const int64_t x_rows[3], int64_t x_stride, reg *sums)
{
    int64_t byte = 4 * part;
    if (WIDE) {
        reg weights[4];
        UNROLLED for (int i = 0; i < count; i++) weights[i] = weights_at(form, part, w, i);
        UNROLLED for (int m = 0; m < rows; m++)
        {
            reg value = reg_broadcast(load_f32(ROW(m) + byte));
            UNROLLED for (int i = 0; i < count; i++)
                sums[count * m + i] = reg_fma(weights[i], value, sums[count * m + i]);
        }
        return;
    }
    reg inputs[3];
    UNROLLED for (int m = 0; m < rows; m++) inputs[m] = reg_broadcast(load_f32(ROW(m) + byte));
    UNROLLED for (int i = 0; i < count; i++)
    {
        reg weights = weights_at(form, part, w, i);
        UNROLLED for (int m = 0; m < rows; m++)
            sums[count * m + i] = reg_fma(weights, inputs[m], sums[count * m + i]);
    }
}

#if HAS_BF16
INLINE void dot_step(int rows, int count, int64_t w, const int64_t x_rows[3], int64_t x_stride, reg *sums)
{
    __m512bh weights[4];
    memcpy(weights, (const void *)w, (size_t)count * sizeof *weights);
    UNROLLED for (int m = 0; m < rows; m++)
    {
        __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)load_u32(ROW(m)));
        UNROLLED for (int i = 0; i < count; i++)
            sums[count * m + i] = _mm512_dpbf16_ps(sums[count * m + i], weights[i], pair);
    }
}
#endif

// out[m, 0:16 * vectors] = sum over k of x[m, k] * w[k, 0:16 * vectors] for m < rows; strides in bytes,
// `w_stride` is the distance of loop steps. x is float32; for form DOT x and w are bfloat16 and the
// instruction adds two products at a time (rounded differently: `--dtype bf16` only). The first three
// arguments are constants.
INLINE void panel(
    int rows, int form, int vectors, int64_t w, int64_t w_stride, int64_t x, int64_t x_stride,
    int64_t columns, int64_t out, int64_t out_stride)
{
    const int count = vectors * PARTS;
    const int per_step = form == AT_BF16 || form == DOT ? 2 : 1;
    // A few rows take about as long as reading the weights, see linear/numba_cpu.py.
    const int ahead = per_step == 2 && vectors == 2 && rows >= 2 && rows <= 8;
    reg sums[MOST_SUMS];
    UNROLLED for (int i = 0; i < rows * count; i++) sums[i] = reg_broadcast(0.0f);
    int64_t x_rows[3] = {x, x + 4 * x_stride, x + 8 * x_stride};
    for (int64_t steps = columns / per_step; steps > 0; steps--) {
        if (ahead) {
            __builtin_prefetch((const void *)(w + AT_PREFETCH));
            __builtin_prefetch((const void *)(w + AT_PREFETCH + 64));
        }
#if HAS_BF16
        if (form == DOT) dot_step(rows, count, w, x_rows, x_stride, sums);
#endif
        if (form != DOT) fma_step(form, 0, rows, count, w, x_rows, x_stride, sums);
        if (form == AT_BF16) fma_step(form, 1, rows, count, w, x_rows, x_stride, sums);
        w += w_stride;
        UNROLLED for (int i = 0; i < 3; i++) x_rows[i] += form == DOT ? 4 : 4 * per_step;
    }
    UNROLLED for (int m = 0; m < rows; m++)
        UNROLLED for (int i = 0; i < count; i++)
        {
            int64_t place = out + m * out_stride + 4 * REGISTER_LANES * i;
            memcpy((void *)place, &sums[count * m + i], sizeof(reg));
        }
}

// The tiles meet any row count greedily. A row's own arithmetic does not depend on the split.
#define MEET(number, form, vectors)                                                     \
    while (rows >= number) {                                                            \
        panel(number, form, vectors, w, step, x, x_stride, columns, out, out_stride);   \
        x += number * x_stride, out += number * out_stride, rows -= number;             \
    }

#define TILE(name, form)                                                                \
    void name(                                                                          \
        int64_t rows, int64_t w, int64_t step, int64_t x, int64_t x_stride, int64_t columns, int64_t out, \
        int64_t out_stride)                                                             \
    {                                                                                   \
        if (WIDE) {                                                                     \
            MEET(12, form, 2)                                                           \
            MEET(8, form, 2)                                                            \
            MEET(4, form, 2)                                                            \
        }                                                                               \
        MEET(3, form, 2)                                                                \
        MEET(2, form, 2)                                                                \
        MEET(1, form, 2)                                                                \
    }

TILE(tile_bf16, AT_BF16)
TILE(tile_f16, AT_F16)
TILE(tile_f32, AT_FLOAT32)

// 64 outputs a row instead of 32: a row of values is read whole, in one stream.
#define WIDE_TILE(name, form)                                                           \
    void name(                                                                          \
        int64_t rows, int64_t w, int64_t step, int64_t x, int64_t x_stride, int64_t columns, int64_t out, \
        int64_t out_stride)                                                             \
    {                                                                                   \
        if (WIDE) {                                                                     \
            MEET(6, form, 4)                                                            \
            MEET(3, form, 4)                                                            \
            MEET(2, form, 4)                                                            \
        }                                                                               \
        MEET(1, form, 4)                                                                \
    }

WIDE_TILE(tile_f32_wide, AT_FLOAT32)

#if HAS_BF16
TILE(tile_dot, DOT)
WIDE_TILE(tile_dot_wide, DOT)
#else
// Never called: has_bf16_dot is 0.
#define NO_TILE(name)                                                                   \
    void name(                                                                          \
        int64_t rows, int64_t w, int64_t step, int64_t x, int64_t x_stride, int64_t columns, int64_t out, \
        int64_t out_stride)                                                             \
    {                                                                                   \
        (void)rows, (void)w, (void)step, (void)x, (void)x_stride, (void)columns, (void)out, (void)out_stride; \
    }

NO_TILE(tile_dot)
NO_TILE(tile_dot_wide)
#endif

// --- epilogues ----------------------------------------------------------------------------------------

void add_bias(int64_t tile, int64_t stride, int64_t rows, int64_t bias)
{
    vf low = v_load(bias), high = v_load(bias + 64);
    for (int64_t m = 0; m < rows; m++) {
        int64_t row = tile + m * stride;
        v_store(row, v_add(v_load(row), low));
        v_store(row + 64, v_add(v_load(row + 64), high));
    }
}

void copy_tile(int64_t tile, int64_t tile_stride, int64_t out, int64_t out_stride, int64_t rows)
{
    for (int64_t m = 0; m < rows; m++)
        memcpy((void *)(out + m * out_stride), (const void *)(tile + m * tile_stride), 4 * AT_PANEL);
}

void add_tile(int64_t tile, int64_t tile_stride, int64_t out, int64_t out_stride, int64_t rows)
{
    for (int64_t m = 0; m < rows; m++) {
        int64_t row = tile + m * tile_stride, target = out + m * out_stride;
        v_store(target, v_add(v_load(target), v_load(row)));
        v_store(target + 64, v_add(v_load(target + 64), v_load(row + 64)));
    }
}
