/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks taken and given, and what of a decode step is the host's before its first launch. */
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

/* What of a decode step is the host's before the first launch. */
typedef struct decode_times {
    host_times extend, plan, commit;
    char variant[128];
} decode_times;

typedef struct decode_rig {
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    kvleaf_batch_entry *entries;
} decode_rig;

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
    return status;
}

static void close_decode(decode_rig *rig)
{
    kvleaf_plan_destroy(&rig->plan);
    kvleaf_cache_destroy(&rig->cache);
    kvleaf_pool_destroy(&rig->pool);
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

/* A step of all sequences without its launches: how long each part took. */
static kvleaf_status step_decode(const host_batch *work, const decode_rig *rig, int count, bool create,
                                 double seconds[3])
{
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    double start = bench_seconds();
    kvleaf_status status = extend_decode(work, rig, count, create);
    double extended = bench_seconds();
    if (!status)
        status = kvleaf_plan_build(rig->plan, rig->cache, rig->entries, work->config->batch, &exec);
    double planned = bench_seconds();
    clFinish(work->rig->queue);
    double waited = bench_seconds();
    if (!status)
        status = kvleaf_plan_commit(rig->plan, NULL);
    seconds[0] = extended - start;
    seconds[1] = planned - extended;
    seconds[2] = bench_seconds() - waited;
    return status;
}

static kvleaf_status time_decode(const host_batch *work, decode_times *out)
{
    decode_rig rig = {.entries = calloc((size_t)work->config->batch, sizeof(*rig.entries))};
    double seconds[3];
    kvleaf_status status = rig.entries ? open_decode(work, &rig) : KVLEAF_NO_MEMORY;
    if (!status)
        status = step_decode(work, &rig, work->config->context, true, seconds);
    for (int run = -HOST_WARM_RUNS; !status && run < work->runs; run++) {
        status = step_decode(work, &rig, 1, false, seconds);
        if (run >= 0) {
            host_add_time(&out->extend, seconds[0]);
            host_add_time(&out->plan, seconds[1]);
            host_add_time(&out->commit, seconds[2]);
        }
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
    const host_figure figures[] = {{"ns_per_block_taken", host_median(&taken) / blocks * 1e9},
                                   {"ns_per_block_given", host_median(&given) / blocks * 1e9},
                                   {"plan_us", host_median(&decode.plan) * 1e6},
                                   {"extend_us", host_median(&decode.extend) * 1e6},
                                   {"commit_us", host_median(&decode.commit) * 1e6}};
    host_print(work, "blocks", work->rig->caps.device_name, decode.variant, &decode.plan, figures, 5);
    return CLI_OK;
}

int bench_blocks_run(const bench_rig *rig, const bench_config *config)
{
    return host_run(rig, config, 256, 512, measure_blocks);
}
