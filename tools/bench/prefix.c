/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens looked up in the prefix cache and entered into it. */
#include "bench/host.h"

#include <stdio.h>

static kvleaf_status commit_all(const host_batch *work, kvleaf_blocks *blocks)
{
    for (int i = 0; i < work->config->batch; i++)
        work->num_q[i] = work->config->context;
    kvleaf_status status = kvleaf_blocks_step_begin(blocks, work->seqs, work->num_q, work->config->batch);
    return status ? status : kvleaf_blocks_step_commit(blocks, work->seqs, NULL, work->config->batch);
}

/* Seconds to commit the prompts, with an index or without. */
static kvleaf_status time_commit(const host_batch *work, bool prefix_cache, host_times *commit)
{
    kvleaf_blocks *blocks = NULL;
    kvleaf_status status = host_manager(work, prefix_cache, &blocks);
    for (int run = -HOST_WARM_RUNS; !status && run < work->runs; run++) {
        status = host_create_all(work, blocks);
        if (!status)
            status = host_extend_all(work, blocks, true);
        double start = bench_seconds();
        if (!status)
            status = commit_all(work, blocks);
        double end = bench_seconds();
        if (run >= 0)
            host_add_time(commit, end - start);
        if (!status)
            status = host_destroy_all(work, blocks);
        if (!status)
            status = kvleaf_blocks_prefix_clear(blocks);
    }
    kvleaf_blocks_destroy(&blocks);
    return status;
}

static kvleaf_status match_all(const host_batch *work, const kvleaf_blocks *blocks, int64_t *matched)
{
    int context = work->config->context;
    kvleaf_status status = KVLEAF_OK;
    *matched = 0;
    for (int i = 0; !status && i < work->config->batch; i++) {
        kvleaf_tokens tokens = {
            .struct_size = sizeof(tokens), .ids = work->ids + (size_t)i * (size_t)context, .count = context};
        int64_t found = 0;
        status = kvleaf_blocks_prefix_match(blocks, NULL, &tokens, &found);
        *matched += found;
    }
    return status;
}

/* Seconds to look the prompts up, all of which are there, and to extend by them and give them back. */
static kvleaf_status time_match(const host_batch *work, host_times *match, host_times *hit, int64_t *matched)
{
    kvleaf_blocks *blocks = NULL;
    kvleaf_status status = host_manager(work, true, &blocks);
    if (!status)
        status = host_create_all(work, blocks);
    if (!status)
        status = host_extend_all(work, blocks, true);
    if (!status)
        status = commit_all(work, blocks);
    if (!status)
        status = host_destroy_all(work, blocks);
    for (int run = -HOST_WARM_RUNS; !status && run < work->runs; run++) {
        double start = bench_seconds();
        status = match_all(work, blocks, matched);
        double middle = bench_seconds();
        if (!status)
            status = host_create_all(work, blocks);
        if (!status)
            status = host_extend_all(work, blocks, true);
        if (!status)
            status = host_destroy_all(work, blocks);
        double end = bench_seconds();
        if (run >= 0) {
            host_add_time(match, middle - start);
            host_add_time(hit, end - middle);
        }
    }
    kvleaf_blocks_destroy(&blocks);
    return status;
}

static int measure_prefix(const host_batch *work)
{
    static host_times match, hit, indexed, plain;
    int64_t matched = 0;
    double tokens = (double)work->config->batch * work->config->context;
    if (time_match(work, &match, &hit, &matched) || time_commit(work, true, &indexed) ||
        time_commit(work, false, &plain))
        return cli_fail(work->rig->program, "the prefix cache");
    /* One token of each prompt is always left to compute. */
    if (matched < (int64_t)tokens - (int64_t)work->config->batch * work->config->shape.block_size) {
        fprintf(stderr, "kvleaf-bench: only %lld of %.0f tokens are found\n", (long long)matched, tokens);
        return CLI_FAILED;
    }
    /* Only a block that is entered is hashed for certain: a look compares where a block has one continuation. */
    const host_figure figures[] = {
        {"ns_per_token_hashed", (host_median(&indexed) - host_median(&plain)) / tokens * 1e9},
        {"ns_per_token_matched", host_median(&match) / tokens * 1e9},
        {"ns_per_token_hit", host_median(&hit) / tokens * 1e9},
    };
    host_print(work, "prefix", "host", "xxh3", &match, figures, 3);
    return CLI_OK;
}

int bench_prefix_run(const bench_rig *rig, const bench_config *config)
{
    return host_run(rig, config, 16, 4096, measure_prefix);
}
