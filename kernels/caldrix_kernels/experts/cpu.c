// Mixture of experts: which experts a row goes to, and the weighted sum of what they made of it.
// Softmax and sums across a row as everywhere: sixteen lanes (expert mod 16), then the fixed tree.
#include "kernels.h"
#include "vector.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>

// Stands for the score of an expert that was picked, or is none.
#define PICKED (-__builtin_inff())

// Clamp scores[0:experts], NaN to the lowest; PICKED up to a multiple of 16. Returns the largest.
static float make_finite(int64_t scores, int64_t experts)
{
    vf tops = v_lanes(PICKED);
    for (int64_t i = 0; i < experts; i += LANES) {
        vf part = v_min(v_max(v_load(scores + 4 * i), v_lanes(-FLT_MAX)), v_lanes(FLT_MAX));
        part = v_keep(0, experts - i, part, PICKED);
        v_store(scores + 4 * i, part);
        tops = v_max(part, tops);
    }
    return v_largest(tops);
}

// The sum of exp(score - highest) over scores[0:experts]; that of PICKED is nothing beside a 1.
static float sum_of_powers(int64_t scores, float highest, int64_t experts)
{
    vf sums = v_lanes(0.0f);
    for (int64_t i = 0; i < experts; i += LANES)
        sums = v_add(sums, v_exp(v_sub(v_load(scores + 4 * i), v_lanes(highest))));
    return v_sum(sums);
}

// The lowest id of the largest of scores[0:experts].
static int64_t largest(int64_t scores, int64_t experts)
{
    int64_t best = 0;
    for (int64_t i = 1; i < experts; i++)
        if (load_f32(scores + 4 * i) > load_f32(scores + 4 * best)) best = i;
    return best;
}

// Put an expert in ascending order behind the `picked` that are there.
static void insert(int64_t ids, int64_t weights, int64_t picked, int64_t id, float weight)
{
    int64_t place = picked;
    for (; place > 0 && load_i64(ids + (place - 1) * 8) > id; place--) {
        store_i64(ids + place * 8, load_i64(ids + (place - 1) * 8));
        store_f32(weights + place * 4, load_f32(weights + (place - 1) * 4));
    }
    store_i64(ids + place * 8, id);
    store_f32(weights + place * 4, weight);
}

// The top_k experts of the highest scores, the lower id among equals, weighted by softmax; see
// experts/numba_cpu.py. scores: float32[experts, rounded up to 16], overwritten.
void route_row(
    int64_t scores, int64_t experts, int64_t top_k, int64_t normalise, int64_t ids, int64_t weights)
{
    bool spoiled = false;
    for (int64_t i = 0; i < experts; i++) spoiled |= isnan(load_f32(scores + 4 * i));
    float highest = make_finite(scores, experts), total = sum_of_powers(scores, highest, experts);
    for (int64_t picked = 0; picked < top_k; picked++) {
        int64_t best = largest(scores, experts);
        float power = v_first(v_exp(v_lanes(load_f32(scores + best * 4) - highest)));
        store_f32(scores + best * 4, PICKED);
        insert(ids, weights, picked, best, power / total);
    }
    if (normalise == 1) {
        total = 0.0f;
        for (int64_t i = 0; i < top_k; i++) total += load_f32(weights + i * 4);
        for (int64_t i = 0; i < top_k; i++) store_f32(weights + i * 4, load_f32(weights + i * 4) / total);
    }
    if (spoiled)
        for (int64_t i = 0; i < top_k; i++) store_f32(weights + i * 4, NAN);
}

// out[0:width] += the sum over i < top_k, in order, of weights[i] times row places[i] of `parts`.
//
// out: float32[width], a multiple of 16; parts: float32 rows, `stride` bytes apart; places: int64[top_k];
// weights: float32[top_k]; top_k >= 1. The sum is a chain of fused steps and is added to `out` once.
void combine_row(
    int64_t out, int64_t width, int64_t parts, int64_t stride, int64_t places, int64_t weights, int64_t top_k)
{
    for (int64_t at = 0; at < 4 * width; at += 64) {
        vf total = v_lanes(0.0f);
        for (int64_t i = 0; i < top_k; i++) {
            vf part = v_load(parts + load_i64(places + 8 * i) * stride + at);
            total = v_fma(v_load_lanes(weights + 4 * i), part, total);
        }
        v_store(out + at, v_add(v_load(out + at), total));
    }
}
