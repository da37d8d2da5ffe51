/* SPDX-License-Identifier: Apache-2.0 */
/* Append and attend of a problem in one call: the new tokens are missing from the device's K and V before, and there
 * afterwards, byte for byte; the outputs are those of the reference, and the bits of an attend that finds all there.
 * Once each tensor has a buffer of its own, once some share one: K and V, and q, the new keys and values and out. */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct fused {
    problem_array sources[2];
    int64_t *slots;     /* [total_q] */
    unsigned char *out; /* what the call gave, as problem->out_bits has it */
    float *lse;
    size_t out_bytes, lse_bytes;
} fused;

enum { JOINED = 4 };

/* Arrays that lie in one buffer. */
typedef struct joined {
    cl_mem memory;
    const problem_array *arrays[JOINED]; /* NULL: not in it */
    size_t at[JOINED];                   /* bytes */
} joined;

static int64_t position_of(const problem_seq *seq, int32_t row)
{
    return seq->kv_len - seq->q_len + row;
}

/* In place, or of every third row nowhere: then its token is there already. */
static void fill_slots(const problem *problem, bool some_negative, int64_t *slots)
{
    int32_t block_size = problem->geometry.block_size;
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        const int32_t *table = problem->table + (size_t)i * (size_t)problem->columns;
        for (int32_t row = 0; row < problem->seqs[i].q_len; row++) {
            int32_t at = problem->cu_q[i] + row;
            int64_t position = position_of(&problem->seqs[i], row);
            slots[at] = -1 - at;
            if (position >= 0 && !(some_negative && at % 3 == 2))
                slots[at] = (int64_t)table[position / block_size] * block_size + position % block_size;
        }
    }
}

/* The new rows of K or V, and what they leave in problem->k or v on the host. */
static void fill_source(problem *problem, fused *f, bool value)
{
    const problem_geometry *g = &problem->geometry;
    problem_array *source = &f->sources[value], *store = value ? &problem->v : &problem->k;
    problem_array_poison(source, problem->options.poison);
    for (int32_t i = 0; i < problem->num_seqs; i++) {
        const problem_seq *seq = &problem->seqs[i];
        reference_seq in = problem_reference_seq(problem, i);
        for (int32_t row = 0; row < seq->q_len; row++)
            for (int32_t h = 0; h < g->num_kv_heads && position_of(seq, row) >= 0; h++)
                for (int32_t d = 0; d < g->head_dim; d++) {
                    int64_t position = position_of(seq, row);
                    size_t at = problem_array_at(source, problem->cu_q[i] + row, h, d);
                    reference_store(source->dtype, source->host, at,
                                    problem_value(problem, value ? PROBLEM_V : PROBLEM_K, seq->id, position, h, d));
                    if (f->slots[problem->cu_q[i] + row] >= 0)
                        reference_store(g->kv_dtype, store->host,
                                        reference_seq_index(&problem->kv, &in, value, position, h, d),
                                        reference_load(source->dtype, source->host, at));
                }
    }
}

/* Writes K or V to the device with poison in place of what is to be appended. */
static bool upload_without(const problem *problem, const fused *f, bool value)
{
    const problem_geometry *g = &problem->geometry;
    problem_array before = value ? problem->v : problem->k;
    unsigned char *bytes = malloc(before.bytes);
    if (!bytes)
        return false;
    memcpy(bytes, before.host, before.bytes);
    for (int32_t t = 0; t < problem->total_q; t++)
        for (int32_t h = 0; f->slots[t] >= 0 && h < g->num_kv_heads; h++)
            for (int32_t d = 0; d < problem_stored_dims(g); d++)
                reference_store(g->kv_dtype, bytes,
                                reference_kv_index(&problem->kv, value, f->slots[t] / g->block_size,
                                                   f->slots[t] % g->block_size, h, d),
                                problem->options.poison == PROBLEM_NAN ? NAN : INFINITY);
    before.host = bytes;
    bool written = problem_array_upload(&before, problem->queue);
    free(bytes);
    return written;
}

static bool make(problem *problem, kvleaf_dtype source, bool some_negative, fused *f)
{
    const problem_geometry *g = &problem->geometry;
    size_t rows = (size_t)problem->total_q * (size_t)g->num_heads;
    f->out_bytes = rows * (size_t)g->head_dim * kvleaf_dtype_size(g->out_dtype);
    f->lse_bytes = rows * sizeof(float);
    f->slots = malloc(((size_t)problem->total_q + 1) * sizeof(*f->slots));
    f->out = malloc(f->out_bytes + 1);
    f->lse = malloc(f->lse_bytes + sizeof(float));
    if (!f->slots || !f->out || !f->lse)
        return false;
    fill_slots(problem, some_negative, f->slots);
    for (int i = 0; i < 2; i++) {
        if (!problem_array_create(&f->sources[i], problem->context, source, problem->total_q, g->num_kv_heads,
                                  g->head_dim, g->odd))
            return false;
        fill_source(problem, f, i);
        if (!problem_array_upload(&f->sources[i], problem->queue) || !upload_without(problem, f, i))
            return false;
    }
    return problem_upload_outputs(problem);
}

/* Copies the arrays' bytes into their one buffer, or back to their own. */
static bool copy(const problem *problem, const joined *j, bool back)
{
    cl_int error = CL_SUCCESS;
    for (int i = 0; i < JOINED && error == CL_SUCCESS; i++) {
        const problem_array *array = j->arrays[i];
        if (array && back)
            error =
                clEnqueueCopyBuffer(problem->queue, j->memory, array->buffer, j->at[i], 0, array->bytes, 0, NULL, NULL);
        else if (array)
            error =
                clEnqueueCopyBuffer(problem->queue, array->buffer, j->memory, 0, j->at[i], array->bytes, 0, NULL, NULL);
    }
    return error == CL_SUCCESS;
}

static bool join(const problem *problem, joined *j)
{
    size_t bytes = 0;
    for (int i = 0; i < JOINED; i++) {
        j->at[i] = bytes;
        bytes += j->arrays[i] ? (j->arrays[i]->bytes + 15) / 16 * 16 : 0;
    }
    cl_int error = CL_SUCCESS;
    j->memory = clCreateBuffer(problem->context, CL_MEM_READ_WRITE, bytes, NULL, &error);
    return error == CL_SUCCESS && copy(problem, j, false);
}

static void move_to(kvleaf_tensor *tensor, const joined *j, int i)
{
    if (!j || !j->arrays[i])
        return;
    tensor->handle = j->memory;
    tensor->offset += j->at[i];
}

/* `cache`: where K and V may be, `rows`: where q, new keys and values and out may be; NULL = each in its own buffer. */
static kvleaf_status run(problem *problem, kvleaf_attention *attention, bool some_negative, const fused *f,
                         const joined *cache, const joined *rows)
{
    kvleaf_batch batch = problem_batch(problem);
    kvleaf_kv_view view = problem_kv_view(problem);
    kvleaf_exec exec = problem_exec(problem);
    kvleaf_tensor q = problem_tensor(&problem->q), out = problem_tensor(&problem->out);
    kvleaf_tensor lse = problem_tensor(&problem->lse);
    kvleaf_tensor k = problem_tensor(&f->sources[0]), v = problem_tensor(&f->sources[1]);
    move_to(&view.k, cache, 0);
    move_to(&view.v, cache, 1);
    move_to(&q, rows, 0);
    move_to(&k, rows, 1);
    move_to(&v, rows, 2);
    move_to(&out, rows, 3);
    batch.slot_mapping = some_negative ? f->slots : NULL;
    kvleaf_status status = kvleaf_attention_plan(attention, &batch, &exec);
    return status ? status : kvleaf_attention_append_attend(attention, &k, &v, &q, &view, &out, &lse, &exec);
}

/* Reads back what the call left, and compares every byte of K and V. */
static bool collect(problem *problem, const char *k_name, const char *v_name, problem_report *report)
{
    if (clFinish(problem->queue) != CL_SUCCESS || !problem_collect(problem)) {
        problem_fail(report, "%s", problem->fault[0] ? problem->fault : "the device failed");
        return false;
    }
    problem_compare_bytes(problem->queue, &problem->k, problem->k.host, k_name, report);
    problem_compare_bytes(problem->queue, &problem->v, problem->v.host, v_name, report);
    return report->passed;
}

/* Whether the last run gave the bits that the one call gave. */
static bool same_bits(const problem *problem, const fused *f)
{
    return memcmp(f->out, problem->out_bits, f->out_bytes) == 0 &&
           memcmp(f->lse, problem->lse_values, f->lse_bytes) == 0;
}

/* What the call left, and the same rows by an attend alone. */
static kvleaf_status check(problem *problem, kvleaf_attention *attention, fused *f, problem_report *report)
{
    if (!collect(problem, "K after append and attend", "V after append and attend", report) ||
        !problem_verify(problem, report))
        return KVLEAF_OK;
    memcpy(f->out, problem->out_bits, f->out_bytes);
    memcpy(f->lse, problem->lse_values, f->lse_bytes);
    kvleaf_status status = problem_attend(problem, attention);
    if (!status && !same_bits(problem, f))
        problem_fail(report, "append and attend in one call give other bits than one after the other");
    return status;
}

static kvleaf_status run_joined(problem *problem, kvleaf_attention *attention, bool some_negative, const fused *f,
                                joined *cache, joined *rows, problem_report *report)
{
    if (!upload_without(problem, f, false) || !upload_without(problem, f, true) || !problem_upload_outputs(problem) ||
        !join(problem, cache) || !join(problem, rows)) {
        problem_fail(report, "no memory for tensors in one buffer");
        return KVLEAF_OK;
    }
    kvleaf_status status = run(problem, attention, some_negative, f, cache, rows);
    if (status)
        return status;
    if (!copy(problem, cache, true) || !copy(problem, rows, true))
        problem_fail(report, "tensors could not be copied back");
    else if (collect(problem, "K, tensors sharing buffers", "V, tensors sharing buffers", report) &&
             !same_bits(problem, f))
        problem_fail(report, "tensors that share buffers give other bits");
    problem_compare_bytes(problem->queue, &problem->q, problem->q.host, "q, tensors sharing buffers", report);
    return KVLEAF_OK;
}

enum { ALL_JOINED = 15 };

/* `way`: which lie in one buffer, a bit each. */
static kvleaf_status check_joined(problem *problem, kvleaf_attention *attention, bool some_negative, const fused *f,
                                  uint64_t way, problem_report *report)
{
    joined cache = {.arrays = {&problem->k, way & 1 ? &problem->v : NULL}};
    joined rows = {.arrays = {&problem->q, way & 2 ? &f->sources[0] : NULL, way & 4 ? &f->sources[1] : NULL,
                              way & 8 ? &problem->out : NULL}};
    kvleaf_status status = run_joined(problem, attention, some_negative, f, &cache, &rows, report);
    if (cache.memory)
        clReleaseMemObject(cache.memory);
    if (rows.memory)
        clReleaseMemObject(rows.memory);
    return status;
}

kvleaf_status problem_append_attend(problem *problem, kvleaf_attention *attention, kvleaf_dtype source,
                                    bool some_negative, problem_report *report)
{
    fused f = {0};
    kvleaf_status status = KVLEAF_OK;
    memset(report, 0, sizeof(*report));
    report->passed = true;
    if (make(problem, source, some_negative, &f)) {
        status = run(problem, attention, some_negative, &f, NULL, NULL);
        if (!status)
            status = check(problem, attention, &f, report);
        if (!status && report->passed)
            status = check_joined(problem, attention, some_negative, &f, ALL_JOINED, report);
        if (!status && report->passed)
            status = check_joined(problem, attention, some_negative, &f,
                                  problem_hash(problem->options.placement, (uint64_t)problem->total_q), report);
    } else {
        problem_fail(report, "no memory to append and attend");
    }
    problem_array_destroy(&f.sources[0]);
    problem_array_destroy(&f.sources[1]);
    free(f.slots);
    free(f.out);
    free(f.lse);
    return status;
}
