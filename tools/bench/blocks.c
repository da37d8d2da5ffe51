/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks taken and given, and what of a decode step is the host's: before its first launch, and in the calls of a
 * layer. */
#include "bench/host.h"

#include <kvleaf/cache.h>

#include <stdio.h>
#include <stdlib.h>

/* Seconds to extend by the prompts and to give all back. */
static kvleaf_status time_blocks(const host_batch *work, host_times *taken, host_times *given)
{
    kvleaf_blocks *blocks = NULL;
    kvleaf_status status = host_manager(work, false, &blocks);
    for (int run = -HOST_WARM_RUNS; !status && run < work->runs; run++) {
        status = host_create_all(work, blocks);
        double start = bench_seconds();
        if (!status)
            status = host_extend_all(work, blocks, false);
        double middle = bench_seconds();
        if (!status)
            status = host_destroy_all(work, blocks);
        double end = bench_seconds();
        if (run >= 0) {
            host_add_time(taken, middle - start);
            host_add_time(given, end - middle);
        }
    }
    kvleaf_blocks_destroy(&blocks);
    return status;
}

/* The parts of a decode step that are the host's. What a call leaves to the device is waited for before the next. */
enum { EXTEND, PLAN, APPEND, ATTEND, COMMIT, PARTS };

typedef struct decode_times {
    host_times parts[PARTS];
    char variant[128];
} decode_times;

typedef struct decode_rig {
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    kvleaf_batch_entry *entries;
    cl_mem rows; /* zeros: queries, new keys and values */
    cl_mem out;
} decode_rig;

/* Runs with launches: attention over all of it takes long where the device is a CPU. */
enum { MOST_LAUNCHES = 32 };

/* One row a sequence, as wide as the queries'. */
static kvleaf_status open_rows(const host_batch *work, decode_rig *rig)
{
    const cli_shape *shape = &work->config->shape;
    size_t bytes = (size_t)work->config->batch * (size_t)shape->heads * (size_t)shape->head_dim *
                   kvleaf_dtype_size((kvleaf_dtype)shape->q_dtype);
    cl_mem *buffers[] = {&rig->rows, &rig->out};
    for (int i = 0; i < 2; i++) {
        const uint8_t zero = 0;
        *buffers[i] = clCreateBuffer(kvleaf_device_context(work->rig->device), CL_MEM_READ_WRITE, bytes, NULL, NULL);
        if (!*buffers[i] || clEnqueueFillBuffer(work->rig->queue, *buffers[i], &zero, 1, 0, bytes, 0, NULL, NULL))
            return KVLEAF_NO_MEMORY;
    }
    return KVLEAF_OK;
}

static kvleaf_status open_decode(const host_batch *work, decode_rig *rig)
{
    const bench_config *config = work->config;
    const cli_shape *shape = &config->shape;
    const kvleaf_layer layer = {
        .num_heads = shape->heads, .num_kv_heads = shape->kv_heads, .head_dim_k = shape->head_dim};
    kvleaf_status status = kvleaf_pool_create(
        work->rig->device,
        kvleaf_pool_params(.num_blocks = work->num_blocks, .block_size = shape->block_size,
                           .num_kv_heads = shape->kv_heads, .head_dim_k = shape->head_dim,
                           .dtype = (kvleaf_dtype)shape->kv_dtype, .layout = (kvleaf_layout)config->layout),
        &rig->pool);
    if (!status)
        status = kvleaf_cache_create(work->rig->device,
                                     kvleaf_cache_params(.layers = &layer, .num_layers = 1, .pools = &rig->pool,
                                                         .num_pools = 1, .q_dtype = (kvleaf_dtype)shape->q_dtype,
                                                         .out_dtype = (kvleaf_dtype)shape->q_dtype,
                                                         .max_sequences = config->batch, .free_order = work->order,
                                                         .free_count = work->num_blocks),
                                     &rig->cache);
    if (!status)
        status = kvleaf_plan_create(rig->cache, kvleaf_plan_params(.max_tokens = config->batch * config->context),
                                    &rig->plan);
    return status ? status : open_rows(work, rig);
}

static void close_decode(decode_rig *rig)
{
    kvleaf_plan_destroy(&rig->plan);
    kvleaf_cache_destroy(&rig->cache);
    kvleaf_pool_destroy(&rig->pool);
    if (rig->rows)
        clReleaseMemObject(rig->rows);
    if (rig->out)
        clReleaseMemObject(rig->out);
    free(rig->entries);
}

static kvleaf_status extend_decode(const host_batch *work, const decode_rig *rig, int count, bool create)
{
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < work->config->batch; i++) {
        kvleaf_tokens tokens = {.struct_size = sizeof(tokens),
                                .ids = work->ids + (size_t)i * (size_t)work->config->context,
                                .count = count};
        if (create)
            status = kvleaf_seq_create(rig->cache, NULL, &work->seqs[i]);
        if (!status)
            status = kvleaf_seq_extend(rig->cache, work->seqs[i], &tokens, NULL);
        rig->entries[i] = (kvleaf_batch_entry){.seq = work->seqs[i], .num_q = count};
    }
    return status;
}

/* Seconds since *since, which becomes now; then waits for the device. */
static double lap(const host_batch *work, double *since)
{
    double now = bench_seconds(), seconds = now - *since;
    clFinish(work->rig->queue);
    *since = bench_seconds();
    return seconds;
}

static kvleaf_status launch_layer(const host_batch *work, const decode_rig *rig, double *since, double seconds[PARTS])
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    const kvleaf_tensor rows = {.handle = rig->rows, .dtype = (kvleaf_dtype)work->config->shape.q_dtype};
    kvleaf_tensor out = rows;
    out.handle = rig->out;
    kvleaf_status status = kvleaf_append(rig->plan, 0, &rows, &rows, &exec);
    seconds[APPEND] = lap(work, since);
    if (!status)
        status = kvleaf_attend(rig->plan, 0, &rows, &out, NULL, &exec);
    seconds[ATTEND] = lap(work, since);
    return status;
}

/* A step of all sequences, with or without its launches: how long each part took. */
static kvleaf_status step_decode(const host_batch *work, const decode_rig *rig, int count, bool launch,
                                 double seconds[PARTS])
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    double since = bench_seconds();
    kvleaf_status status = extend_decode(work, rig, count, count > 1);
    seconds[EXTEND] = lap(work, &since);
    if (!status)
        status = kvleaf_plan_build(rig->plan, rig->cache, rig->entries, work->config->batch, &exec);
    seconds[PLAN] = lap(work, &since);
    if (!status && launch)
        status = launch_layer(work, rig, &since, seconds);
    if (!status)
        status = kvleaf_plan_commit(rig->plan, NULL);
    seconds[COMMIT] = lap(work, &since);
    return status;
}

static kvleaf_status time_decode(const host_batch *work, decode_times *out)
{
    decode_rig rig = {.entries = calloc((size_t)work->config->batch, sizeof(*rig.entries))};
    double seconds[PARTS];
    kvleaf_status status = rig.entries ? open_decode(work, &rig) : KVLEAF_NO_MEMORY;
    if (!status)
        status = step_decode(work, &rig, work->config->context, false, seconds);
    for (int run = -HOST_WARM_RUNS; !status && run < work->runs; run++) {
        const bool launch = run < MOST_LAUNCHES;
        status = step_decode(work, &rig, 1, launch, seconds);
        for (int part = 0; run >= 0 && part < PARTS; part++)
            if (launch || (part != APPEND && part != ATTEND))
                host_add_time(&out->parts[part], seconds[part]);
    }
    if (!status)
        snprintf(out->variant, sizeof(out->variant), "%s", kvleaf_plan_variant(rig.plan, "decode"));
    close_decode(&rig);
    return status;
}

static int measure_blocks(const host_batch *work)
{
    static host_times taken, given;
    static decode_times decode;
    if (time_blocks(work, &taken, &given) || time_decode(work, &decode))
        return cli_fail(work->rig->program, "the step");
    double blocks = (double)work->config->batch *
                    ((work->config->context + work->config->shape.block_size - 1) / work->config->shape.block_size);
    host_times *parts = decode.parts;
    const host_figure figures[] = {{"ns_per_block_taken", host_median(&taken) / blocks * 1e9},
                                   {"ns_per_block_given", host_median(&given) / blocks * 1e9},
                                   {"plan_us", host_median(&parts[PLAN]) * 1e6},
                                   {"extend_us", host_median(&parts[EXTEND]) * 1e6},
                                   {"append_us", host_median(&parts[APPEND]) * 1e6},
                                   {"attend_us", host_median(&parts[ATTEND]) * 1e6},
                                   {"commit_us", host_median(&parts[COMMIT]) * 1e6}};
    host_print(work, "blocks", work->rig->caps.device_name, decode.variant, &parts[PLAN], figures,
               sizeof figures / sizeof *figures);
    return CLI_OK;
}

int bench_blocks_run(const bench_rig *rig, const bench_config *config)
{
    return host_run(rig, config, 256, 512, measure_blocks);
}
