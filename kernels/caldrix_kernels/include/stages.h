// What the stages of the interpreter share: work sharing, the tables of a step, the stages themselves.
#pragma once

#include "kernels.h"

enum { MAX_CLAIM = 8, ONE_BY_ONE = 1 << 30, TILE_ROW = AT_PANEL * 4, ONE_BITS = 0x3F800000 };

// See schedule/cpu.c.
int64_t claim_size(int64_t item, int64_t end, int64_t chunk, int64_t share);
int64_t claim(int64_t step, int64_t base, int64_t end, int64_t chunk, int64_t share);
void finish(int64_t step, int64_t end, int64_t count);
void wait_finished(int64_t step, int64_t end);

// Each takes the number of its first item and returns that after its last.
int64_t embed_stage(int64_t step, int64_t base, int64_t row);
int64_t gather_stage(int64_t step, int64_t base, int64_t row);
int64_t norm_stage(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t linear_stage(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t heads_stage(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t attention_split(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t attention_whole(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t route_stage(int64_t step, int64_t base, int64_t row);
int64_t dispatch_stage(int64_t step, int64_t thread, int64_t base, int64_t row);
int64_t combine_stage(int64_t step, int64_t base, int64_t row);
int64_t conv_stage(int64_t step, int64_t base, int64_t row);
int64_t delta_stage(int64_t step, int64_t base, int64_t row);
int64_t gated_norm_stage(int64_t step, int64_t base, int64_t row);

INLINE int64_t word(int64_t block, int64_t index) { return load_i64(block + 8 * index); }

// An entry of a table whose address stands in a word of the step.
INLINE int64_t entry(int64_t step, int64_t table, int64_t index) { return word(word(step, table), index); }

// The address table's entry.
INLINE int64_t address_at(int64_t step, int64_t index) { return entry(step, AT_ADDRESSES, index); }

// The kernel table's entry.
INLINE int64_t kernel_at(int64_t step, int64_t index) { return entry(step, AT_KERNELS, index); }

INLINE int64_t row_count(int64_t step, int64_t row)
{
    return word(row, AT_DOMAIN) == 1 ? word(step, AT_WANTED) : word(step, AT_ROWS);
}

INLINE int64_t scratch_of(int64_t step, int64_t thread)
{
    return word(step, AT_SCRATCH) + thread * word(step, AT_SCRATCH_BYTES);
}

// Address of a linear's input. Few rows were normed by each thread for itself, see `norm_stage`.
INLINE int64_t source_of(int64_t step, int64_t thread, int64_t row, int64_t rows)
{
    int64_t index = word(row, AT_SOURCE);
    if (index == AT_NORMED && rows <= AT_SMALL_ROWS)
        return word(step, AT_PRIVATE) + thread * word(step, AT_PRIVATE_BYTES);
    return address_at(step, index);
}

// Few rows: claims shrink from a 1/(2 threads) part of the rest; many rows: one panel is work enough.
INLINE int64_t share_of(int64_t step, int64_t rows)
{
    return rows <= AT_SMALL_ROWS ? 2 * word(step, AT_THREADS) : ONE_BY_ONE;
}

// Parts that a stage's rows are cut into. Neighbouring items share one, which stays in the cache.
INLINE int64_t row_blocks(int64_t rows) { return (rows + AT_ROW_BLOCK - 1) / AT_ROW_BLOCK; }

// How many rows the buffers of a row's experts have.
INLINE int64_t places_of(int64_t step, int64_t row) { return word(step, AT_MAX_ROWS) * word(row, AT_TOP_K); }

// Address of a group of the route tables: expert, first place, places.
INLINE int64_t group_at(int64_t step, int64_t row, int64_t routes, int64_t number)
{
    return routes + 8 * (AT_ROUTE_TABLES + 4 * places_of(step, row) + 3 * number);
}

// A packed matrix and the rows that meet it, as a row of the program and the step say.
typedef struct {
    kernel_8 tile;
    int64_t columns, step_bytes, panel_bytes, weight, bias, x, x_stride;
} matrix;

INLINE matrix matrix_of(int64_t step, int64_t thread, int64_t row, int64_t rows)
{
    int64_t form = word(row, AT_FORMAT), bias = word(row, AT_BIAS);
    int dot = form == AT_BF16 && word(step, AT_ACT) == AT_ACT_BF16;
    return (matrix){
        .tile = (kernel_8)kernel_at(step, dot ? AT_TILE_DOT : form),
        .columns = word(row, AT_COLUMNS),
        .step_bytes = word(row, AT_STEP_BYTES),
        .panel_bytes = word(row, AT_PANEL_BYTES),
        .weight = address_at(step, word(row, AT_WEIGHT)),
        .bias = bias != 0 ? address_at(step, bias) : 0,
        .x = source_of(step, thread, row, rows),
        .x_stride = word(row, AT_SOURCE_STRIDE),
    };
}

// `count` rows from row m on times the panel at w, which is number `panel` for the bias.
INLINE void multiply(
    const matrix *by, int64_t w, int64_t panel, int64_t m, int64_t count, int64_t out, int64_t out_stride)
{
    int64_t x = by->x + m * by->x_stride;
    by->tile(count, w, by->step_bytes, x, by->x_stride, by->columns, out, out_stride);
    if (by->bias != 0) add_bias(out, out_stride, count, by->bias + panel * AT_PANEL * 4);
}
