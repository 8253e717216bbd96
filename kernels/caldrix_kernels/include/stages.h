// What the stages of the interpreter share: work sharing, the tables of a step, the items themselves.
#pragma once

#include "kernels.h"

enum { TILE_ROW = AT_PANEL * 4 };

// See schedule/cpu.c.
int64_t claim_size(int64_t item, int64_t end, int64_t chunk, int64_t share);
int64_t claim(int64_t step, int64_t base, int64_t end, int64_t chunk, int64_t share);
void finish(int64_t step, int64_t end, int64_t count);
void wait_finished(int64_t step, int64_t end);

// The items of a stage: known from the step and the program alone, so that no thread can differ.
int64_t linear_items(int64_t step, int64_t row);
int64_t head_items(int64_t step, int64_t row);
int64_t attention_items(int64_t step, int64_t row);
int64_t delta_items(int64_t step, int64_t row);

// One item of a stage, on a thread.
void embed_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void gather_item(int64_t step, int64_t thread, int64_t row, int64_t number);
void norm_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void linear_item(int64_t step, int64_t thread, int64_t row, int64_t item);
void head_item(int64_t step, int64_t thread, int64_t row, int64_t item);
void attention_item(int64_t step, int64_t thread, int64_t row, int64_t item);
void route_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void dispatch_item(int64_t step, int64_t thread, int64_t row, int64_t place);
void combine_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void conv_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void delta_item(int64_t step, int64_t thread, int64_t row, int64_t item);
void gated_norm_item(int64_t step, int64_t thread, int64_t row, int64_t m);
void argmax_item(int64_t step, int64_t thread, int64_t row, int64_t m);

// Few rows: every thread norms all of them into memory of its own, which is cheaper than a barrier.
void norm_alone(int64_t step, int64_t thread, int64_t row);

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

// Address of a linear's input. Few rows were normed by each thread for itself, see `norm_alone`.
INLINE int64_t source_of(int64_t step, int64_t thread, int64_t row)
{
    int64_t index = word(row, AT_SOURCE);
    if (index == AT_NORMED && row_count(step, row) <= AT_SMALL_ROWS)
        return word(step, AT_PRIVATE) + thread * word(step, AT_PRIVATE_BYTES);
    return address_at(step, index);
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

INLINE matrix matrix_of(int64_t step, int64_t thread, int64_t row)
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
        .x = source_of(step, thread, row),
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
