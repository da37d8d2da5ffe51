/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/host.h"

#include <kvleaf/cache.h>

#include <stdio.h>
#include <stdlib.h>

enum { USUAL_RUNS = 200 };

void host_add_time(host_times *to, double seconds)
{
    if (to->count < HOST_MAX_RUNS)
        to->seconds[to->count++] = seconds;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of sorted times. */
static double middle_of(const host_times *of)
{
    return (of->seconds[(of->count - 1) / 2] + of->seconds[of->count / 2]) / 2;
}

double host_median(host_times *of)
{
    qsort(of->seconds, (size_t)of->count, sizeof(double), compare_doubles);
    return middle_of(of);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 16;
}

static bool make_batch(host_batch *work)
{
    const bench_config *config = work->config;
    size_t batch = (size_t)config->batch, tokens = batch * (size_t)config->context;
    uint64_t random = config->seed * 0x9e3779b97f4a7c15u + 1;
    work->runs = config->runs ? config->runs : USUAL_RUNS;
    int steps = HOST_WARM_RUNS + (work->runs > HOST_LEAST_STEPS ? work->runs : HOST_LEAST_STEPS);
    work->num_blocks = config->batch * ((2 * config->context + steps) / config->shape.block_size + 2);
    work->seqs = calloc(batch, sizeof(*work->seqs));
    work->num_q = calloc(batch, sizeof(*work->num_q));
    work->ids = calloc(tokens, sizeof(*work->ids));
    work->order = calloc((size_t)work->num_blocks, sizeof(*work->order));
    if (!work->seqs || !work->num_q || !work->ids || !work->order)
        return false;
    for (size_t i = 0; i < tokens; i++)
        work->ids[i] = (int32_t)(next_random(&random) % 128000);
    for (int32_t i = 0; i < work->num_blocks; i++) {
        int32_t j = (int32_t)(next_random(&random) % (uint64_t)(i + 1));
        work->order[i] = work->order[j];
        work->order[j] = i;
    }
    return true;
}

static void free_batch(host_batch *work)
{
    free(work->seqs);
    free(work->num_q);
    free(work->ids);
    free(work->order);
}

kvleaf_status host_manager(const host_batch *work, bool prefix_cache, kvleaf_blocks **out)
{
    return kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = work->num_blocks,
                                                     .block_size = work->config->shape.block_size,
                                                     .max_sequences = work->config->batch, .free_order = work->order,
                                                     .free_count = work->num_blocks, .no_prefix_cache = !prefix_cache),
                                out);
}

kvleaf_status host_create_all(const host_batch *work, kvleaf_blocks *blocks)
{
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < work->config->batch; i++)
        status = kvleaf_blocks_seq_create(blocks, NULL, &work->seqs[i]);
    return status;
}

kvleaf_status host_extend_all(const host_batch *work, kvleaf_blocks *blocks, bool ids)
{
    int context = work->config->context;
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < work->config->batch; i++) {
        kvleaf_tokens tokens = {.struct_size = sizeof(tokens),
                                .ids = ids ? work->ids + (size_t)i * (size_t)context : NULL,
                                .count = context};
        status = kvleaf_blocks_seq_extend(blocks, work->seqs[i], &tokens, NULL);
    }
    return status;
}

kvleaf_status host_destroy_all(const host_batch *work, kvleaf_blocks *blocks)
{
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < work->config->batch; i++)
        status = kvleaf_blocks_seq_destroy(blocks, &work->seqs[i]);
    return status;
}

/* The fields that every row has. */
static cJSON *row_of(const host_batch *work, const char *bench, const char *device, const char *variant,
                     const host_times *what)
{
    const bench_config *config = work->config;
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "bench", bench);
    cJSON_AddStringToObject(row, "device", device);
    cJSON_AddStringToObject(row, "variant", variant);
    cJSON_AddNumberToObject(row, "batch", config->batch);
    cJSON_AddNumberToObject(row, "context", config->context);
    cJSON_AddNumberToObject(row, "q_len", 1);
    cJSON_AddNumberToObject(row, "heads", config->shape.heads);
    cJSON_AddNumberToObject(row, "kv_heads", config->shape.kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", config->shape.head_dim);
    cJSON_AddNumberToObject(row, "block_size", config->shape.block_size);
    cJSON_AddStringToObject(row, "kv_dtype", kvleaf_dtype_name((kvleaf_dtype)config->shape.kv_dtype));
    cJSON_AddNumberToObject(row, "median_us", middle_of(what) * 1e6);
    cJSON_AddNumberToObject(row, "best_us", what->seconds[0] * 1e6);
    cJSON_AddNumberToObject(row, "runs", what->count);
    return row;
}

void host_print(const host_batch *work, const char *bench, const char *device, const char *variant,
                const host_times *what, const host_figure *figures, int count)
{
    if (work->rig->program->json) {
        cJSON *row = row_of(work, bench, device, variant, what);
        for (int i = 0; i < count; i++)
            cJSON_AddNumberToObject(row, figures[i].name, figures[i].value);
        cli_row(row);
        return;
    }
    printf("%s: %d sequences of %d tokens, block size %d, median of %d runs, %s\n", bench, work->config->batch,
           work->config->context, work->config->shape.block_size, what->count, device);
    for (int i = 0; i < count; i++)
        printf("  %-26s %s%8.2f%s\n", figures[i].name, cli_colour(CLI_BOLD), figures[i].value, cli_colour(CLI_PLAIN));
}

int host_run(const bench_rig *rig, const bench_config *config, int batch, int context,
             int (*bench)(const host_batch *work))
{
    bench_config filled = *config;
    host_batch work = {.rig = rig, .config = &filled};
    filled.batch = config->batch ? config->batch : batch;
    filled.context = config->context ? config->context : context;
    if (filled.shape.kv_dtype < 0)
        filled.shape.kv_dtype = KVLEAF_F16;
    if (filled.shape.q_dtype < 0)
        filled.shape.q_dtype = filled.shape.kv_dtype;
    int status = CLI_FAILED;
    if (make_batch(&work))
        status = bench(&work);
    else
        fprintf(stderr, "kvleaf-bench: no memory for the batch\n");
    free_batch(&work);
    return status;
}
