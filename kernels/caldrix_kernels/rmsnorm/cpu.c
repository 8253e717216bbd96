// RMS norm of one row: sixteen partial sums (column mod 16), one fixed tree, then x * r * gain.
#include "kernels.h"
#include "vector.h"

// x, gain: float32[width], zero beyond `true_width`; width a multiple of 16.
void norm_row(
    int64_t act, int64_t x, int64_t gain, int64_t out, int64_t width, int64_t true_width,
    int64_t epsilon_bits)
{
    float mean = sum_of_squares(x, width) / (float)true_width;
    vf factor = v_lanes(1.0f / __builtin_sqrtf(mean + bits_to_float((uint32_t)epsilon_bits)));
    for (int64_t i = 0; i < width; i += LANES) {
        vf value = v_mul(v_mul(v_load(x + 4 * i), factor), v_load(gain + 4 * i));
        store_activation(out + i * act_bytes(act), value, act);
    }
}
