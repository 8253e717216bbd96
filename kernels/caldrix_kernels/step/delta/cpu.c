// A gated delta net's layer between its projections: convolution, recurrence, gated norm.
//
// A row of the convolved buffer holds all query heads, key heads and value heads after convolution, queries
// and keys normalised, then decay and beta of each value head.
#include "stages.h"

static int64_t channels_of(int64_t row)
{
    int64_t keys = word(row, AT_KEY_HEADS) * word(row, AT_KEY_DIM);
    return 2 * keys + word(row, AT_VALUE_HEADS) * word(row, AT_VALUE_DIM);
}

// Address of the op's state of row m's sequence in a table of copies, 0 before the first token.
static int64_t state_of(int64_t step, int64_t row, int64_t m, int64_t table)
{
    int64_t copy = entry(step, table, entry(step, AT_SLOTS, m));
    return copy != 0 ? copy + word(row, AT_STATE_OFFSET) : 0;
}

// Row m of the convolved buffer; the last row of a sequence leaves the state of the convolution.
static void conv_one(int64_t step, int64_t row, int64_t m)
{
    int64_t channels = channels_of(row), taps = word(row, AT_TAPS), stride = word(row, AT_SOURCE_STRIDE);
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * stride;
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    int64_t number = entry(step, AT_ROW_NUMBERS, m), state = state_of(step, row, m, AT_RECURRENT);
    int64_t weight = address_at(step, word(row, AT_WEIGHT));
    ((kernel_8)kernel_at(step, AT_CONV_ROW))(x, stride, number, state, weight, channels, taps, out);
    if (m + 1 == word(step, AT_ROWS) || entry(step, AT_ROW_NUMBERS, m + 1) == 0) {
        int64_t after = state_of(step, row, m, AT_RECURRENT_NEXT);
        ((kernel_7)kernel_at(step, AT_CONV_STATE))(x, stride, number + 1, state, after, channels, taps);
    }
    int64_t key_dim = word(row, AT_KEY_DIM), key_heads = word(row, AT_KEY_HEADS);
    kernel_4 normalise = (kernel_4)kernel_at(step, AT_NORMALISE_HEAD);
    for (int64_t head = 0; head < 2 * key_heads; head++) {
        int64_t place = out + head * key_dim * 4;
        normalise(place, key_dim, head < key_heads ? word(row, AT_SCALE) : ONE_BITS, place);
    }
    int64_t heads = round_up(word(row, AT_VALUE_HEADS), 16), decay = out + channels * 4;
    ((kernel_7)kernel_at(step, AT_GATES_ROW))(
        x + word(row, AT_A_AT), x + word(row, AT_B_AT), address_at(step, word(row, AT_A_LOG)),
        address_at(step, word(row, AT_DT_BIAS)), heads, decay, decay + heads * 4);
}

int64_t conv_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_ROWS), item;
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        conv_one(step, row, item - base);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

// The rows of one sequence through `columns` columns of one value head's state.
static void delta_columns(int64_t step, int64_t row, int64_t sequence, int64_t head, int64_t column)
{
    int64_t key_heads = word(row, AT_KEY_HEADS), value_heads = word(row, AT_VALUE_HEADS);
    int64_t key_dim = word(row, AT_KEY_DIM), value_dim = word(row, AT_VALUE_DIM);
    int64_t m = entry(step, AT_SEQUENCE_ROWS, sequence), rows = entry(step, AT_SEQUENCE_LENGTHS, sequence);
    int64_t stride = word(row, AT_SOURCE_STRIDE), out_stride = word(row, AT_TARGET_STRIDE);
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * stride;
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * out_stride;
    int64_t place = (head * key_dim * value_dim + column) * 4;
    int64_t before = state_of(step, row, m, AT_RECURRENT);
    int64_t after = state_of(step, row, m, AT_RECURRENT_NEXT) + place;
    int64_t key_head = head * key_heads / value_heads;
    int64_t values = 2 * key_heads * key_dim + head * value_dim + column;
    int64_t decay = x + (channels_of(row) + head) * 4, beta = decay + round_up(value_heads, 16) * 4;
    ((kernel_15)kernel_at(step, AT_DELTA_HEAD))(
        rows, x + key_head * key_dim * 4, x + (key_heads + key_head) * key_dim * 4, x + values * 4, stride, decay,
        beta, stride, before != 0 ? before + place : 0, after, key_dim, word(row, AT_COLUMNS),
        out + (head * value_dim + column) * 4, out_stride, value_dim * 4);
}

// An item is a sequence and some columns of one value head: its rows come one after the other.
int64_t delta_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t heads = word(row, AT_VALUE_HEADS), columns = word(row, AT_COLUMNS), item;
    int64_t parts = word(row, AT_VALUE_DIM) / columns, end = base + word(step, AT_SEQUENCES) * heads * parts;
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t unit = item - base;
        delta_columns(step, row, unit / parts / heads, unit / parts % heads, unit % parts * columns);
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}

int64_t gated_norm_stage(int64_t step, int64_t base, int64_t row)
{
    int64_t end = base + word(step, AT_ROWS), value_dim = word(row, AT_VALUE_DIM), item;
    int64_t act = word(step, AT_ACT), size = act == AT_ACT_BF16 ? 2 : 4;
    int64_t gain = address_at(step, word(row, AT_WEIGHT)), epsilon = word(row, AT_EPSILON);
    kernel_7 norm = (kernel_7)kernel_at(step, AT_GATED_NORM_HEAD);
    while ((item = claim(step, base, end, 1, ONE_BY_ONE)) >= 0) {
        int64_t m = item - base;
        int64_t x = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
        int64_t z = address_at(step, word(row, AT_GATE)) + m * word(row, AT_GATE_STRIDE) + word(row, AT_GATE_AT);
        int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
        for (int64_t head = 0; head < word(row, AT_VALUE_HEADS); head++) {
            int64_t column = head * value_dim;
            norm(act, x + 4 * column, z + 4 * column, gain, out + size * column, value_dim, epsilon);
        }
        finish(step, end, 1);
    }
    wait_finished(step, end);
    return end;
}
