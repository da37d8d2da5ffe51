/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_REFERENCE_H
#define KVL_REFERENCE_H

/* Paged attention in float64, as plain as it can be written: what every kernel is compared with. It reads the keys and
 * values as they are stored, rounded to their dtype, through a block table or from contiguous storage. It judges the
 * library, its trials too, so it shares neither conversions nor sums with lib/attention/trial.c. */

#include <kvleaf/attention.h>

/* One element as stored, to and from float: round to nearest even, overflow to infinity, NaN stays NaN. */
float reference_load(kvleaf_dtype dtype, const void *base, size_t index);
void reference_store(kvleaf_dtype dtype, void *base, size_t index, float value);

/* Host copies of a K and a V buffer and where their elements lie; everything is in elements. */
typedef struct reference_kv {
    const void *k, *v;
    kvleaf_dtype dtype;
    kvleaf_layout layout; /* STRIDED, or the packed layout of the blocks */
    int32_t block_size;   /* 0 = contiguous */
    int32_t head_dim;
    int64_t k_offset, k_token_stride, k_head_stride;
    int64_t v_offset, v_token_stride, v_head_stride;
    int64_t block_stride;
} reference_kv;

/* Index of element (block, token in block, head, dim). Contiguous storage is one block without an end. */
size_t reference_kv_index(const reference_kv *kv, bool value, int64_t block, int64_t token, int32_t head, int32_t dim);

/* One sequence of a batch. */
typedef struct reference_seq {
    const int32_t *table; /* paged: its row of the block table */
    int64_t first;        /* contiguous: its first token */
    int64_t q_len, kv_len;
    bool causal;
    int64_t window; /* tokens a row sees, its own included (on each side where not causal); 0 = all */
    double softcap; /* c > 0: a scaled score s counts as c * tanh(s / c); 0 = none */
} reference_seq;

/* Index of the element of a sequence's token at `position`. */
size_t reference_seq_index(const reference_kv *kv, const reference_seq *seq, bool value, int64_t position, int32_t head,
                           int32_t dim);

/* Query row i of a sequence sees positions first .. visible-1; the causal mask is bottom-right aligned. */
int64_t reference_first(const reference_seq *seq, int64_t row);
int64_t reference_visible(const reference_seq *seq, int64_t row);

/* Softmax(scale * q k^T) v of the first `visible` keys of one KV head, of which a causal window leaves the last, for
 * one query vector q[head_dim]; out[head_dim]. Returns the LSE. A row that sees nothing: 0 and -infinity. */
double reference_row(const reference_kv *kv, const reference_seq *seq, int32_t kv_head, int64_t visible, double scale,
                     const double *q, double *out);

/* All rows of a sequence: q, out [q_len][num_heads][head_dim], lse [q_len][num_heads]. Positions before the first row's
 * window are not looked at. False when out of memory. */
bool reference_attend(const reference_kv *kv, const reference_seq *seq, int32_t num_heads, int32_t num_kv_heads,
                      double scale, const double *q, double *out, double *lse);

/* Merges n partial rows over disjoint keys: outs[p * stride], lses[p]; returns the LSE of the union. */
double reference_merge(int32_t n, int32_t head_dim, const double *outs, int64_t stride, const double *lses,
                       double *out);

/* ||actual - expected|| / ||expected||. Where the expected row is 0 the actual one must be: 0, else infinity. Infinity
 * for a row with a NaN. */
double reference_row_error(const double *expected, const float *actual, int32_t count);

/* What that may be at most: 1e-5, 1e-3, 8e-3, by the loosest dtype. */
double reference_tolerance(kvleaf_dtype q, kvleaf_dtype kv, kvleaf_dtype out);

/* |actual - expected| over what it may be at most (1e-3; f32 throughout: 1e-5 * max(1, |LSE|)): at most 1 is right.
 * -infinity is right only where it is expected. */
double reference_lse_error(double expected, float actual, kvleaf_dtype q, kvleaf_dtype kv, kvleaf_dtype out);

/* The default softmax scale, 1 / sqrt(head_dim), as float32 like the library's; a scale that is given is kept. */
double reference_scale(float softmax_scale, int32_t head_dim);

#endif
