// Rotary embedding of one head in place: (a, b) -> (a cos - b sin, b cos + a sin).
// The two of a pair stand half a rotary width apart.
#include "kernels.h"
#include "vector.h"

// The first `half` (a multiple of 16) pairs; table is [cos[half] | sin[half]].
static void rotate_vectors(int64_t head, int64_t table, int64_t half)
{
    for (int64_t at = 0; at < 4 * half; at += 64) {
        int64_t first = head + at, second = first + 4 * half;
        vf a = v_load(first), b = v_load(second);
        vf cos = v_load(table + at), sin = v_load(table + 4 * half + at);
        v_store(first, v_sub(v_mul(a, cos), v_mul(b, sin)));
        v_store(second, v_add(v_mul(b, cos), v_mul(a, sin)));
    }
}

// head: float32[>= rotary_dim]; table: float32[cos | sin] of the position, rotary_dim / 2 each.
void rotate(int64_t head, int64_t table, int64_t rotary_dim)
{
    int64_t half = rotary_dim >> 1;
    if (half % LANES == 0) {
        rotate_vectors(head, table, half);
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        float a = load_f32(head + 4 * i), b = load_f32(head + 4 * (half + i));
        float cos = load_f32(table + 4 * i), sin = load_f32(table + 4 * (half + i));
        store_f32(head + 4 * i, a * cos - b * sin);
        store_f32(head + 4 * (half + i), b * cos + a * sin);
    }
}

void scale_into(int64_t act, int64_t source, int64_t scale_bits, int64_t out, int64_t count)
{
    vf scale = v_lanes(bits_to_float((uint32_t)scale_bits));
    int64_t size = LANES * act_bytes(act);
    for (int64_t i = 0; i < count; i++)
        store_activation(out + i * size, v_mul(v_load(source + 64 * i), scale), act);
}
