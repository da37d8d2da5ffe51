/* SPDX-License-Identifier: Apache-2.0 */
#include "reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static float float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static uint16_t f16_of_float(float x)
{
    uint32_t u = float_bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* below 2^-14: multiples of 2^-24, and 1024 of them are the smallest normal */
        return (uint16_t)(sign | (uint32_t)nearbyintf(float_of_bits(magnitude) * 16777216.0f));
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

static float float_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0)
        return (sign ? -1.0f : 1.0f) * ((float)mantissa / 16777216.0f);
    return float_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

static uint16_t bf16_of_float(float x)
{
    uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

float reference_load(kvleaf_dtype dtype, const void *base, size_t index)
{
    if (dtype == KVLEAF_F32) {
        float x;
        memcpy(&x, (const char *)base + index * sizeof(x), sizeof(x));
        return x;
    }
    uint16_t h;
    memcpy(&h, (const char *)base + index * sizeof(h), sizeof(h));
    return dtype == KVLEAF_F16 ? float_of_f16(h) : float_of_bits((uint32_t)h << 16);
}

void reference_store(kvleaf_dtype dtype, void *base, size_t index, float value)
{
    if (dtype == KVLEAF_F32) {
        memcpy((char *)base + index * sizeof(value), &value, sizeof(value));
        return;
    }
    uint16_t h = dtype == KVLEAF_F16 ? f16_of_float(value) : bf16_of_float(value);
    memcpy((char *)base + index * sizeof(h), &h, sizeof(h));
}

size_t reference_kv_index(const reference_kv *kv, bool value, int64_t block, int64_t token, int32_t head, int32_t dim)
{
    int64_t at = (value ? kv->v_offset : kv->k_offset) + block * kv->block_stride +
                 head * (value ? kv->v_head_stride : kv->k_head_stride);
    if (kv->layout == KVLEAF_LAYOUT_STRIDED)
        return (size_t)(at + token * (value ? kv->v_token_stride : kv->k_token_stride) + dim);
    return (size_t)at + kvleaf_layout_offset(kv->layout, value, kv->block_size, kv->head_dim, (int32_t)token, dim);
}

size_t reference_seq_index(const reference_kv *kv, const reference_seq *seq, bool value, int64_t position, int32_t head,
                           int32_t dim)
{
    if (kv->block_size == 0)
        return reference_kv_index(kv, value, 0, seq->first + position, head, dim);
    return reference_kv_index(kv, value, seq->table[position / kv->block_size], position % kv->block_size, head, dim);
}

int64_t reference_first(const reference_seq *seq, int64_t row)
{
    int64_t first = row + seq->kv_len - seq->q_len - seq->window + 1;
    return seq->window && first > 0 ? first : 0;
}

int64_t reference_visible(const reference_seq *seq, int64_t row)
{
    int64_t position = row + seq->kv_len - seq->q_len, visible = seq->kv_len;
    if (seq->causal)
        visible = position + 1;
    else if (seq->window && position + seq->window < visible)
        visible = position + seq->window;
    return visible < 0 ? 0 : visible;
}

/* The same for keys first .. visible-1, widened already: k and v [kv_len][head_dim]; weights [visible]. */
static double row_of(const double *k, const double *v, int32_t head_dim, int64_t first, int64_t visible, double scale,
                     double softcap, const double *q, double *weights, double *out)
{
    double maximum = -INFINITY, sum = 0;
    for (int32_t d = 0; d < head_dim; d++)
        out[d] = 0;
    for (int64_t j = first; j < visible; j++) {
        double score = 0;
        for (int32_t d = 0; d < head_dim; d++)
            score += q[d] * k[j * head_dim + d];
        weights[j] = softcap > 0 ? softcap * tanh(score * scale / softcap) : score * scale;
        if (weights[j] > maximum)
            maximum = weights[j];
    }
    for (int64_t j = first; j < visible; j++) {
        weights[j] = exp(weights[j] - maximum);
        sum += weights[j];
        for (int32_t d = 0; d < head_dim; d++)
            out[d] += weights[j] * v[j * head_dim + d];
    }
    if (visible <= first)
        return -INFINITY;
    for (int32_t d = 0; d < head_dim; d++)
        out[d] /= sum;
    return maximum + log(sum);
}

static void widen(const reference_kv *kv, const reference_seq *seq, int32_t head, int64_t first, int64_t end, double *k,
                  double *v)
{
    for (int64_t j = first; j < end; j++) {
        for (int32_t d = 0; d < kv->head_dim; d++) {
            k[j * kv->head_dim + d] = reference_load(kv->dtype, kv->k, reference_seq_index(kv, seq, false, j, head, d));
            v[j * kv->head_dim + d] = reference_load(kv->dtype, kv->v, reference_seq_index(kv, seq, true, j, head, d));
        }
    }
}

double reference_row(const reference_kv *kv, const reference_seq *seq, int32_t kv_head, int64_t visible, double scale,
                     const double *q, double *out)
{
    size_t tile = (size_t)(visible > 0 ? visible : 1) * (size_t)kv->head_dim;
    int64_t first = seq->window && visible > seq->window ? visible - seq->window : 0;
    double *memory = malloc((2 * tile + (size_t)(visible > 0 ? visible : 1)) * sizeof(double));
    double lse = NAN;
    if (memory) {
        widen(kv, seq, kv_head, first, visible, memory, memory + tile);
        lse =
            row_of(memory, memory + tile, kv->head_dim, first, visible, scale, seq->softcap, q, memory + 2 * tile, out);
    }
    free(memory);
    return lse;
}

bool reference_attend(const reference_kv *kv, const reference_seq *seq, int32_t num_heads, int32_t num_kv_heads,
                      double scale, const double *q, double *out, double *lse)
{
    int32_t group = num_heads / num_kv_heads;
    int32_t head_dim = kv->head_dim;
    size_t tile = (size_t)(seq->kv_len + 1) * (size_t)head_dim;
    double *memory = malloc((2 * tile + (size_t)seq->kv_len + 1) * sizeof(double));
    if (!memory)
        return false;
    for (int32_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        widen(kv, seq, kv_head, reference_first(seq, 0), seq->kv_len, memory, memory + tile);
        for (int64_t row = 0; row < seq->q_len; row++) {
            for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                int64_t at = row * num_heads + head;
                lse[at] =
                    row_of(memory, memory + tile, head_dim, reference_first(seq, row), reference_visible(seq, row),
                           scale, seq->softcap, q + at * head_dim, memory + 2 * tile, out + at * head_dim);
            }
        }
    }
    free(memory);
    return true;
}

double reference_merge(int32_t n, int32_t head_dim, const double *outs, int64_t stride, const double *lses, double *out)
{
    double maximum = -INFINITY, sum = 0;
    for (int32_t d = 0; d < head_dim; d++)
        out[d] = 0;
    for (int32_t p = 0; p < n; p++)
        maximum = lses[p] > maximum ? lses[p] : maximum;
    if (maximum == -INFINITY)
        return -INFINITY;
    for (int32_t p = 0; p < n; p++) {
        double weight = exp(lses[p] - maximum);
        sum += weight;
        for (int32_t d = 0; d < head_dim && weight > 0; d++)
            out[d] += weight * outs[p * stride + d];
    }
    for (int32_t d = 0; d < head_dim; d++)
        out[d] /= sum;
    return maximum + log(sum);
}

double reference_row_error(const double *expected, const float *actual, int32_t count)
{
    double difference = 0, norm = 0;
    for (int32_t i = 0; i < count; i++) {
        double delta = (double)actual[i] - expected[i];
        if (isnan(delta))
            return INFINITY;
        difference += delta * delta;
        norm += expected[i] * expected[i];
    }
    if (norm == 0)
        return difference == 0 ? 0 : INFINITY;
    return sqrt(difference / norm);
}

double reference_tolerance(kvleaf_dtype q, kvleaf_dtype kv, kvleaf_dtype out)
{
    if (q == KVLEAF_BF16 || kv == KVLEAF_BF16 || out == KVLEAF_BF16)
        return 8e-3;
    return q == KVLEAF_F16 || kv == KVLEAF_F16 || out == KVLEAF_F16 ? 1e-3 : 1e-5;
}

double reference_lse_error(double expected, float actual, kvleaf_dtype q, kvleaf_dtype kv, kvleaf_dtype out)
{
    if (isinf(expected))
        return (double)actual == expected ? 0 : INFINITY;
    if (isnan(actual) || isinf(actual))
        return INFINITY;
    bool wide = q == KVLEAF_F32 && kv == KVLEAF_F32 && out == KVLEAF_F32;
    double limit = wide ? 1e-5 * fmax(1, fabs(expected)) : 1e-3;
    return fabs((double)actual - expected) / limit;
}

double reference_scale(float softmax_scale, int32_t head_dim)
{
    return softmax_scale != 0 ? (double)softmax_scale : (double)(1.0f / sqrtf((float)head_dim));
}
