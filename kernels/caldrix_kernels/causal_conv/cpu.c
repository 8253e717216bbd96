// A short causal convolution of each channel, one row at a time, then silu.
// The inputs before a row are the rows above it in the buffer and, before those, the state.
#include "kernels.h"
#include "vector.h"

// out = silu(sum over j of weight[j] * the row taps-1-j back), float32[channels], a multiple of 16.
//
// x: the row, with `available` rows before it in the buffer, `stride` bytes apart; weight:
// float32[taps][channels]; state: float32[taps - 1][channels], oldest first, what came before the buffer, or
// 0 for nothing.
void conv_row(
    int64_t x, int64_t stride, int64_t available, int64_t state, int64_t weight, int64_t channels,
    int64_t taps, int64_t out)
{
    int64_t row_bytes = 4 * channels, first = state == 0 ? larger(0, taps - 1 - available) : 0;
    for (int64_t at = 0; at < row_bytes; at += 64) {
        vf total = v_lanes(0.0f);
        for (int64_t j = first; j < taps; j++) {
            int64_t back = taps - 1 - j;
            int64_t row = back <= available ? x - back * stride : state + (j + available) * row_bytes;
            total = v_fma(v_load(weight + j * row_bytes + at), v_load(row + at), total);
        }
        v_store(out + at, v_silu(total));
    }
}

// target: the last taps - 1 inputs, oldest first, after `count` rows of which x is the last.
//
// Laid out as the state of `conv_row`, which stands elsewhere.
void conv_state(
    int64_t x, int64_t stride, int64_t count, int64_t state, int64_t target, int64_t channels, int64_t taps)
{
    int64_t row_bytes = channels * 4;
    for (int64_t row = 0; row < taps - 1; row++) {
        int64_t back = taps - 2 - row;
        void *place = (void *)(target + row * row_bytes);
        if (back < count)
            memcpy(place, (const void *)(x - back * stride), (size_t)row_bytes);
        else if (state == 0)
            memset(place, 0, (size_t)row_bytes);
        else
            memcpy(place, (const void *)(state + (row + count) * row_bytes), (size_t)row_bytes);
    }
}
