// RMS norm of one head times a gain, then times silu of a gate. Sums as in rmsnorm.
#include "kernels.h"
#include "vector.h"

// out = ((x * r) * gain) * silu(z), stored as an activation; x, z, gain: float32[width], a multiple of 16.
void gated_norm_head(
    int64_t act, int64_t x, int64_t z, int64_t gain, int64_t out, int64_t width, int64_t epsilon_bits)
{
    float mean = sum_of_squares(x, width) / (float)width;
    vf factor = v_lanes(1.0f / __builtin_sqrtf(mean + bits_to_float((uint32_t)epsilon_bits)));
    for (int64_t i = 0; i < width; i += LANES) {
        vf value = v_mul(v_mul(v_load(x + 4 * i), factor), v_load(gain + 4 * i));
        store_activation(out + i * act_bytes(act), v_mul(value, v_silu(v_load(z + 4 * i))), act);
    }
}
