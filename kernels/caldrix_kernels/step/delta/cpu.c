// Items of a gated delta net's layer between its projections: convolution, recurrence, gated norm.
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
void conv_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
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

// A sequence, a value head and some columns of it.
int64_t delta_items(int64_t step, int64_t row)
{
    int64_t parts = word(row, AT_VALUE_DIM) / word(row, AT_COLUMNS);
    return word(step, AT_SEQUENCES) * word(row, AT_VALUE_HEADS) * parts;
}

// The rows of one sequence, one after the other, through some columns of one value head's state.
void delta_item(int64_t step, int64_t thread, int64_t row, int64_t item)
{
    (void)thread;
    int64_t key_heads = word(row, AT_KEY_HEADS), value_heads = word(row, AT_VALUE_HEADS);
    int64_t key_dim = word(row, AT_KEY_DIM), value_dim = word(row, AT_VALUE_DIM);
    int64_t columns = word(row, AT_COLUMNS), parts = value_dim / columns, column = item % parts * columns;
    int64_t head = item / parts % value_heads, sequence = item / parts / value_heads;
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
        rows, x + key_head * key_dim * 4, x + (key_heads + key_head) * key_dim * 4, x + values * 4, stride,
        decay, beta, stride, before != 0 ? before + place : 0, after, key_dim, columns,
        out + (head * value_dim + column) * 4, out_stride, value_dim * 4);
}

void gated_norm_item(int64_t step, int64_t thread, int64_t row, int64_t m)
{
    (void)thread;
    int64_t value_dim = word(row, AT_VALUE_DIM), act = word(step, AT_ACT), size = act_bytes(act);
    int64_t gain = address_at(step, word(row, AT_WEIGHT)), epsilon = word(row, AT_EPSILON);
    kernel_7 norm = (kernel_7)kernel_at(step, AT_GATED_NORM_HEAD);
    int64_t x = address_at(step, word(row, AT_SOURCE)) + m * word(row, AT_SOURCE_STRIDE);
    int64_t z = address_at(step, word(row, AT_GATE)) + m * word(row, AT_GATE_STRIDE) + word(row, AT_GATE_AT);
    int64_t out = address_at(step, word(row, AT_TARGET)) + m * word(row, AT_TARGET_STRIDE);
    for (int64_t head = 0; head < word(row, AT_VALUE_HEADS); head++) {
        int64_t column = head * value_dim;
        norm(act, x + 4 * column, z + 4 * column, gain, out + size * column, value_dim, epsilon);
    }
}
