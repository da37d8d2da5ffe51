/* SPDX-License-Identifier: Apache-2.0 */
/* One configuration: its buffers, its check against the reference, its time. */
#define _POSIX_C_SOURCE 200809L
#include "bench/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "reference.h"

enum { MAX_SETS = 32, MAX_RUNS = 1000, USUAL_RUNS = 50, LEAST_RUNS = 7 };

/* Seconds that a configuration's runs may take in all, and that one run takes at least on a GPU: many launches and one
 * wait, so that the wait does not count. */
static const double longest = 4, shortest = 5e-3;

typedef struct workload {
    const bench_rig *rig;
    const bench_config *config;
    int total_q, num_blocks, columns, sets;
    int longest;     /* keys of a sequence */
    int64_t total_k; /* keys of all */
    kvleaf_layout layout;
    int32_t *cu_q, *cu_k, *lens;
    int32_t *order; /* [num_blocks] every block once */
    int32_t *table; /* [batch, columns] */
    kvleaf_family *families;
    kvleaf_pool *pool; /* a layer a set */
    kvleaf_attention *attention;
    cl_mem q, out, lse, k_new, v_new, device_table;
    kvleaf_kv_view views[MAX_SETS];
    reference_kv kv; /* how set 0 lies */
    int64_t layer_bytes, block_bytes;
} workload;

static int fail_cl(const char *what, cl_int error)
{
    fprintf(stderr, "kvleaf-bench: %s failed (%d)\n", what, error);
    return CLI_FAILED;
}

static bool paged(const workload *work)
{
    return work->config->shape.block_size > 0;
}

/* The pool's blocks, or as many 16-token ones as contiguous tokens need. */
static int block_tokens(const workload *work)
{
    return paged(work) ? work->config->shape.block_size : 16;
}

/* Sets so that no set is still in a cache when its turn comes round again. */
static int count_sets(const workload *work, uint64_t set_bytes)
{
    uint64_t wanted = (uint64_t)1 << 30, most = work->rig->caps.global_bytes / 4;
    int sets = (int)((wanted + set_bytes - 1) / set_bytes);
    if ((uint64_t)sets * set_bytes > most)
        sets = (int)(most / set_bytes);
    if (work->config->kind == BENCH_PREFILL && sets > 2)
        sets = 2;
    return sets < 1 ? 1 : sets > MAX_SETS ? MAX_SETS : sets;
}

static int make_pool(workload *work)
{
    const bench_config *config = work->config;
    kvleaf_layout asked = (kvleaf_layout)config->layout;
    bool strided = !paged(work) || asked == KVLEAF_LAYOUT_STRIDED;
    kvleaf_pool_params params = {.struct_size = sizeof(params),
                                 .num_layers = 1,
                                 .num_blocks = work->num_blocks,
                                 .block_size = block_tokens(work),
                                 .num_kv_heads = config->shape.kv_heads,
                                 .num_heads = config->shape.heads,
                                 .head_dim_k = config->shape.head_dim,
                                 .dtype = (kvleaf_dtype)config->shape.kv_dtype,
                                 .layout = strided ? KVLEAF_LAYOUT_ROWS : asked};
    kvleaf_pool_bytes bytes = {.struct_size = sizeof(bytes)};
    if (kvleaf_pool_size(work->rig->device, &params, &bytes) != KVLEAF_OK)
        return cli_fail(work->rig->program, "no pool");
    work->layer_bytes = (int64_t)bytes.layer_bytes;
    work->block_bytes = (int64_t)bytes.block_bytes;
    work->layout = strided ? KVLEAF_LAYOUT_STRIDED : bytes.layout;
    work->sets = count_sets(work, bytes.layer_bytes);
    params.num_layers = work->sets;
    if (kvleaf_pool_create(work->rig->device, &params, &work->pool) != KVLEAF_OK)
        return cli_fail(work->rig->program, "no pool");
    return CLI_OK;
}

/* Where the elements of a set are: the pool's layout, or NHD over the same memory, contiguous K and V half of it each.
 */
static void place(workload *work)
{
    const cli_shape *shape = &work->config->shape;
    int64_t size = (int64_t)kvleaf_dtype_size((kvleaf_dtype)shape->kv_dtype);
    int64_t tile = (int64_t)kvleaf_layout_tile(
        work->layout == KVLEAF_LAYOUT_STRIDED ? KVLEAF_LAYOUT_ROWS : work->layout, block_tokens(work), shape->head_dim);
    reference_kv *kv = &work->kv;
    kv->dtype = (kvleaf_dtype)shape->kv_dtype;
    kv->layout = work->layout;
    kv->block_size = shape->block_size;
    kv->head_dim = shape->head_dim;
    kv->block_stride = work->block_bytes / size;
    kv->v_offset = (paged(work) ? work->block_bytes : work->layer_bytes) / 2 / size;
    kv->k_token_stride = kv->v_token_stride = (int64_t)shape->kv_heads * shape->head_dim;
    kv->k_head_stride = kv->v_head_stride = work->layout == KVLEAF_LAYOUT_STRIDED ? shape->head_dim : tile;
}

static int fill_sets(workload *work)
{
    const cli_shape *shape = &work->config->shape;
    kvleaf_dtype dtype = (kvleaf_dtype)shape->kv_dtype;
    uint64_t elements = (uint64_t)work->layer_bytes / kvleaf_dtype_size(dtype);
    for (int i = 0; i < work->sets; i++) {
        kvleaf_kv_view *view = &work->views[i];
        view->struct_size = sizeof(*view);
        if (kvleaf_pool_view(work->pool, i, view) != KVLEAF_OK)
            return cli_fail(work->rig->program, "no pool memory");
        cl_int error =
            bench_fill_kv(work->rig, view->k.handle, dtype, elements, (uint32_t)(i + 1), (uint64_t)work->kv.v_offset);
        if (error != CL_SUCCESS)
            return fail_cl("filling K and V", error);
        view->layout = work->layout;
        view->v.offset = (uint64_t)work->kv.v_offset * kvleaf_dtype_size(dtype);
    }
    return CLI_OK;
}

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* A log-normal length of that mean, by Box and Muller's transform; at most eight times the mean. */
static int ragged_length(int mean, uint64_t *state)
{
    const double sigma = 0.8, turn = 6.283185307179586, scale = 1.0 / 2147483648.0;
    double radius = ((double)draw(state) + 1) * scale, angle = (double)draw(state) * scale;
    double normal = sqrt(-2 * log(radius)) * cos(turn * angle);
    double length = mean * exp(sigma * normal - sigma * sigma / 2);
    return (int)fmin(fmax(length, 1), 8.0 * mean);
}

/* Where lengths are ragged, in prefill those of the cached tokens before the new ones are. */
static int draw_length(const bench_config *config, uint64_t *state)
{
    int new_tokens = config->kind == BENCH_PREFILL ? config->q_len : 0;
    return config->ragged ? new_tokens + ragged_length(config->context - new_tokens, state) : config->context;
}

/* Lengths, and how many blocks and columns of the table they take. */
static void make_lengths(workload *work, int shared, uint64_t *state)
{
    const bench_config *config = work->config;
    int block = block_tokens(work);
    work->num_blocks = shared;
    for (int i = 0; i < config->batch; i++) {
        int length = draw_length(config, state);
        work->lens[i] = length;
        work->longest = length > work->longest ? length : work->longest;
        work->total_k += length;
        work->num_blocks += (length + block - 1) / block - shared;
        work->cu_q[i + 1] = work->cu_q[i] + config->q_len;
        work->cu_k[i + 1] = work->cu_k[i] + length;
        work->families[i] = config->kind == BENCH_DECODE ? KVLEAF_FAMILY_DECODE : KVLEAF_FAMILY_PREFILL;
    }
    work->columns = (work->longest + block - 1) / block;
    work->total_q = config->batch * config->q_len;
}

/* Gives each sequence blocks of its own, in a random order unless asked otherwise, but for those of a shared prefix; -1
 * where it has none. */
static void make_table(workload *work, int shared, uint64_t *state)
{
    int block = block_tokens(work), next = shared;
    for (int i = 0; i < work->num_blocks; i++) {
        int other = work->config->in_order ? i : (int)(draw(state) % (uint64_t)(i + 1));
        work->order[i] = work->order[other];
        work->order[other] = i;
    }
    for (int i = 0; i < work->config->batch * work->columns; i++) {
        int column = i % work->columns;
        bool there = column * block < work->lens[i / work->columns];
        work->table[i] = column < shared ? work->order[column] : there ? work->order[next++] : -1;
    }
}

static bool make_batch(workload *work)
{
    unsigned batch = (unsigned)work->config->batch;
    int shared = work->config->shared_prefix / block_tokens(work);
    uint64_t state = work->config->seed;
    work->cu_q = calloc(batch + 1u, sizeof(int32_t));
    work->cu_k = calloc(batch + 1u, sizeof(int32_t));
    work->lens = calloc(batch, sizeof(int32_t));
    work->families = calloc(batch, sizeof(kvleaf_family));
    if (!work->cu_q || !work->cu_k || !work->lens || !work->families)
        return false;
    make_lengths(work, shared, &state);
    work->order = calloc((unsigned)work->num_blocks, sizeof(int32_t));
    work->table = calloc((size_t)batch * (unsigned)work->columns, sizeof(int32_t));
    if (!work->order || !work->table)
        return false;
    make_table(work, shared, &state);
    return true;
}

static int make_tensors(workload *work)
{
    const bench_config *config = work->config;
    const cli_shape *shape = &config->shape;
    cl_context context = kvleaf_device_context(work->rig->device);
    kvleaf_dtype dtype = (kvleaf_dtype)shape->q_dtype;
    uint64_t rows = (uint64_t)work->total_q * (uint64_t)shape->heads, size = kvleaf_dtype_size(dtype);
    uint64_t new_elements = (uint64_t)work->total_q * (uint64_t)shape->kv_heads * (uint64_t)shape->head_dim;
    size_t table_bytes = (size_t)work->num_blocks * sizeof(int32_t);
    cl_int error[6] = {0};
    work->q = clCreateBuffer(context, CL_MEM_READ_WRITE, rows * (uint64_t)shape->head_dim * size, NULL, &error[0]);
    work->out = clCreateBuffer(context, CL_MEM_READ_WRITE, rows * (uint64_t)shape->head_dim * size, NULL, &error[1]);
    work->lse = clCreateBuffer(context, CL_MEM_READ_WRITE, rows * sizeof(float), NULL, &error[2]);
    work->k_new = clCreateBuffer(context, CL_MEM_READ_WRITE, new_elements * size, NULL, &error[3]);
    work->v_new = clCreateBuffer(context, CL_MEM_READ_WRITE, new_elements * size, NULL, &error[4]);
    work->device_table =
        clCreateBuffer(context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, table_bytes, work->order, &error[5]);
    for (int i = 0; i < 6; i++) {
        if (error[i] != CL_SUCCESS)
            return fail_cl("making a buffer", error[i]);
    }
    cl_int filled = bench_fill(work->rig, work->q, dtype, rows * (uint64_t)shape->head_dim, 77, 3.46f);
    if (filled == CL_SUCCESS)
        filled = bench_fill(work->rig, work->k_new, dtype, new_elements, 78, 3.46f);
    if (filled == CL_SUCCESS)
        filled = bench_fill(work->rig, work->v_new, dtype, new_elements, 79, 1.5f);
    return filled == CL_SUCCESS ? CLI_OK : fail_cl("filling q", filled);
}

static int make_attention(workload *work)
{
    const bench_config *config = work->config;
    const cli_shape *shape = &config->shape;
    kvleaf_attention_params params = {.struct_size = sizeof(params),
                                      .num_heads = shape->heads,
                                      .num_kv_heads = shape->kv_heads,
                                      .head_dim_k = shape->head_dim,
                                      .q_dtype = (kvleaf_dtype)shape->q_dtype,
                                      .kv_dtype = (kvleaf_dtype)shape->kv_dtype,
                                      .out_dtype = (kvleaf_dtype)shape->q_dtype,
                                      .layout = work->layout,
                                      .block_size = shape->block_size,
                                      .window = shape->window,
                                      .softcap = (float)shape->softcap,
                                      .max_seqs = config->batch,
                                      .max_tokens = work->total_q,
                                      .max_context = work->longest,
                                      .sharing = config->sharing};
    params.max_decode_keys = config->kind == BENCH_DECODE ? work->total_k * config->q_len : work->longest;
    if (kvleaf_attention_create(work->rig->device, &params, &work->attention) != KVLEAF_OK)
        return cli_fail(work->rig->program, "no attention object");
    kvleaf_batch batch = {.struct_size = sizeof(batch),
                          .num_seqs = config->batch,
                          .cu_seqlens_q = work->cu_q,
                          .families = work->families};
    if (paged(work)) {
        batch.seq_lens_k = work->lens;
        batch.block_table = work->table;
        batch.block_table_stride = work->columns;
        batch.num_blocks = work->num_blocks;
    } else {
        batch.cu_seqlens_k = work->cu_k;
    }
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    if (kvleaf_attention_plan(work->attention, &batch, &exec) != KVLEAF_OK)
        return cli_fail(work->rig->program, "no plan");
    return CLI_OK;
}

static kvleaf_status launch(const workload *work, int set)
{
    kvleaf_dtype dtype = (kvleaf_dtype)work->config->shape.q_dtype;
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    kvleaf_tensor q = {.handle = work->q, .dtype = dtype}, out = {.handle = work->out, .dtype = dtype};
    kvleaf_tensor lse = {.handle = work->lse, .dtype = KVLEAF_F32};
    kvleaf_tensor k = {.handle = work->k_new, .dtype = dtype}, v = {.handle = work->v_new, .dtype = dtype};
    if (work->config->kind == BENCH_APPEND)
        return kvleaf_attention_append(work->attention, &k, &v, &work->views[set], &exec);
    return kvleaf_attention_attend(work->attention, &q, &work->views[set], &out, &lse, &exec);
}

static void *read_all(const workload *work, cl_mem buffer)
{
    size_t bytes = 0;
    if (clGetMemObjectInfo(buffer, CL_MEM_SIZE, sizeof(bytes), &bytes, NULL) != CL_SUCCESS)
        return NULL;
    void *data = malloc(bytes);
    if (data && clEnqueueReadBuffer(work->rig->queue, buffer, CL_TRUE, 0, bytes, data, 0, NULL, NULL) != CL_SUCCESS) {
        free(data);
        data = NULL;
    }
    return data;
}

static reference_seq seq_of(const workload *work, int index)
{
    reference_seq seq = {.table = work->table + (size_t)index * (size_t)work->columns,
                         .first = work->cu_k[index],
                         .q_len = work->config->q_len,
                         .kv_len = work->lens[index],
                         .causal = true,
                         .window = work->config->shape.window,
                         .softcap = (float)work->config->shape.softcap};
    return seq;
}

/* The first and the last sequence, first, middle and last row, first and last head. */
static double attend_error(const workload *work, const void *q, const void *out)
{
    const cli_shape *shape = &work->config->shape;
    int seqs[] = {0, work->config->batch - 1}, heads[] = {0, shape->heads - 1};
    int rows[] = {0, work->config->q_len / 2, work->config->q_len - 1};
    double worst = 0;
    for (int n = 0; n < 12; n++) {
        int index = seqs[n % 2], head = heads[n / 2 % 2], row = rows[n / 4];
        double query[256], expected[256];
        float actual[256];
        reference_seq seq = seq_of(work, index);
        size_t at = ((size_t)(work->cu_q[index] + row) * (size_t)shape->heads + (size_t)head) * (size_t)shape->head_dim;
        for (int d = 0; d < shape->head_dim; d++) {
            query[d] = reference_load((kvleaf_dtype)shape->q_dtype, q, at + (size_t)d);
            actual[d] = reference_load((kvleaf_dtype)shape->q_dtype, out, at + (size_t)d);
        }
        reference_row(&work->kv, &seq, head / (shape->heads / shape->kv_heads), reference_visible(&seq, row),
                      reference_scale(0, shape->head_dim), query, expected);
        worst = fmax(worst, reference_row_error(expected, actual, shape->head_dim));
    }
    return worst;
}

/* The keys of the first and the last new token as they must be stored. */
static double append_error(const workload *work, const void *source)
{
    const cli_shape *shape = &work->config->shape;
    int seqs[] = {0, work->config->batch - 1}, rows[] = {0, work->config->q_len - 1};
    for (int n = 0; n < 4; n++) {
        int index = seqs[n % 2], row = rows[n / 2];
        reference_seq seq = seq_of(work, index);
        for (int e = 0; e < shape->kv_heads * shape->head_dim; e++) {
            size_t from = (size_t)(work->cu_q[index] + row) * (size_t)(shape->kv_heads * shape->head_dim) + (size_t)e;
            size_t to = reference_seq_index(&work->kv, &seq, false, seq.kv_len - seq.q_len + row, e / shape->head_dim,
                                            e % shape->head_dim);
            float rounded;
            reference_store(work->kv.dtype, &rounded, 0, reference_load((kvleaf_dtype)shape->q_dtype, source, from));
            if (reference_load(work->kv.dtype, work->kv.k, to) != reference_load(work->kv.dtype, &rounded, 0))
                return INFINITY;
        }
    }
    return 0;
}

static int verify(workload *work, bench_result *result)
{
    const cli_shape *shape = &work->config->shape;
    kvleaf_dtype dtype = (kvleaf_dtype)shape->q_dtype;
    if (launch(work, 0) != KVLEAF_OK)
        return cli_fail(work->rig->program, "the first launch");
    void *q = read_all(work, work->config->kind == BENCH_APPEND ? work->k_new : work->q);
    void *out = read_all(work, work->out);
    void *kv = read_all(work, work->views[0].k.handle);
    result->tolerance = reference_tolerance(dtype, work->kv.dtype, dtype);
    result->error = INFINITY;
    work->kv.k = work->kv.v = kv;
    if (q && out && kv)
        result->error = work->config->kind == BENCH_APPEND ? append_error(work, q) : attend_error(work, q, out);
    free(q);
    free(out);
    free(kv);
    if (result->error <= result->tolerance)
        return CLI_OK;
    fprintf(stderr, "kvleaf-bench: the result is wrong: error %.3g, at most %.3g\n", result->error, result->tolerance);
    return CLI_FAILED;
}

/* Seconds a launch, over `count` of them back to back and one wait; negative on failure. */
static double time_launches(const workload *work, int count, int *set)
{
    double start = bench_seconds();
    for (int i = 0; i < count; i++) {
        if (launch(work, *set) != KVLEAF_OK)
            return -1;
        *set = (*set + 1) % work->sets;
    }
    if (clFinish(work->rig->queue) != CL_SUCCESS)
        return -1;
    return (bench_seconds() - start) / count;
}

/* Nothing runs on the device for so long. */
static void rest(int ms)
{
    const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_runs(const workload *work, bench_result *result)
{
    double times[MAX_RUNS];
    int set = 0, count = 1;
    double once = time_launches(work, work->rig->gpu ? 20 : work->sets > 2 ? 2 : 1, &set);
    if (once < 0)
        return cli_fail(work->rig->program, "a launch");
    if (work->rig->gpu && once < shortest)
        count = (int)(shortest / once) + 1;
    int runs = work->config->runs;
    if (runs == 0)
        runs = once * count * USUAL_RUNS <= longest ? USUAL_RUNS : (int)(longest / (once * count));
    runs = runs > MAX_RUNS ? MAX_RUNS : work->config->runs == 0 && runs < LEAST_RUNS ? LEAST_RUNS : runs;
    for (int i = 0; i < runs; i++) {
        if (work->config->rest_ms)
            rest(work->config->rest_ms);
        times[i] = time_launches(work, count, &set);
        if (times[i] < 0)
            return cli_fail(work->rig->program, "a launch");
    }
    qsort(times, (size_t)runs, sizeof(times[0]), compare_doubles);
    result->runs = runs;
    result->best_us = times[0] * 1e6;
    result->median_us = (times[(runs - 1) / 2] + times[runs / 2]) / 2 * 1e6;
    return CLI_OK;
}

/* Bytes that must be moved and multiply-adds that are needed, at 2 a multiply-add. */
static void count_work(const workload *work, bench_result *result)
{
    const bench_config *config = work->config;
    const cli_shape *shape = &config->shape;
    double token = 2.0 * shape->kv_heads * shape->head_dim;
    double kv_size = (double)kvleaf_dtype_size((kvleaf_dtype)shape->kv_dtype);
    double q_size = (double)kvleaf_dtype_size((kvleaf_dtype)shape->q_dtype);
    double window = shape->window ? shape->window : INFINITY;
    double seen = 0; /* keys, summed over the rows */
    for (int i = 0; i < config->batch; i++)
        for (int row = 0; row < config->q_len; row++)
            seen += fmin(window, fmax(0, row + 1 + work->lens[i] - config->q_len));
    result->flops = 4.0 * seen * shape->heads * shape->head_dim;
    double reach = window + config->q_len - 1, keys = 0; /* keys that must be read, summed over the sequences */
    for (int i = 0; i < config->batch; i++)
        keys += fmin(work->lens[i], reach);
    keys -= (config->batch - 1.0) * fmax(0, config->shared_prefix - (config->context - fmin(config->context, reach)));
    result->bytes = config->kind == BENCH_APPEND ? work->total_q * token * (kv_size + q_size) : keys * token * kv_size;
}

static void destroy(workload *work)
{
    cl_mem buffers[] = {work->q, work->out, work->lse, work->k_new, work->v_new, work->device_table};
    kvleaf_attention_destroy(&work->attention);
    kvleaf_pool_destroy(&work->pool);
    for (int i = 0; i < 6; i++) {
        if (buffers[i])
            clReleaseMemObject(buffers[i]);
    }
    free(work->cu_q);
    free(work->cu_k);
    free(work->lens);
    free(work->order);
    free(work->table);
    free(work->families);
}

/* Limits are measured before and after, since other programs on the machine come and go. */
static void keep_higher(bench_ceilings *into, const bench_ceilings *other)
{
    into->read_gb_per_s = fmax(into->read_gb_per_s, other->read_gb_per_s);
    into->table_read_gb_per_s = fmax(into->table_read_gb_per_s, other->table_read_gb_per_s);
    into->copy_gb_per_s = fmax(into->copy_gb_per_s, other->copy_gb_per_s);
    into->fma_gflop_per_s = fmax(into->fma_gflop_per_s, other->fma_gflop_per_s);
}

static int measure(workload *work, bench_result *result)
{
    static const char *const operations[] = {"decode", "prefill", "append"};
    static char variant[128];
    bench_blocks blocks = {.memory = work->views[0].k.handle,
                           .table = work->device_table,
                           .entries = work->num_blocks,
                           .block_bytes = work->block_bytes};
    const bench_blocks *limit = paged(work) && !work->config->shared_prefix ? &blocks : NULL;
    snprintf(variant, sizeof(variant), "%s", kvleaf_attention_variant(work->attention, operations[work->config->kind]));
    result->variant = variant;
    result->layout = paged(work) ? kvleaf_layout_name(work->layout) : "contiguous";
    count_work(work, result);
    int status = verify(work, result);
    bench_ceilings after;
    if (status == CLI_OK)
        status = bench_measure_ceilings(work->rig, work->config->kind, limit, &result->ceilings);
    if (status == CLI_OK)
        status = time_runs(work, result);
    if (status == CLI_OK)
        status = bench_measure_ceilings(work->rig, work->config->kind, limit, &after);
    if (status == CLI_OK)
        keep_higher(&result->ceilings, &after);
    return status;
}

int bench_run(const bench_rig *rig, const bench_config *config, bench_result *result)
{
    workload work = {.rig = rig, .config = config};
    memset(result, 0, sizeof(*result));
    int status = make_batch(&work) ? CLI_OK : fail_cl("allocating the batch", CL_OUT_OF_HOST_MEMORY);
    if (status == CLI_OK)
        status = make_pool(&work);
    if (status == CLI_OK) {
        place(&work);
        status = fill_sets(&work);
    }
    if (status == CLI_OK)
        status = make_tensors(&work);
    if (status == CLI_OK)
        status = make_attention(&work);
    if (status == CLI_OK)
        status = measure(&work, result);
    destroy(&work);
    return status;
}
