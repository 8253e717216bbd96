// Sixteen float32 lanes on whatever registers the machine has: one of AVX-512, two of AVX2, four of SSE.
// Each lane sees the same operations in the same order on all of them, so the bits are the same.
#pragma once

#include <immintrin.h>

#include "layout.h"
#include "memory.h"

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

#if defined(__AVX512F__)
#define REGISTER_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define REGISTER_LANES 8
#else
#define REGISTER_LANES 4
#endif

// Instructions that narrow to bfloat16 and multiply it.
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif

enum { LANES = 16, PARTS = LANES / REGISTER_LANES };

typedef float reg __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t ireg __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t mask __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint16_t half_reg __attribute__((vector_size(2 * REGISTER_LANES)));
typedef struct { reg part[PARTS]; } vf;

// float16 -> float32, a NaN made quiet.
INLINE float widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest < 0x400) { // a subnormal number of 2**-24
        float value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    if (rest >= 0x7C00)
        return bits_to_float(sign | 0x7F800000 | rest << 13 | (rest > 0x7C00 ? 0x400000 : 0));
    return bits_to_float(sign | ((rest << 13) + (112u << 23)));
}

// --- registers: what the instruction sets name differently ----------------------------------------

// reg_fma: a * b + c, rounded once. reg_max: a > b ? a : b, so b where one is no number; reg_min alike.
#if REGISTER_LANES == 16
INLINE reg reg_fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
INLINE reg reg_max(reg a, reg b) { return _mm512_max_ps(a, b); }
INLINE reg reg_min(reg a, reg b) { return _mm512_min_ps(a, b); }
INLINE reg reg_widen_f16(half_reg halves) { return _mm512_cvtph_ps((__m256i)halves); }
#define QUARTERS(v)                                                                       \
    {_mm512_castps512_ps128((v).part[0]), _mm512_extractf32x4_ps((v).part[0], 1),         \
     _mm512_extractf32x4_ps((v).part[0], 2), _mm512_extractf32x4_ps((v).part[0], 3)}
#elif REGISTER_LANES == 8
INLINE reg reg_fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
INLINE reg reg_max(reg a, reg b) { return _mm256_max_ps(a, b); }
INLINE reg reg_min(reg a, reg b) { return _mm256_min_ps(a, b); }
#define QUARTERS(v)                                                                       \
    {_mm256_castps256_ps128((v).part[0]), _mm256_extractf128_ps((v).part[0], 1),          \
     _mm256_castps256_ps128((v).part[1]), _mm256_extractf128_ps((v).part[1], 1)}
#else
// Four calls of the C library, so inlining it would bring nothing.
static __attribute__((noinline, unused)) reg reg_fma(reg a, reg b, reg c)
{
    reg result;
    UNROLLED for (int lane = 0; lane < REGISTER_LANES; lane++)
        result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return result;
}
INLINE reg reg_max(reg a, reg b) { return _mm_max_ps(a, b); }
INLINE reg reg_min(reg a, reg b) { return _mm_min_ps(a, b); }
#define QUARTERS(v) {(v).part[0], (v).part[1], (v).part[2], (v).part[3]}
#endif

// The upper bfloat16 of each lane, widened.
INLINE reg reg_upper_bf16(ireg words)
{
#if REGISTER_LANES == 8
    // A mask would take one register more than there are beside twelve sums.
    return (reg)_mm256_slli_epi32(_mm256_srli_epi32((__m256i)words, 16), 16);
#else
    return (reg)(words & 0xFFFF0000);
#endif
}

#if REGISTER_LANES == 8 && defined(__F16C__)
INLINE reg reg_widen_f16(half_reg halves) { return _mm256_cvtph_ps((__m128i)halves); }
#elif REGISTER_LANES < 16
INLINE reg reg_widen_f16(half_reg halves)
{
    reg result;
    UNROLLED for (int lane = 0; lane < REGISTER_LANES; lane++) result[lane] = widen_f16(halves[lane]);
    return result;
}
#endif

INLINE reg reg_broadcast(float value)
{
#if REGISTER_LANES == 16
    return _mm512_set1_ps(value);
#elif REGISTER_LANES == 8
    return _mm256_set1_ps(value);
#else
    return _mm_set1_ps(value);
#endif
}

#define REGISTER_ACCESSORS(name, type)                         \
    INLINE type load_##name(int64_t address)                   \
    {                                                          \
        type value;                                            \
        memcpy(&value, (const void *)address, sizeof value);   \
        return value;                                          \
    }
REGISTER_ACCESSORS(reg, reg)
REGISTER_ACCESSORS(ireg, ireg)
REGISTER_ACCESSORS(half_reg, half_reg)

// --- vectors of sixteen lanes ---------------------------------------------------------------------

#define EACH_PART UNROLLED for (int p = 0; p < PARTS; p++)

#define VECTOR_OPERATION(name, expression)  \
    INLINE vf name(vf a, vf b)              \
    {                                       \
        vf result;                          \
        EACH_PART result.part[p] = expression; \
        return result;                      \
    }
VECTOR_OPERATION(v_add, a.part[p] + b.part[p])
VECTOR_OPERATION(v_sub, a.part[p] - b.part[p])
VECTOR_OPERATION(v_mul, a.part[p] * b.part[p])
VECTOR_OPERATION(v_div, a.part[p] / b.part[p])
VECTOR_OPERATION(v_max, reg_max(a.part[p], b.part[p]))
VECTOR_OPERATION(v_min, reg_min(a.part[p], b.part[p]))

INLINE vf v_fma(vf a, vf b, vf c)
{
    vf result;
    EACH_PART result.part[p] = reg_fma(a.part[p], b.part[p], c.part[p]);
    return result;
}

INLINE vf v_lanes(float value)
{
    vf result;
    EACH_PART result.part[p] = reg_broadcast(value);
    return result;
}

INLINE float v_first(vf value) { return value.part[0][0]; }

INLINE vf v_load(int64_t address)
{
    vf result;
    memcpy(&result, (const void *)address, sizeof result);
    return result;
}

INLINE void v_store(int64_t address, vf value) { memcpy((void *)address, &value, sizeof value); }

// The float32 at `address` in every lane.
INLINE vf v_load_lanes(int64_t address) { return v_lanes(load_f32(address)); }

// `value` in the lanes low <= lane < high, `other` in the rest; the limits may lie anywhere in int32.
INLINE vf v_keep(int64_t low, int64_t high, vf value, float other)
{
    static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ireg rest = (ireg)reg_broadcast(other);
    vf result;
    EACH_PART
    {
        mask number;
        memcpy(&number, numbers + p * REGISTER_LANES, sizeof number);
        ireg keep = (ireg)((number < (int32_t)high) & (number >= (int32_t)low));
        result.part[p] = (reg)(((ireg)value.part[p] & keep) | (rest & ~keep));
    }
    return result;
}

// All lanes combined by the fixed tree i, i+8; i, i+4; i, i+2; i, i+1.
#define REDUCE(v, combine)                                                     \
    ({                                                                         \
        __m128 quarter[4] = QUARTERS(v);                                       \
        __m128 a = combine(quarter[0], quarter[2]);                            \
        a = combine(a, combine(quarter[1], quarter[3]));                       \
        a = combine(a, _mm_movehl_ps(a, a));                                   \
        _mm_cvtss_f32(combine(a, _mm_shuffle_ps(a, a, 1)));                    \
    })

INLINE float v_sum(vf value) { return REDUCE(value, _mm_add_ps); }

INLINE float v_largest(vf value) { return REDUCE(value, _mm_max_ps); }

// exp(x) in each lane, x clamped to [-87, 88]; see intrinsics/vector.py for the method and its sources.
INLINE vf v_exp(vf x)
{
    static const float coefficients[5] = {
        (float)1.3981999507e-3, (float)8.3334519073e-3, (float)4.1665795894e-2,
        (float)1.6666665459e-1, (float)5.0000001201e-1};
    const vf magic = v_lanes(12582912.0f);
    x = v_min(v_max(x, v_lanes(-87.0f)), v_lanes(88.0f));
    vf shifted = v_fma(x, v_lanes((float)1.4426950408889634), magic);
    vf n = v_sub(shifted, magic);
    vf r = v_fma(n, v_lanes((float)-0.693145751953125), x);
    r = v_fma(n, v_lanes((float)-1.428606820309417e-06), r);
    vf poly = v_lanes((float)1.9875691500e-4);
    UNROLLED for (int i = 0; i < 5; i++) poly = v_fma(poly, r, v_lanes(coefficients[i]));
    poly = v_fma(poly, v_mul(r, r), v_add(r, v_lanes(1.0f)));
    EACH_PART poly.part[p] = (reg)((ireg)poly.part[p] + ((ireg)shifted.part[p] << 23));
    return poly;
}

// 2**x in each lane for x <= 0, taken as at least -125; see intrinsics/vector.py.
INLINE vf v_exp2(vf x)
{
    static const float coefficients[5] = {
        (float)0.009671512688149668, (float)0.055507337435740836, (float)0.2402224208463513,
        (float)0.6931469775987168, 1.0f};
    const vf magic = v_lanes(12582912.0f);
    x = v_max(x, v_lanes(-125.0f));
    vf shifted = v_add(x, magic);
    vf r = v_sub(x, v_sub(shifted, magic));
    vf poly = v_lanes((float)0.0013264727247132993);
    UNROLLED for (int i = 0; i < 5; i++) poly = v_fma(poly, r, v_lanes(coefficients[i]));
    EACH_PART poly.part[p] = (reg)((ireg)poly.part[p] + ((ireg)shifted.part[p] << 23));
    return poly;
}

// 1 / (1 + exp(-x)) in each lane.
INLINE vf v_sigmoid(vf x)
{
    vf decay = v_exp(v_sub(v_lanes(-0.0f), x));
    return v_div(v_lanes(1.0f), v_add(v_lanes(1.0f), decay));
}

// x / (1 + exp(-x)) in each lane.
INLINE vf v_silu(vf x)
{
    vf decay = v_exp(v_sub(v_lanes(-0.0f), x));
    return v_div(x, v_add(v_lanes(1.0f), decay));
}

// log(1 + u) in each lane, 0 <= u <= 1; see intrinsics/vector.py.
INLINE vf v_log1p(vf u)
{
    vf s = v_div(u, v_add(u, v_lanes(2.0f)));
    vf square = v_mul(s, s), series = v_lanes((float)(1.0 / 17));
    UNROLLED for (int n = 15; n > 1; n -= 2) series = v_fma(series, square, v_lanes((float)(1.0 / n)));
    vf twice = v_add(s, s);
    return v_fma(twice, v_mul(series, square), twice);
}

// log(1 + exp(x)) in each lane.
INLINE vf v_softplus(vf x)
{
    vf decay = v_exp(v_min(x, v_sub(v_lanes(-0.0f), x)));
    return v_add(v_max(x, v_lanes(0.0f)), v_log1p(decay));
}

// 16 lanes to memory as an activation, bfloat16 by nearest even.
INLINE void store_activation(int64_t address, vf value, int64_t act)
{
    if (act == AT_ACT_F32) {
        v_store(address, value);
        return;
    }
#if HAS_BF16
    if (act == AT_ACT_BF16) {
        __m256bh halves = _mm512_cvtneps_pbh(value.part[0]);
        memcpy((void *)address, &halves, sizeof halves);
        return;
    }
#endif
    EACH_PART
    {
        ireg bits = (ireg)value.part[p];
        bits += ((bits >> 16) & 1) + 0x7FFF;
        if (act == AT_ACT_BF16) {
            half_reg halves = __builtin_convertvector(bits >> 16, half_reg);
            memcpy((void *)(address + 2 * p * REGISTER_LANES), &halves, sizeof halves);
        } else {
            bits &= 0xFFFF0000;
            memcpy((void *)(address + 4 * p * REGISTER_LANES), &bits, sizeof bits);
        }
    }
}

// The sum of x[0:width]**2, float32; width a multiple of 16. Sixteen partial sums, then the tree.
INLINE float sum_of_squares(int64_t x, int64_t width)
{
    vf total = v_lanes(0.0f);
    for (int64_t at = 0; at < 4 * width; at += 64) {
        vf value = v_load(x + at);
        total = v_fma(value, value, total);
    }
    return v_sum(total);
}
