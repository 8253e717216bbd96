// The gated delta rule of one value head, row after row; see delta_rule/numba_cpu.py for its source.
#include "kernels.h"
#include "vector.h"

// decay = exp(-exp(a_log) * softplus(a + dt_bias)), beta = sigmoid(b).
//
// All are float32[heads], heads a multiple of 16.
void gates_row(
    int64_t a, int64_t b, int64_t a_log, int64_t dt_bias, int64_t heads, int64_t decay, int64_t beta)
{
    for (int64_t at = 0; at < 4 * heads; at += 64) {
        vf rate = v_exp(v_load(a_log + at));
        vf step = v_softplus(v_add(v_load(a + at), v_load(dt_bias + at)));
        v_store(decay + at, v_exp(v_sub(v_lanes(-0.0f), v_mul(rate, step))));
        v_store(beta + at, v_sigmoid(v_load(b + at)));
    }
}

// out = x / sqrt(sum x**2 + 1e-6) * scale; float32[width], a multiple of 16; scale as float32 bits.
void normalise_head(int64_t x, int64_t width, int64_t scale_bits, int64_t out)
{
    float length = __builtin_sqrtf(sum_of_squares(x, width) + (float)1e-6);
    vf factor = v_lanes(1.0f / length), scale = v_lanes(bits_to_float((uint32_t)scale_bits));
    for (int64_t at = 0; at < 4 * width; at += 64)
        v_store(out + at, v_mul(v_mul(v_load(x + at), factor), scale));
}

// Where a head's rows and state are; strides in bytes.
typedef struct {
    int64_t rows, q, k, value, row_stride, decay, beta, gate_stride;
    int64_t source, target, key_dim, value_stride, out, out_stride;
} head;

#define EACH(vectors) UNROLLED for (int i = 0; i < vectors; i++)

// Store the state of one key, decayed for a row, and add to what it knows of the row's key.
INLINE void decay_key(int vectors, int64_t target, const vf *parts, vf fall, vf key, vf *known)
{
    EACH(vectors)
    {
        vf part = v_mul(parts[i], fall);
        v_store(target + 64 * i, part);
        known[i] = v_fma(part, key, known[i]);
    }
}

// One pass over the state: renewed by this row's delta, read, and decayed for the next row.
INLINE void one_row(int vectors, const head *of, int64_t row, vf *known)
{
    int64_t query = of->q + row * of->row_stride, key = of->k + row * of->row_stride;
    int64_t value = of->value + row * of->row_stride;
    vf share = v_load_lanes(of->beta + row * of->gate_stride), deltas[4], sums[4];
    EACH(vectors)
    {
        deltas[i] = v_mul(v_sub(v_load(value + 64 * i), known[i]), share);
        sums[i] = known[i] = v_lanes(0.0f);
    }
    // After the last row nothing decays; what its own key sums up again is dropped.
    int more = row + 1 < of->rows;
    int64_t next_key = more ? key + of->row_stride : key;
    vf fall = more ? v_load_lanes(of->decay + (row + 1) * of->gate_stride) : v_lanes(1.0f);
    for (int64_t k = 0; k < of->key_dim; k++) {
        int64_t state = of->target + k * of->value_stride;
        vf parts[4], key_lanes = v_load_lanes(key + 4 * k), query_lanes = v_load_lanes(query + 4 * k);
        EACH(vectors)
        {
            parts[i] = v_fma(deltas[i], key_lanes, v_load(state + 64 * i));
            sums[i] = v_fma(parts[i], query_lanes, sums[i]);
        }
        decay_key(vectors, state, parts, fall, v_load_lanes(next_key + 4 * k), known);
    }
    EACH(vectors) v_store(of->out + row * of->out_stride + 64 * i, sums[i]);
}

// `delta_head` over 16 * vectors columns.
INLINE void delta_rows(int vectors, const head *of)
{
    vf fall = v_load_lanes(of->decay), known[4];
    EACH(vectors) known[i] = v_lanes(0.0f);
    for (int64_t k = 0; k < of->key_dim; k++) {
        vf parts[4];
        int64_t place = k * of->value_stride;
        EACH(vectors) parts[i] = v_load(of->source + place + 64 * i);
        decay_key(vectors, of->target + place, parts, fall, v_load_lanes(of->k + 4 * k), known);
    }
    for (int64_t row = 0; row < of->rows; row++) one_row(vectors, of, row, known);
}

// `rows` >= 1 rows in order, on the first `columns` (16, 32 or 64) columns of a value head.
//
// A row: S = S * decay; d = (v - S^T k) * beta; S = S + k d^T; out = S^T q. q, k: float32[key_dim]; v,
// out: float32[columns]; decay, beta: one float32; each pointer is the first row's. q, k, v lie `row_stride`
// bytes apart from row to row, decay and beta `gate_stride`. `state` (0: zeros) is read and `target`,
// elsewhere, written: float32[key_dim][columns] with `value_stride` bytes from key to key.
void delta_head(
    int64_t rows, int64_t q, int64_t k, int64_t value, int64_t row_stride, int64_t decay, int64_t beta,
    int64_t gate_stride, int64_t state, int64_t target, int64_t key_dim, int64_t columns, int64_t out,
    int64_t out_stride, int64_t value_stride)
{
    if (state == 0)
        for (int64_t key = 0; key < key_dim; key++)
            memset((void *)(target + key * value_stride), 0, 4 * (size_t)columns);
    head of = {
        rows, q, k, value, row_stride, decay, beta, gate_stride, state != 0 ? state : target, target, key_dim,
        value_stride, out, out_stride};
    if (columns == 64)
        delta_rows(4, &of);
    else if (columns == 32)
        delta_rows(2, &of);
    else
        delta_rows(1, &of);
}
