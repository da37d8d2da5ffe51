/* SPDX-License-Identifier: Apache-2.0 */
/* Append, gather and merge of a problem: what moves or folds data that is there already. */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void begin(problem_report *report)
{
    memset(report, 0, sizeof(*report));
    report->passed = true;
}

static bool read_back(cl_command_queue queue, const problem_array *array, unsigned char **now)
{
    *now = malloc(array->bytes);
    return *now &&
           clEnqueueReadBuffer(queue, array->buffer, CL_TRUE, 0, array->bytes, *now, 0, NULL, NULL) == CL_SUCCESS;
}

void problem_compare_bytes(cl_command_queue queue, const problem_array *array, const unsigned char *expected,
                           const char *name, problem_report *report)
{
    unsigned char *now = NULL;
    if (!read_back(queue, array, &now))
        problem_fail(report, "%s could not be read back", name);
    for (size_t i = 0; report->passed && i < array->bytes; i++) {
        if (now[i] != expected[i])
            problem_fail(report, "%s: byte %zu of %zu is %02x, expected %02x", name, i, array->bytes, now[i],
                         expected[i]);
    }
    free(now);
}

/* Values at the edges of the 16-bit types among the ordinary ones: ties, the largest, what overflows. */
static float append_value(const problem *problem, problem_what what, uint32_t id, int64_t position, int32_t head,
                          int32_t dim)
{
    static const float edges[] = {0.0f,    -0.0f,       65504.0f,    65519.0f,        65520.0f, -70000.0f,
                                  1.0e30f, 1.00390625f, 1.01171875f, 6.103515625e-5f, 3.0e-6f};
    uint64_t pick = problem_hash((uint64_t)position, (uint64_t)(head * 512 + dim));
    if (pick % 8 == 0)
        return edges[pick / 8 % (sizeof(edges) / sizeof(edges[0]))];
    return problem_value(problem, what, id, position, head, dim);
}

static void fill_source(const problem *problem, problem_array *source, problem_what what)
{
    const problem_geometry *g = &problem->geometry;
    problem_array_poison(source, problem->options.poison);
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        const problem_seq *seq = &problem->seqs[i];
        for (int32_t row = 0; row < seq->q_len; row++)
            for (int32_t h = 0; h < g->num_kv_heads; h++)
                for (int32_t d = 0; d < g->head_dim; d++)
                    reference_store(source->dtype, source->host, problem_array_at(source, problem->cu_q[i] + row, h, d),
                                    append_value(problem, what, seq->id, seq->kv_len - seq->q_len + row, h, d));
    }
}

/* One slot a query row: in place, or a random one that no other row has; every fifth is negative. */
static void fill_slots(const problem *problem, bool in_place, int64_t *slots)
{
    int32_t block_size = problem->geometry.block_size;
    int64_t total = (int64_t)problem->num_blocks * block_size;
    int64_t step = total % 7919 ? 7919 : 7907; /* a prime that does not divide the total visits every slot once */
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        const problem_seq *seq = &problem->seqs[i];
        for (int32_t row = 0; row < seq->q_len; row++) {
            int32_t at = problem->cu_q[i] + row, position = seq->kv_len - seq->q_len + row;
            const int32_t *table = problem->table + (size_t)i * (size_t)problem->columns;
            if (in_place)
                slots[at] = (int64_t)table[position / block_size] * block_size + position % block_size;
            else if (at % 5 == 3 || at >= total)
                slots[at] = at % 2 ? -1 : INT64_MIN;
            else
                slots[at] = (at * step + (int64_t)(problem->options.placement % 1000)) % total;
        }
    }
}

static void store_expected(const problem *problem, const problem_array *source, bool value, const int64_t *slots,
                           unsigned char *expected)
{
    const problem_geometry *g = &problem->geometry;
    for (int32_t t = 0; t < problem->total_q; t++) {
        for (int32_t h = 0; slots[t] >= 0 && h < g->num_kv_heads; h++)
            for (int32_t d = 0; d < problem_stored_dims(g); d++)
                reference_store(
                    g->kv_dtype, expected,
                    reference_kv_index(&problem->kv, value, slots[t] / g->block_size, slots[t] % g->block_size, h, d),
                    d < g->head_dim ? reference_load(source->dtype, source->host, problem_array_at(source, t, h, d))
                                    : 0.0f);
    }
}

/* K (or V) as guard bytes on the device, and what the append must make of them. */
static unsigned char *expect_append(problem *problem, problem_array *store, const problem_array *source, bool value,
                                    const int64_t *slots)
{
    problem_array_guard(store);
    unsigned char *expected = malloc(store->bytes);
    if (!expected || !problem_array_upload(store, problem->queue)) {
        free(expected);
        return NULL;
    }
    memcpy(expected, store->host, store->bytes);
    store_expected(problem, source, value, slots, expected);
    return expected;
}

static kvleaf_status run_append(problem *problem, kvleaf_attention *attention, problem_array sources[2],
                                const int64_t *slots, bool in_place, problem_report *report)
{
    kvleaf_batch batch = problem_batch(problem);
    kvleaf_kv_view view = problem_kv_view(problem);
    kvleaf_exec exec = problem_exec(problem);
    kvleaf_tensor k = problem_tensor(&sources[0]), v = problem_tensor(&sources[1]);
    unsigned char *expected_k = expect_append(problem, &problem->k, &sources[0], false, slots);
    unsigned char *expected_v = expect_append(problem, &problem->v, &sources[1], true, slots);
    kvleaf_status status = KVLEAF_OK;
    if (!expected_k || !expected_v) {
        problem_fail(report, "no memory to append");
    } else {
        batch.slot_mapping = in_place ? NULL : slots;
        status = kvleaf_attention_plan(attention, &batch, &exec);
        if (status == KVLEAF_OK)
            status = kvleaf_attention_append(attention, &k, &v, &view, &exec);
        if (status == KVLEAF_OK) {
            clFinish(problem->queue);
            problem_compare_bytes(problem->queue, &problem->k, expected_k, "K", report);
            problem_compare_bytes(problem->queue, &problem->v, expected_v, "V", report);
        }
    }
    free(expected_k);
    free(expected_v);
    return status;
}

kvleaf_status problem_append(problem *problem, kvleaf_attention *attention, kvleaf_dtype source, bool in_place,
                             problem_report *report)
{
    const problem_geometry *g = &problem->geometry;
    problem_array sources[2] = {{0}, {0}};
    int64_t *slots = malloc(((size_t)problem->total_q + 1) * sizeof(*slots));
    kvleaf_status status = KVLEAF_OK;
    bool made = slots != NULL;
    begin(report);
    for (int i = 0; i < 2; i++) {
        made = made && problem_array_create(&sources[i], problem->context, source, problem->total_q, g->num_kv_heads,
                                            g->head_dim, g->odd);
        if (made) {
            fill_source(problem, &sources[i], i ? PROBLEM_V : PROBLEM_K);
            made = problem_array_upload(&sources[i], problem->queue);
        }
    }
    if (made) {
        fill_slots(problem, in_place, slots);
        status = run_append(problem, attention, sources, slots, in_place, report);
    } else {
        problem_fail(report, "no memory to append");
    }
    problem_array_destroy(&sources[0]);
    problem_array_destroy(&sources[1]);
    free(slots);
    return status;
}

static unsigned char *expect_gather(const problem *problem, problem_array *out, bool value)
{
    const problem_geometry *g = &problem->geometry;
    problem_array_guard(out);
    unsigned char *expected = malloc(out->bytes);
    if (!expected || !problem_array_upload(out, problem->queue)) {
        free(expected);
        return NULL;
    }
    memcpy(expected, out->host, out->bytes);
    size_t size = kvleaf_dtype_size(g->kv_dtype);
    const unsigned char *stored = value ? problem->v.host : problem->k.host;
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        reference_seq seq = problem_reference_seq(problem, i);
        for (int64_t t = 0; t < seq.kv_len; t++)
            for (int32_t h = 0; h < g->num_kv_heads; h++)
                for (int32_t d = 0; d < g->head_dim; d++)
                    memcpy(expected + problem_array_at(out, problem->cu_k[i] + t, h, d) * size,
                           stored + reference_seq_index(&problem->kv, &seq, value, t, h, d) * size, size);
    }
    return expected;
}

kvleaf_status problem_gather(problem *problem, kvleaf_attention *attention, problem_report *report)
{
    const problem_geometry *g = &problem->geometry;
    problem_array outs[2] = {{0}, {0}};
    unsigned char *expected[2] = {NULL, NULL};
    kvleaf_status status = KVLEAF_OK;
    begin(report);
    for (int i = 0; i < 2; i++) {
        if (problem_array_create(&outs[i], problem->context, g->kv_dtype, problem->total_k, g->num_kv_heads,
                                 g->head_dim, g->odd))
            expected[i] = expect_gather(problem, &outs[i], i == 1);
    }
    if (expected[0] && expected[1]) {
        kvleaf_batch batch = problem_batch(problem);
        kvleaf_kv_view view = problem_kv_view(problem);
        kvleaf_exec exec = problem_exec(problem);
        kvleaf_tensor k = problem_tensor(&outs[0]), v = problem_tensor(&outs[1]);
        status = kvleaf_attention_plan(attention, &batch, &exec);
        if (status == KVLEAF_OK)
            status = kvleaf_attention_gather(attention, &view, &k, &v, &exec);
        if (status == KVLEAF_OK) {
            clFinish(problem->queue);
            problem_compare_bytes(problem->queue, &outs[0], expected[0], "gathered K", report);
            problem_compare_bytes(problem->queue, &outs[1], expected[1], "gathered V", report);
        }
    } else {
        problem_fail(report, "no memory to gather");
    }
    for (int i = 0; i < 2; i++) {
        problem_array_destroy(&outs[i]);
        free(expected[i]);
    }
    return status;
}

/* The partials of a merge: part p of row r, head h is empty by a draw; every fourth row has one part that is not, every
 * seventh none at all. What an empty part holds beside its LSE is poison. */
typedef struct merge_case {
    problem_geometry geometry;
    int32_t n, rows;
    uint64_t seed;
    problem_array outs, lses, out, lse;
} merge_case;

static bool merge_is_empty(const merge_case *merge, int32_t part, int32_t row, int32_t head)
{
    uint64_t draw = problem_hash(merge->seed, (uint64_t)row << 32 | (uint32_t)head);
    if (row % 7 == 6)
        return true;
    if (row % 4 == 3)
        return part != (int32_t)(draw % (uint64_t)merge->n);
    return problem_hash(draw, (uint64_t)part) % 4 == 0;
}

static void fill_merge(merge_case *merge)
{
    problem_array_poison(&merge->outs, PROBLEM_NAN);
    problem_array_poison(&merge->lses, PROBLEM_NAN);
    for (int32_t p = 0; p < merge->n; p++) {
        for (int32_t r = 0; r < merge->rows; r++) {
            for (int32_t h = 0; h < merge->geometry.num_heads; h++) {
                uint64_t draw = problem_hash(merge->seed + 1, ((uint64_t)p << 40) | ((uint64_t)r << 16) | (uint32_t)h);
                bool empty = merge_is_empty(merge, p, r, h);
                int64_t token = (int64_t)p * merge->rows + r;
                float lse = (float)((double)(draw >> 11) / 9007199254740992.0 * 40 - 20);
                reference_store(KVLEAF_F32, merge->lses.host, problem_array_at(&merge->lses, token, h, 0),
                                empty ? -INFINITY : lse);
                for (int32_t d = 0; d < merge->geometry.head_dim; d++) {
                    double uniform = (double)(problem_hash(draw, (uint64_t)d) >> 11) / 4503599627370496.0 - 1.0;
                    reference_store(KVLEAF_F32, merge->outs.host, problem_array_at(&merge->outs, token, h, d),
                                    empty ? NAN : problem_spread(uniform, merge->geometry.head_dim));
                }
            }
        }
    }
}

static void verify_merged_row(const merge_case *merge, const unsigned char *out, const unsigned char *lse, int32_t row,
                              int32_t head, double *outs, problem_report *report)
{
    const problem_geometry *g = &merge->geometry;
    double lses[256], expected[256];
    float actual[256];
    int32_t full = 0, only = 0;
    for (int32_t p = 0; p < merge->n; p++) {
        int64_t token = (int64_t)p * merge->rows + row;
        lses[p] = reference_load(KVLEAF_F32, merge->lses.host, problem_array_at(&merge->lses, token, head, 0));
        for (int32_t d = 0; d < g->head_dim; d++)
            outs[p * g->head_dim + d] =
                reference_load(KVLEAF_F32, merge->outs.host, problem_array_at(&merge->outs, token, head, d));
        if (!isinf(lses[p])) {
            full++;
            only = p;
        }
    }
    double expected_lse = reference_merge(merge->n, g->head_dim, outs, g->head_dim, lses, expected);
    float actual_lse = reference_load(KVLEAF_F32, lse, problem_array_at(&merge->lse, row, head, 0));
    bool exact = true;
    for (int32_t d = 0; d < g->head_dim; d++) {
        float rounded;
        actual[d] = reference_load(g->out_dtype, out, problem_array_at(&merge->out, row, head, d));
        reference_store(g->out_dtype, &rounded, 0, (float)outs[only * g->head_dim + d]);
        exact = exact && actual[d] == reference_load(g->out_dtype, &rounded, 0);
    }
    double error = reference_row_error(expected, actual, g->head_dim);
    double lse_error = reference_lse_error(expected_lse, actual_lse, KVLEAF_F32, KVLEAF_F32, KVLEAF_F32);
    report->worst = error > report->worst ? error : report->worst;
    report->worst_lse = lse_error > report->worst_lse ? lse_error : report->worst_lse;
    if (!report->passed)
        return;
    if (!(error <= report->tolerance) || !(lse_error <= 1))
        problem_fail(report, "row %d, head %d, %d parts: error %.3g, at most %.3g; LSE %.7g, expected %.7g", row, head,
                     merge->n, error, report->tolerance, (double)actual_lse, expected_lse);
    else if (full == 1 && (!exact || actual_lse != (float)lses[only]))
        problem_fail(report, "row %d, head %d: only part %d of %d is not empty, and the result is not exactly it", row,
                     head, only, merge->n);
}

static void verify_merge(merge_case *merge, cl_command_queue queue, problem_report *report)
{
    const problem_geometry *g = &merge->geometry;
    unsigned char *out = NULL, *lse = NULL;
    double *outs = malloc((size_t)merge->n * (size_t)g->head_dim * sizeof(*outs));
    size_t size = kvleaf_dtype_size(g->out_dtype);
    if (outs && read_back(queue, &merge->out, &out) && read_back(queue, &merge->lse, &lse)) {
        for (int32_t r = 0; r < merge->rows; r++) {
            for (int32_t h = 0; h < g->num_heads; h++) {
                size_t at = problem_array_at(&merge->out, r, h, 0) * size;
                size_t lse_at = problem_array_at(&merge->lse, r, h, 0) * sizeof(float);
                verify_merged_row(merge, out, lse, r, h, outs, report);
                memcpy(merge->out.host + at, out + at, (size_t)g->head_dim * size);
                memcpy(merge->lse.host + lse_at, lse + lse_at, sizeof(float));
            }
        }
        if (memcmp(out, merge->out.host, merge->out.bytes) != 0 || memcmp(lse, merge->lse.host, merge->lse.bytes) != 0)
            problem_fail(report, "a byte beside the merged output changed");
    } else {
        problem_fail(report, "the merged output could not be read back");
    }
    free(out);
    free(lse);
    free(outs);
}

static kvleaf_status run_merge(merge_case *merge, kvleaf_attention *attention, cl_command_queue queue,
                               problem_report *report)
{
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = queue};
    kvleaf_tensor outs = problem_tensor(&merge->outs), lses = problem_tensor(&merge->lses);
    kvleaf_tensor out = problem_tensor(&merge->out), lse = problem_tensor(&merge->lse);
    fill_merge(merge);
    problem_array_guard(&merge->out);
    problem_array_guard(&merge->lse);
    if (!problem_array_upload(&merge->outs, queue) || !problem_array_upload(&merge->lses, queue) ||
        !problem_array_upload(&merge->out, queue) || !problem_array_upload(&merge->lse, queue)) {
        problem_fail(report, "the partials could not be written");
        return KVLEAF_OK;
    }
    kvleaf_status status =
        kvleaf_attention_merge(attention, merge->n, merge->rows, &outs, merge->rows * merge->outs.token_stride, &lses,
                               merge->rows * merge->lses.token_stride, &out, &lse, &exec);
    if (status == KVLEAF_OK) {
        clFinish(queue);
        verify_merge(merge, queue, report);
    }
    return status;
}

kvleaf_status problem_merge(kvleaf_device *device, cl_command_queue queue, kvleaf_attention *attention,
                            const problem_geometry *geometry, int32_t n, int32_t rows, uint64_t seed,
                            problem_report *report)
{
    cl_context context = kvleaf_device_context(device);
    int32_t heads = geometry->num_heads, dim = geometry->head_dim;
    merge_case merge = {.geometry = *geometry, .n = n, .rows = rows, .seed = seed};
    kvleaf_status status = KVLEAF_OK;
    begin(report);
    report->tolerance = reference_tolerance(KVLEAF_F32, KVLEAF_F32, geometry->out_dtype);
    if (problem_array_create(&merge.outs, context, KVLEAF_F32, (int64_t)n * rows, heads, dim, geometry->odd) &&
        problem_array_create(&merge.lses, context, KVLEAF_F32, (int64_t)n * rows, heads, 1, geometry->odd) &&
        problem_array_create(&merge.out, context, geometry->out_dtype, rows, heads, dim, geometry->odd) &&
        problem_array_create(&merge.lse, context, KVLEAF_F32, rows, heads, 1, geometry->odd))
        status = run_merge(&merge, attention, queue, report);
    else
        problem_fail(report, "no memory to merge");
    problem_array_destroy(&merge.outs);
    problem_array_destroy(&merge.lses);
    problem_array_destroy(&merge.out);
    problem_array_destroy(&merge.lse);
    return status;
}
