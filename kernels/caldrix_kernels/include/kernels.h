// Everything compiled that is called across files. All words are int64; addresses are words.
#pragma once

#include "layout.h"
#include "memory.h"

#define ARGUMENTS_2 int64_t, int64_t
#define ARGUMENTS_3 ARGUMENTS_2, int64_t
#define ARGUMENTS_4 ARGUMENTS_2, ARGUMENTS_2
#define ARGUMENTS_5 ARGUMENTS_3, ARGUMENTS_2
#define ARGUMENTS_6 ARGUMENTS_3, ARGUMENTS_3
#define ARGUMENTS_7 ARGUMENTS_4, ARGUMENTS_3
#define ARGUMENTS_8 ARGUMENTS_4, ARGUMENTS_4
#define ARGUMENTS_15 ARGUMENTS_8, ARGUMENTS_7
#define ARGUMENTS_16 ARGUMENTS_8, ARGUMENTS_8

// What the interpreter calls by address, from the kernel table.
typedef void (*kernel_2)(ARGUMENTS_2);
typedef void (*kernel_3)(ARGUMENTS_3);
typedef void (*kernel_4)(ARGUMENTS_4);
typedef void (*kernel_5)(ARGUMENTS_5);
typedef void (*kernel_6)(ARGUMENTS_6);
typedef void (*kernel_7)(ARGUMENTS_7);
typedef void (*kernel_8)(ARGUMENTS_8);
typedef void (*kernel_15)(ARGUMENTS_15);
typedef void (*kernel_16)(ARGUMENTS_16);

void tile_bf16(ARGUMENTS_8);
void tile_f16(ARGUMENTS_8);
void tile_f32(ARGUMENTS_8);
void tile_dot(ARGUMENTS_8);
void tile_f32_wide(ARGUMENTS_8);
void tile_dot_wide(ARGUMENTS_8);
void norm_row(ARGUMENTS_7);
void rotate(ARGUMENTS_3);
void silu_mul_tile(ARGUMENTS_6);
void attend_block(ARGUMENTS_16);
void merge_partials(ARGUMENTS_5);
void finish_head(ARGUMENTS_6);
void run_step(ARGUMENTS_2);
void route_row(ARGUMENTS_6);
void combine_row(ARGUMENTS_7);
void conv_row(ARGUMENTS_8);
void conv_state(ARGUMENTS_7);
void gates_row(ARGUMENTS_7);
void normalise_head(ARGUMENTS_4);
void delta_head(ARGUMENTS_15);
void gated_norm_head(ARGUMENTS_7);
void argmax_row(ARGUMENTS_3);

// linear: tile[m, 0:32] += bias; out[m, 0:32] = tile[m, 0:32]; out[m, 0:32] += tile[m, 0:32].
void add_bias(int64_t tile, int64_t stride, int64_t rows, int64_t bias);
void copy_tile(int64_t tile, int64_t tile_stride, int64_t out, int64_t out_stride, int64_t rows);
void add_tile(int64_t tile, int64_t tile_stride, int64_t out, int64_t out_stride, int64_t rows);

// rope: out[0:16 * count] = source[0:16 * count] * scale, stored as an activation; the scale as float32 bits.
enum { ONE_BITS = 0x3F800000 };
void scale_into(int64_t act, int64_t source, int64_t scale_bits, int64_t out, int64_t count);

// embed: one row widened to float32, from a row-major table or from the packed output head.
void embed_row_major(
    int64_t form, int64_t table, int64_t row_bytes, int64_t token, int64_t width, int64_t out);
void embed_panelled(
    int64_t form, int64_t panels, int64_t panel_bytes, int64_t token, int64_t width, int64_t out);

INLINE int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

// Bytes of one stored activation.
INLINE int64_t act_bytes(int64_t act) { return act == AT_ACT_BF16 ? 2 : 4; }

// attention: size of {acc, max, sum}, kept a multiple of 64.
INLINE int64_t partial_bytes(int64_t value_width) { return value_width * 4 + 64; }
