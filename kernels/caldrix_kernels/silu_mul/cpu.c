// silu(gate) * up on a tile whose 32 columns are 16 gates and their 16 ups.
#include "kernels.h"
#include "vector.h"

// out[m, 0:16] = silu(tile[m, 0:16]) * tile[m, 16:32], stored as an activation.
void silu_mul_tile(
    int64_t act, int64_t tile, int64_t tile_stride, int64_t out, int64_t out_stride, int64_t rows)
{
    for (int64_t m = 0; m < rows; m++) {
        int64_t row = tile + m * tile_stride;
        vf gate = v_load(row), up = v_load(row + 64);
        store_activation(out + m * out_stride, v_mul(v_silu(gate), up), act);
    }
}
