// The index of the highest of a row.
#include <math.h>

#include "kernels.h"
#include "vector.h"

// int64 at `out`: the lowest index of the highest of float32[width], -1 when any is not finite.
//
// Whole vectors are read: up to 15 floats more than `width`.
void argmax_row(int64_t x, int64_t width, int64_t out)
{
    vf tops = v_lanes(-INFINITY), spoiled = v_lanes(0.0f);
    for (int64_t first = 0; first < width; first += LANES) {
        vf part = v_load(x + 4 * first);
        tops = v_max(v_keep(0, width - first, part, -INFINITY), tops);
        // A number less itself is 0 when it is finite, else no number.
        spoiled = v_add(spoiled, v_keep(0, width - first, v_sub(part, part), 0.0f));
    }
    float highest = v_largest(tops), spoil = v_sum(spoiled);
    int64_t place = 0;
    while (spoil == 0.0f && load_f32(x + 4 * place) != highest) place++;
    store_i64(out, spoil == 0.0f ? place : -1);
}
