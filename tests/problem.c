/* SPDX-License-Identifier: Apache-2.0 */
#include "problem.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GUARD = 64 /* elements before and after every array */
};

/* SplitMix64's finalizer over two words. */
uint64_t problem_hash(uint64_t a, uint64_t b)
{
    uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void problem_fail(problem_report *report, const char *format, ...)
{
    va_list args;
    report->passed = false;
    va_start(args, format);
    vsnprintf(report->text, sizeof(report->text), format, args);
    va_end(args);
}

float problem_spread(double uniform, int32_t head_dim)
{
    return (float)(head_dim < 8 ? 1.0 + 0.5 * uniform : 0.5 + 1.5 * uniform);
}

/* Scores have standard deviation 4 where q has 4 / (2 sqrt(head_dim) scale) and k has 2; uniform values keep small
 * head_dims within 32. */
static float sharp_value(const problem *problem, problem_what what, uint64_t bits)
{
    double uniform = (double)(bits >> 11) / 4503599627370496.0 - 1.0;
    if (what == PROBLEM_V)
        return problem_spread(uniform, problem->geometry.head_dim);
    double deviation = 2;
    if (what == PROBLEM_Q)
        deviation /= sqrt(problem->geometry.head_dim) *
                     reference_scale(problem->geometry.softmax_scale, problem->geometry.head_dim);
    return (float)(uniform * deviation * 1.7320508);
}

float problem_value(const problem *problem, problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim)
{
    if (problem->options.value)
        return problem->options.value(what, id, position, head, dim);
    uint64_t place = problem_hash(problem->options.seed, (uint64_t)what << 32 | id);
    place = problem_hash(place, (uint64_t)position);
    return sharp_value(problem, what, problem_hash(place, (uint64_t)head << 32 | (uint32_t)dim));
}

size_t problem_array_at(const problem_array *array, int64_t token, int32_t head, int32_t dim)
{
    return (size_t)(array->offset + token * array->token_stride + head * array->head_stride + dim);
}

static bool array_alloc(problem_array *array, cl_context context, int64_t elements)
{
    cl_int error = CL_SUCCESS;
    array->bytes = (size_t)(array->offset + elements + GUARD) * kvleaf_dtype_size(array->dtype);
    array->host = malloc(array->bytes);
    array->buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, array->bytes, NULL, &error);
    return array->host && error == CL_SUCCESS;
}

bool problem_array_create(problem_array *array, cl_context context, kvleaf_dtype dtype, int64_t tokens, int32_t heads,
                          int32_t head_dim, bool odd)
{
    array->dtype = dtype;
    array->offset = GUARD + (odd ? 7 : 0);
    array->head_stride = head_dim + (odd ? 3 : 0);
    array->token_stride = heads * array->head_stride + (odd ? 5 : 0);
    array->packed = !odd;
    return array_alloc(array, context, tokens * array->token_stride);
}

void problem_array_destroy(problem_array *array)
{
    free(array->host);
    if (array->buffer)
        clReleaseMemObject(array->buffer);
    memset(array, 0, sizeof(*array));
}

bool problem_array_upload(problem_array *array, cl_command_queue queue)
{
    return clEnqueueWriteBuffer(queue, array->buffer, CL_TRUE, 0, array->bytes, array->host, 0, NULL, NULL) ==
           CL_SUCCESS;
}

void problem_array_guard(problem_array *array)
{
    for (size_t i = 0; i < array->bytes; i++)
        array->host[i] = (unsigned char)(i * 167 + 13);
}

void problem_array_poison(problem_array *array, problem_poison poison)
{
    size_t size = kvleaf_dtype_size(array->dtype);
    for (size_t i = 0; i < array->bytes / size; i++)
        reference_store(array->dtype, array->host, i, poison == PROBLEM_NAN ? NAN : INFINITY);
}

/* The first position that a sequence's first row sees. */
static int64_t first_kept(const problem *problem, int32_t index)
{
    reference_seq seq = problem_reference_seq(problem, index);
    return reference_first(&seq, 0);
}

/* A shuffled choice of block ids for each sequence; what lies behind a sequence's length, or before its window, is
 * anything but an id to use. */
static bool make_table(problem *problem)
{
    int32_t block_size = problem->geometry.block_size, needed = 0, next = 0;
    problem->columns = 3;
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        int32_t blocks = (problem->seqs[i].kv_len + block_size - 1) / block_size;
        needed += blocks;
        problem->columns = blocks + 3 > problem->columns ? blocks + 3 : problem->columns;
    }
    problem->num_blocks = needed + 2 + (int32_t)(problem->options.placement % 3);
    int32_t *order = malloc((size_t)problem->num_blocks * sizeof(*order));
    problem->table = malloc((size_t)(problem->num_seqs + 1) * (size_t)problem->columns * sizeof(*problem->table));
    if (!order || !problem->table) {
        free(order);
        return false;
    }
    for (int32_t i = 0; i < problem->num_blocks; i++) {
        int32_t other = (int32_t)(problem_hash(problem->options.placement, (uint64_t)i) % (uint64_t)(i + 1));
        order[i] = i;
        order[i] = order[other];
        order[other] = i;
    }
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        int32_t blocks = (problem->seqs[i].kv_len + block_size - 1) / block_size;
        int32_t *row = problem->table + (size_t)i * (size_t)problem->columns;
        int64_t kept = first_kept(problem, i) / block_size;
        for (int32_t c = 0; c < problem->columns; c++) {
            static const int32_t unused[] = {-1, INT_MAX, 0, INT_MIN};
            int32_t id = c < blocks ? order[next++] : 0;
            if (c >= kept && c < blocks)
                row[c] = id;
            else
                row[c] = c % 4 == 2 ? order[needed] : unused[c % 4];
        }
    }
    free(order);
    return true;
}

/* Packed tiles begin at multiples of 16 bytes, all else anywhere. */
static void place_kv(problem_array *array, const problem_geometry *g, bool value, int64_t *block_stride)
{
    int32_t pad = g->odd ? 3 : 0;
    array->offset = GUARD + (g->odd ? 7 : 0);
    array->packed = !g->odd && g->view != PROBLEM_HND;
    if (g->view == PROBLEM_PACKED) {
        int64_t tile = (int64_t)kvleaf_layout_tile(g->layout, g->block_size, g->head_dim);
        pad = g->odd ? 16 / (int32_t)kvleaf_dtype_size(array->dtype) : 0;
        array->offset = GUARD + 3 * pad;
        array->head_stride = tile + pad;
        array->token_stride = 0;
        *block_stride = array->head_stride * g->num_kv_heads + 3 * pad;
    } else if (g->view == PROBLEM_HND) {
        array->token_stride = g->head_dim + pad;
        array->head_stride = array->token_stride * g->block_size + pad;
        *block_stride = array->head_stride * g->num_kv_heads + pad;
    } else {
        array->head_stride = g->head_dim + pad;
        array->token_stride = array->head_stride * g->num_kv_heads + pad;
        *block_stride = array->token_stride * g->block_size + pad;
    }
    if (value) /* K and V differ in all but their block stride */
        array->offset += 2 * pad;
}

static bool make_kv(problem *problem)
{
    const problem_geometry *g = &problem->geometry;
    reference_kv *kv = &problem->kv;
    int64_t elements;
    problem->k.dtype = problem->v.dtype = g->kv_dtype;
    place_kv(&problem->k, g, false, &kv->block_stride);
    place_kv(&problem->v, g, true, &kv->block_stride);
    if (g->view == PROBLEM_CONTIGUOUS)
        elements = problem->total_k * problem->k.token_stride;
    else
        elements = problem->num_blocks * kv->block_stride;
    if (!array_alloc(&problem->k, problem->context, elements) || !array_alloc(&problem->v, problem->context, elements))
        return false;
    kv->k = problem->k.host;
    kv->v = problem->v.host;
    kv->dtype = g->kv_dtype;
    kv->layout = g->view == PROBLEM_PACKED ? g->layout : KVLEAF_LAYOUT_STRIDED;
    kv->block_size = g->view == PROBLEM_CONTIGUOUS ? 0 : g->block_size;
    kv->head_dim = g->head_dim;
    kv->k_offset = problem->k.offset;
    kv->k_token_stride = problem->k.token_stride;
    kv->k_head_stride = problem->k.head_stride;
    kv->v_offset = problem->v.offset;
    kv->v_token_stride = problem->v.token_stride;
    kv->v_head_stride = problem->v.head_stride;
    return true;
}

reference_seq problem_reference_seq(const problem *problem, int32_t index)
{
    const problem_seq *seq = &problem->seqs[index];
    reference_seq out = {0};
    if (problem->table)
        out.table = problem->table + (size_t)index * (size_t)problem->columns;
    out.first = problem->cu_k[index];
    out.q_len = seq->q_len;
    out.kv_len = seq->kv_len;
    out.causal = seq->mask == KVLEAF_MASK_CAUSAL;
    out.window = problem->geometry.window;
    out.softcap = problem->geometry.softcap;
    return out;
}

int32_t problem_stored_dims(const problem_geometry *g)
{
    bool zeros = g->view == PROBLEM_PACKED && g->layout == KVLEAF_LAYOUT_SWIZZLE8;
    return zeros ? (g->head_dim + 63) / 64 * 64 : g->head_dim;
}

static void fill_kv(problem *problem)
{
    const problem_geometry *g = &problem->geometry;
    problem_array_poison(&problem->k, problem->options.poison);
    problem_array_poison(&problem->v, problem->options.poison);
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        reference_seq seq = problem_reference_seq(problem, i);
        uint32_t id = problem->seqs[i].id;
        for (int64_t t = reference_first(&seq, 0); t < seq.kv_len; t++) {
            for (int32_t h = 0; h < g->num_kv_heads; h++) {
                for (int32_t d = 0; d < problem_stored_dims(g); d++) {
                    bool there = d < g->head_dim;
                    reference_store(g->kv_dtype, problem->k.host,
                                    reference_seq_index(&problem->kv, &seq, false, t, h, d),
                                    there ? problem_value(problem, PROBLEM_K, id, t, h, d) : 0.0f);
                    reference_store(g->kv_dtype, problem->v.host,
                                    reference_seq_index(&problem->kv, &seq, true, t, h, d),
                                    there ? problem_value(problem, PROBLEM_V, id, t, h, d) : 0.0f);
                }
            }
        }
    }
}

static void fill_q(problem *problem)
{
    const problem_geometry *g = &problem->geometry;
    problem_array_poison(&problem->q, problem->options.poison);
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        const problem_seq *seq = &problem->seqs[i];
        for (int64_t row = 0; row < seq->q_len; row++) {
            for (int32_t h = 0; h < g->num_heads; h++) {
                for (int32_t d = 0; d < g->head_dim; d++)
                    reference_store(g->q_dtype, problem->q.host,
                                    problem_array_at(&problem->q, problem->cu_q[i] + row, h, d),
                                    problem_value(problem, PROBLEM_Q, seq->id, seq->kv_len - seq->q_len + row, h, d));
            }
        }
    }
}

static bool create(problem *problem)
{
    const problem_geometry *g = &problem->geometry;
    cl_context context = problem->context;
    size_t rows;
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        problem->cu_q[i + 1] = problem->cu_q[i] + problem->seqs[i].q_len;
        problem->cu_k[i + 1] = problem->cu_k[i] + problem->seqs[i].kv_len;
        problem->lens[i] = problem->seqs[i].kv_len;
        problem->families[i] = problem->seqs[i].family;
        problem->masks[i] = problem->seqs[i].mask;
    }
    problem->total_q = problem->cu_q[problem->num_seqs];
    problem->total_k = problem->cu_k[problem->num_seqs];
    rows = (size_t)problem->total_q * (size_t)g->num_heads + 1;
    problem->out_bits = malloc(rows * (size_t)g->head_dim * kvleaf_dtype_size(g->out_dtype));
    problem->lse_values = malloc(rows * sizeof(float));
    if (!problem->out_bits || !problem->lse_values)
        return false;
    if ((g->view != PROBLEM_CONTIGUOUS && !make_table(problem)) || !make_kv(problem))
        return false;
    if (!problem_array_create(&problem->q, context, g->q_dtype, problem->total_q, g->num_heads, g->head_dim, g->odd) ||
        !problem_array_create(&problem->out, context, g->out_dtype, problem->total_q, g->num_heads, g->head_dim,
                              g->odd) ||
        !problem_array_create(&problem->lse, context, KVLEAF_F32, problem->total_q, g->num_heads, 1, g->odd))
        return false;
    fill_kv(problem);
    fill_q(problem);
    problem_array_guard(&problem->out);
    problem_array_guard(&problem->lse);
    return problem_array_upload(&problem->q, problem->queue) && problem_array_upload(&problem->k, problem->queue) &&
           problem_array_upload(&problem->v, problem->queue);
}

bool problem_create(problem *problem, kvleaf_device *device, cl_command_queue queue, const problem_geometry *geometry,
                    const problem_seq *seqs, int32_t num_seqs, const problem_options *options)
{
    memset(problem, 0, sizeof(*problem));
    problem->geometry = *geometry;
    problem->options = *options;
    problem->num_seqs = num_seqs;
    if (num_seqs > 0)
        memcpy(problem->seqs, seqs, (size_t)num_seqs * sizeof(*seqs));
    problem->context = kvleaf_device_context(device);
    problem->queue = queue;
    if (create(problem))
        return true;
    problem_destroy(problem);
    snprintf(problem->fault, sizeof(problem->fault), "no memory for the problem");
    return false;
}

void problem_destroy(problem *problem)
{
    problem_array_destroy(&problem->q);
    problem_array_destroy(&problem->k);
    problem_array_destroy(&problem->v);
    problem_array_destroy(&problem->out);
    problem_array_destroy(&problem->lse);
    free(problem->table);
    free(problem->out_bits);
    free(problem->lse_values);
    problem->table = NULL;
    problem->out_bits = NULL;
    problem->lse_values = NULL;
}

kvleaf_attention_params problem_attention_params(const problem_geometry *geometry, int32_t max_seqs, int32_t max_tokens,
                                                 int32_t max_context)
{
    kvleaf_attention_params params = {.struct_size = sizeof(params)};
    params.num_heads = geometry->num_heads;
    params.num_kv_heads = geometry->num_kv_heads;
    params.head_dim_k = geometry->head_dim;
    params.q_dtype = geometry->q_dtype;
    params.kv_dtype = geometry->kv_dtype;
    params.out_dtype = geometry->out_dtype;
    params.layout = geometry->view == PROBLEM_PACKED ? geometry->layout : KVLEAF_LAYOUT_STRIDED;
    params.block_size = geometry->view == PROBLEM_CONTIGUOUS ? 0 : geometry->block_size;
    params.window = geometry->window;
    params.softcap = geometry->softcap;
    params.softmax_scale = geometry->softmax_scale;
    params.max_seqs = max_seqs;
    params.max_tokens = max_tokens;
    params.max_context = max_context;
    return params;
}

kvleaf_batch problem_batch(const problem *problem)
{
    kvleaf_batch batch = {.struct_size = sizeof(batch)};
    batch.num_seqs = problem->num_seqs;
    batch.cu_seqlens_q = problem->cu_q;
    batch.families = problem->families;
    batch.masks = problem->masks;
    if (problem->geometry.view == PROBLEM_CONTIGUOUS) {
        batch.cu_seqlens_k = problem->cu_k;
    } else {
        batch.seq_lens_k = problem->lens;
        batch.block_table = problem->table;
        batch.block_table_stride = problem->columns;
        batch.num_blocks = problem->num_blocks;
    }
    return batch;
}

kvleaf_tensor problem_tensor(const problem_array *array)
{
    kvleaf_tensor tensor = {0};
    tensor.handle = array->buffer;
    tensor.offset = (uint64_t)array->offset * kvleaf_dtype_size(array->dtype);
    tensor.dtype = array->dtype;
    tensor.token_stride = array->packed ? 0 : array->token_stride;
    tensor.head_stride = array->packed ? 0 : array->head_stride;
    return tensor;
}

kvleaf_kv_view problem_kv_view(const problem *problem)
{
    kvleaf_kv_view view = {.struct_size = sizeof(view)};
    view.k = problem_tensor(&problem->k);
    view.v = problem_tensor(&problem->v);
    view.block_stride = problem->k.packed ? 0 : problem->kv.block_stride;
    view.layout = problem->kv.layout;
    view.num_blocks = problem->num_blocks;
    return view;
}

kvleaf_exec problem_exec(const problem *problem)
{
    kvleaf_exec exec = {.struct_size = sizeof(exec)};
    exec.queue = problem->queue;
    return exec;
}

/* Reads an output array back, takes `width` elements of each (token, head) and compares all else with the guard bytes.
 */
static bool collect(problem *problem, problem_array *array, const char *name, int32_t width, void *packed)
{
    size_t size = kvleaf_dtype_size(array->dtype);
    unsigned char *now = malloc(array->bytes);
    bool right = now && clEnqueueReadBuffer(problem->queue, array->buffer, CL_TRUE, 0, array->bytes, now, 0, NULL,
                                            NULL) == CL_SUCCESS;
    if (!right)
        snprintf(problem->fault, sizeof(problem->fault), "%s could not be read back", name);
    for (int32_t t = 0; right && t < problem->total_q; t++) {
        for (int32_t h = 0; h < problem->geometry.num_heads; h++) {
            size_t at = problem_array_at(array, t, h, 0) * size;
            size_t row = (size_t)t * (size_t)problem->geometry.num_heads + (size_t)h;
            memcpy((char *)packed + row * (size_t)width * size, now + at, (size_t)width * size);
            memcpy(now + at, array->host + at, (size_t)width * size);
        }
    }
    for (size_t i = 0; right && i < array->bytes; i++) {
        if (now[i] != array->host[i]) {
            snprintf(problem->fault, sizeof(problem->fault), "%s: byte %zu of %zu is no output and changed", name, i,
                     array->bytes);
            right = false;
        }
    }
    free(now);
    return right;
}

bool problem_collect(problem *problem)
{
    problem->fault[0] = 0;
    return collect(problem, &problem->out, "out", problem->geometry.head_dim, problem->out_bits) &&
           collect(problem, &problem->lse, "lse", 1, problem->lse_values);
}

static bool same_as_made(problem *problem, const problem_array *array)
{
    unsigned char *now = malloc(array->bytes);
    bool same = now && clFinish(problem->queue) == CL_SUCCESS &&
                clEnqueueReadBuffer(problem->queue, array->buffer, CL_TRUE, 0, array->bytes, now, 0, NULL, NULL) ==
                    CL_SUCCESS &&
                memcmp(now, array->host, array->bytes) == 0;
    free(now);
    return same;
}

bool problem_untouched(problem *problem)
{
    return same_as_made(problem, &problem->out) && same_as_made(problem, &problem->lse);
}

bool problem_upload_outputs(problem *problem)
{
    return problem_array_upload(&problem->out, problem->queue) && problem_array_upload(&problem->lse, problem->queue);
}

kvleaf_status problem_attend(problem *problem, kvleaf_attention *attention)
{
    kvleaf_batch batch = problem_batch(problem);
    kvleaf_kv_view view = problem_kv_view(problem);
    kvleaf_exec exec = problem_exec(problem);
    kvleaf_tensor q = problem_tensor(&problem->q);
    kvleaf_tensor out = problem_tensor(&problem->out);
    kvleaf_tensor lse = problem_tensor(&problem->lse);
    problem->fault[0] = 0;
    if (!problem_upload_outputs(problem)) {
        snprintf(problem->fault, sizeof(problem->fault), "the outputs could not be written");
        return KVLEAF_OK;
    }
    kvleaf_status status = kvleaf_attention_plan(attention, &batch, &exec);
    if (status == KVLEAF_OK)
        status = kvleaf_attention_attend(attention, &q, &view, &out, &lse, &exec);
    if (status != KVLEAF_OK)
        return status;
    cl_int error = clFinish(problem->queue);
    if (error != CL_SUCCESS)
        snprintf(problem->fault, sizeof(problem->fault), "the device failed: clFinish answered %d", error);
    else
        problem_collect(problem);
    return KVLEAF_OK;
}

float problem_out(const problem *problem, int32_t row, int32_t head, int32_t dim)
{
    size_t at =
        ((size_t)row * (size_t)problem->geometry.num_heads + (size_t)head) * (size_t)problem->geometry.head_dim +
        (size_t)dim;
    return reference_load(problem->geometry.out_dtype, problem->out_bits, at);
}

float problem_lse(const problem *problem, int32_t row, int32_t head)
{
    return problem->lse_values[(size_t)row * (size_t)problem->geometry.num_heads + (size_t)head];
}

bool problem_same_rows(const problem *a, int32_t row_a, const problem *b, int32_t row_b, int32_t rows)
{
    size_t heads = (size_t)a->geometry.num_heads;
    size_t bytes = heads * (size_t)a->geometry.head_dim * kvleaf_dtype_size(a->geometry.out_dtype);
    return memcmp(a->out_bits + (size_t)row_a * bytes, b->out_bits + (size_t)row_b * bytes, (size_t)rows * bytes) ==
               0 &&
           memcmp(a->lse_values + (size_t)row_a * heads, b->lse_values + (size_t)row_b * heads,
                  (size_t)rows * heads * sizeof(float)) == 0;
}

/* One row of one head against the reference. */
static void verify_row(const problem *problem, int32_t index, int32_t row, int32_t head, const double *expected,
                       double expected_lse, problem_report *report)
{
    const problem_geometry *g = &problem->geometry;
    const problem_seq *seq = &problem->seqs[index];
    float actual[256];
    int32_t at = problem->cu_q[index] + row;
    for (int32_t d = 0; d < g->head_dim; d++)
        actual[d] = problem_out(problem, at, head, d);
    double error = reference_row_error(expected, actual, g->head_dim);
    double lse_error =
        reference_lse_error(expected_lse, problem_lse(problem, at, head), g->q_dtype, g->kv_dtype, g->out_dtype);
    report->worst = error > report->worst ? error : report->worst;
    report->worst_lse = lse_error > report->worst_lse ? lse_error : report->worst_lse;
    if (!report->passed)
        return;
    if (!(error <= report->tolerance))
        problem_fail(report,
                     "sequence %d (q %d, kv %d), row %d, head %d: error %.3g, at most %.3g; out[0] %.7g, "
                     "expected %.7g",
                     index, seq->q_len, seq->kv_len, row, head, error, report->tolerance, (double)actual[0],
                     expected[0]);
    else if (!(lse_error <= 1))
        problem_fail(report, "sequence %d (q %d, kv %d), row %d, head %d: LSE %.7g, expected %.7g", index, seq->q_len,
                     seq->kv_len, row, head, (double)problem_lse(problem, at, head), expected_lse);
}

static bool verify_seq(const problem *problem, int32_t index, problem_report *report)
{
    const problem_geometry *g = &problem->geometry;
    reference_seq seq = problem_reference_seq(problem, index);
    size_t rows = (size_t)seq.q_len * (size_t)g->num_heads + 1, dim = (size_t)g->head_dim;
    double *memory = malloc((2 * rows * dim + rows) * sizeof(*memory));
    if (!memory)
        return false;
    double *q = memory, *out = memory + rows * dim, *lse = out + rows * dim;
    for (int32_t row = 0; row < seq.q_len; row++)
        for (int32_t h = 0; h < g->num_heads; h++)
            for (int32_t d = 0; d < g->head_dim; d++)
                q[((size_t)row * (size_t)g->num_heads + (size_t)h) * dim + (size_t)d] = reference_load(
                    g->q_dtype, problem->q.host, problem_array_at(&problem->q, problem->cu_q[index] + row, h, d));
    bool had = reference_attend(&problem->kv, &seq, g->num_heads, g->num_kv_heads,
                                reference_scale(g->softmax_scale, g->head_dim), q, out, lse);
    for (int32_t row = 0; had && row < seq.q_len; row++)
        for (int32_t h = 0; h < g->num_heads; h++) {
            size_t at = (size_t)row * (size_t)g->num_heads + (size_t)h;
            verify_row(problem, index, row, h, out + at * dim, lse[at], report);
        }
    free(memory);
    return had;
}

bool problem_verify(const problem *problem, problem_report *report)
{
    const problem_geometry *g = &problem->geometry;
    memset(report, 0, sizeof(*report));
    report->passed = true;
    report->tolerance = reference_tolerance(g->q_dtype, g->kv_dtype, g->out_dtype);
    if (problem->fault[0])
        problem_fail(report, "%s", problem->fault);
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        if (!verify_seq(problem, i, report)) {
            problem_fail(report, "no memory for the reference");
            break;
        }
    }
    return report->passed;
}
