/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_PROBLEM_H
#define KVL_PROBLEM_H

/* Attention problems for tests and kvleaf-check: a geometry and a batch, made into device buffers through the
 * caller-level API's views, run, and compared with the float64 reference.
 *
 * Every value is a function of (seed, sequence id, position, head, dim), so that the same sequence can be had alone, in
 * another batch, in other blocks, or as a chunk of its prompt, and its rows compared bit for bit. What no sequence
 * owns is poison: unused slots, unused blocks, padding, gaps between strided elements, unused columns of the block
 * table; and so is what lies before the window of a sequence's first row. Outputs lie between guard zones and every
 * byte that is no output must stay as it was. */

#include <kvleaf/attention.h>

#include "reference.h"

enum { PROBLEM_MAX_SEQS = 320 };

typedef enum problem_view {
    PROBLEM_NHD,       /* paged, strided, [block][token][head][dim] */
    PROBLEM_HND,       /* paged, strided, [block][head][token][dim] */
    PROBLEM_PACKED,    /* paged, a layout of pools */
    PROBLEM_CONTIGUOUS /* no blocks */
} problem_view;

typedef enum problem_poison { PROBLEM_NAN, PROBLEM_INFINITY } problem_poison;

typedef struct problem_geometry {
    kvleaf_dtype q_dtype, kv_dtype, out_dtype;
    problem_view view;
    kvleaf_layout layout; /* of PACKED */
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t window;
    float softcap;
    float softmax_scale; /* 0 = default */
    bool odd;            /* odd offsets and strides, where else everything is packed */
} problem_geometry;

typedef struct problem_seq {
    uint32_t id; /* its values; the same id in another problem has the same ones */
    int32_t q_len, kv_len;
    kvleaf_family family;
    kvleaf_mask mask;
} problem_seq;

typedef enum problem_what { PROBLEM_Q, PROBLEM_K, PROBLEM_V } problem_what;

/* A value by its place; row i of a sequence's queries is at position kv_len - q_len + i. */
typedef float (*problem_value_fn)(problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim);

typedef struct problem_options {
    uint64_t seed;      /* of the values */
    uint64_t placement; /* of block ids and unused columns */
    problem_poison poison;
    problem_value_fn value; /* NULL = sharp random: scaled scores of standard deviation 4, at most 32 in size */
} problem_options;

/* [tokens, heads, head_dim] on host and device; offsets and strides in elements. */
typedef struct problem_array {
    kvleaf_dtype dtype;
    int64_t offset, token_stride, head_stride;
    bool packed;  /* strides are given to the library as 0 */
    size_t bytes; /* of the whole buffer, guards included */
    unsigned char *host;
    cl_mem buffer;
} problem_array;

typedef struct problem {
    problem_geometry geometry;
    problem_options options;
    problem_seq seqs[PROBLEM_MAX_SEQS];
    int32_t num_seqs;
    cl_context context;
    cl_command_queue queue;
    int32_t total_q, total_k, num_blocks, columns;
    int32_t cu_q[PROBLEM_MAX_SEQS + 1], cu_k[PROBLEM_MAX_SEQS + 1], lens[PROBLEM_MAX_SEQS];
    kvleaf_family families[PROBLEM_MAX_SEQS];
    kvleaf_mask masks[PROBLEM_MAX_SEQS];
    int32_t *table;
    problem_array q, k, v, out, lse;
    reference_kv kv;
    /* Results, packed: [total_q][num_heads][head_dim] as stored, [total_q][num_heads]. */
    unsigned char *out_bits;
    float *lse_values;
    char fault[256]; /* of the last run: which byte outside the outputs changed; "" = none */
} problem;

/* What a comparison found. Errors of LSE are given over what they may be at most. */
typedef struct problem_report {
    bool passed;
    double worst, tolerance, worst_lse;
    char text[320]; /* what is wrong, "" where nothing is */
} problem_report;

/* Makes arrays and buffers and fills them. False, with problem->fault set, when memory is out. */
bool problem_create(problem *problem, kvleaf_device *device, cl_command_queue queue, const problem_geometry *geometry,
                    const problem_seq *seqs, int32_t num_seqs, const problem_options *options);
void problem_destroy(problem *problem);

/* The geometry as attention params, for batches of up to these sizes. */
kvleaf_attention_params problem_attention_params(const problem_geometry *geometry, int32_t max_seqs, int32_t max_tokens,
                                                 int32_t max_context);

/* The problem as the API takes it; the structs point into the problem. */
kvleaf_batch problem_batch(const problem *problem);
kvleaf_kv_view problem_kv_view(const problem *problem);
kvleaf_tensor problem_tensor(const problem_array *array);
kvleaf_exec problem_exec(const problem *problem);

/* Plans, attends, waits and reads back. An API status that is not OK is returned as it is. */
kvleaf_status problem_attend(problem *problem, kvleaf_attention *attention);
/* Writes out and lse as they were made. */
bool problem_upload_outputs(problem *problem);
/* Reads out and lse back and checks that nothing beside them changed. */
bool problem_collect(problem *problem);
/* Whether out and lse are byte for byte as they were made: what a call that failed must leave. */
bool problem_untouched(problem *problem);

/* Compares the last run with the reference. */
bool problem_verify(const problem *problem, problem_report *report);
/* Output element of the last run. */
float problem_out(const problem *problem, int32_t row, int32_t head, int32_t dim);
float problem_lse(const problem *problem, int32_t row, int32_t head);
/* Whether `rows` rows of two runs are the same bits, LSE included. */
bool problem_same_rows(const problem *a, int32_t row_a, const problem *b, int32_t row_b, int32_t rows);

/* Appends the query rows' keys and values (q_len <= kv_len; then in place) or writes them to random slots, some of them
 * negative; compares every byte of K and V. `source` is the dtype of the new keys and values. */
kvleaf_status problem_append(problem *problem, kvleaf_attention *attention, kvleaf_dtype source, bool in_place,
                             problem_report *report);
/* Appends the query rows' keys and values in place and attends, in one call; compares every byte of K and V, the
 * outputs with the reference, and their bits with those of an attend alone. `some_negative`: by a slot mapping, every
 * third of which is negative. */
kvleaf_status problem_append_attend(problem *problem, kvleaf_attention *attention, kvleaf_dtype source,
                                    bool some_negative, problem_report *report);
/* Gathers every sequence and compares every byte. */
kvleaf_status problem_gather(problem *problem, kvleaf_attention *attention, problem_report *report);

/* Merges n partials of `rows` rows in which some, and of some rows all, are empty. Of the geometry only num_heads,
 * head_dim, out_dtype and odd count. */
kvleaf_status problem_merge(kvleaf_device *device, cl_command_queue queue, kvleaf_attention *attention,
                            const problem_geometry *geometry, int32_t n, int32_t rows, uint64_t seed,
                            problem_report *report);

/* For the files of this module. */
/* A value of V from a uniform one: with a mean of its own, and of one sign where a row has few elements, since a
 * relative error says nothing about a row that cancels to almost 0. */
float problem_spread(double uniform, int32_t head_dim);
uint64_t problem_hash(uint64_t a, uint64_t b);
bool problem_array_create(problem_array *array, cl_context context, kvleaf_dtype dtype, int64_t tokens, int32_t heads,
                          int32_t head_dim, bool odd);
void problem_array_destroy(problem_array *array);
bool problem_array_upload(problem_array *array, cl_command_queue queue);
size_t problem_array_at(const problem_array *array, int64_t token, int32_t head, int32_t dim);
void problem_array_guard(problem_array *array);
/* Compares a whole buffer with what it must hold. */
void problem_compare_bytes(cl_command_queue queue, const problem_array *array, const unsigned char *expected,
                           const char *name, problem_report *report);
void problem_array_poison(problem_array *array, problem_poison poison);
float problem_value(const problem *problem, problem_what what, uint32_t id, int64_t position, int32_t head,
                    int32_t dim);
/* Dims of a token that its layout stores: those behind head_dim are zeros. */
int32_t problem_stored_dims(const problem_geometry *geometry);
reference_seq problem_reference_seq(const problem *problem, int32_t index);
void problem_fail(problem_report *report, const char *format, ...);

#endif
