/* SPDX-License-Identifier: Apache-2.0 */
/* A decode step of a model's attention through the managed cache: each layer by append and attend, by the call that
 * does both, and by that with a buffer a tensor. What a layer takes, how many kernels it launches, and what that costs
 * the host, in all and within the driver's call that enqueues a kernel. */
#include "bench/host.h"

#include <kvleaf/cache.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The loader's table, but for a count of launches and, in every other round, their time: looking at the clock takes
 * some of it. */
static kvleaf_opencl counting;
static int64_t launches;
static bool timing;
static double enqueue_seconds;

static cl_int CL_API_CALL count_launch(cl_command_queue queue, cl_kernel kernel, cl_uint dimensions,
                                       const size_t *offset, const size_t *global, const size_t *local,
                                       cl_uint num_wait, const cl_event *wait_list, cl_event *event)
{
    double begun = timing ? bench_seconds() : 0;
    cl_int error = clEnqueueNDRangeKernel(queue, kernel, dimensions, offset, global, local, num_wait, wait_list, event);
    if (timing)
        enqueue_seconds += bench_seconds() - begun;
    launches++;
    return error;
}

enum { TWO_CALLS, ONE_CALL, APART, WAYS };
_Static_assert((int)HOST_LEAST_STEPS >= 2 * (int)WAYS, "each way is timed in whole, and its enqueues are");
enum { Q, K, V, OUT, TENSORS };

typedef struct step_rig {
    kvleaf_device *device; /* of the same context, with the table above */
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    kvleaf_batch_entry *entries;
    cl_mem rows, buffers[TENSORS];
    kvleaf_tensor beside[TENSORS], apart[TENSORS]; /* side by side a token in `rows`; each in its own of the buffers */
    int layers;
} step_rig;

typedef struct step_times {
    host_times plan, whole[WAYS], host[WAYS], enqueue[WAYS]; /* of a layer, but the plan */
    double launches[WAYS];                                   /* of a layer */
    char variant[128];
} step_times;

static kvleaf_status open_device(const host_batch *work, step_rig *rig)
{
    kvleaf_device_params params;
    cli_device_params(work->rig->program, &params);
    counting = *kvleaf_opencl_loader();
    counting.EnqueueNDRangeKernel = count_launch;
    params.opencl = &counting;
    params.context = kvleaf_device_context(work->rig->device);
    params.device = kvleaf_device_id(work->rig->device);
    return kvleaf_device_create(&params, &rig->device);
}

/* A token a sequence of so many heads; queries and keys of a size as models have them, so that attention weighs many
 * keys. */
static kvleaf_status make_rows(const host_batch *work, const step_rig *rig, int heads, uint32_t seed, cl_mem *out)
{
    const cli_shape *shape = &work->config->shape;
    const kvleaf_dtype dtype = (kvleaf_dtype)shape->q_dtype;
    uint64_t elements = (uint64_t)work->config->batch * (uint64_t)heads * (uint64_t)shape->head_dim;
    *out = clCreateBuffer(kvleaf_device_context(rig->device), CL_MEM_READ_WRITE, elements * kvleaf_dtype_size(dtype),
                          NULL, NULL);
    bool filled = *out && bench_fill(work->rig, *out, dtype, elements, seed, 3.46f) == CL_SUCCESS;
    return filled ? KVLEAF_OK : KVLEAF_NO_MEMORY;
}

static kvleaf_status open_rows(const host_batch *work, step_rig *rig)
{
    const cli_shape *shape = &work->config->shape;
    const kvleaf_dtype dtype = (kvleaf_dtype)shape->q_dtype;
    const int heads[TENSORS] = {shape->heads, shape->kv_heads, shape->kv_heads, shape->heads};
    const int all = 2 * (shape->heads + shape->kv_heads);
    kvleaf_status status = make_rows(work, rig, all, 1, &rig->rows);
    for (int i = 0, first = 0; !status && i < TENSORS; first += heads[i++]) {
        rig->beside[i] =
            (kvleaf_tensor){.handle = rig->rows,
                            .offset = (uint64_t)first * (uint64_t)shape->head_dim * kvleaf_dtype_size(dtype),
                            .dtype = dtype,
                            .token_stride = (int64_t)all * shape->head_dim};
        status = make_rows(work, rig, heads[i], (uint32_t)i + 2, &rig->buffers[i]);
        rig->apart[i] = (kvleaf_tensor){.handle = rig->buffers[i], .dtype = dtype};
    }
    return status;
}

static kvleaf_status fill_pool(const host_batch *work, const step_rig *rig, const kvleaf_pool_params *params)
{
    kvleaf_pool_bytes bytes = {.struct_size = sizeof(bytes)};
    kvleaf_status status = kvleaf_pool_size(rig->device, params, &bytes);
    uint64_t size = kvleaf_dtype_size(params->dtype), side = bytes.block_bytes / 2 / size;
    for (int layer = 0; !status && layer < rig->layers; layer++) {
        cl_mem memory;
        status = kvleaf_pool_memory(rig->pool, layer, &memory);
        if (!status &&
            bench_fill_kv(work->rig, memory, params->dtype, bytes.layer_bytes / size, (uint32_t)layer + 5, side))
            status = KVLEAF_DEVICE;
    }
    return status;
}

static kvleaf_status open_cache(const host_batch *work, step_rig *rig)
{
    const bench_config *config = work->config;
    const cli_shape *shape = &config->shape;
    kvleaf_layer *layers = calloc((size_t)rig->layers, sizeof(*layers));
    if (!layers)
        return KVLEAF_NO_MEMORY;
    for (int i = 0; i < rig->layers; i++)
        layers[i] =
            (kvleaf_layer){.num_heads = shape->heads, .num_kv_heads = shape->kv_heads, .head_dim_k = shape->head_dim};
    const kvleaf_pool_params pool = {.struct_size = sizeof(pool),
                                     .num_layers = rig->layers,
                                     .num_blocks = work->num_blocks,
                                     .block_size = shape->block_size,
                                     .num_kv_heads = shape->kv_heads,
                                     .num_heads = shape->heads,
                                     .head_dim_k = shape->head_dim,
                                     .dtype = (kvleaf_dtype)shape->kv_dtype,
                                     .layout = (kvleaf_layout)config->layout};
    kvleaf_status status = kvleaf_pool_create(rig->device, &pool, &rig->pool);
    if (!status)
        status = fill_pool(work, rig, &pool);
    if (!status)
        status = kvleaf_cache_create(
            rig->device,
            kvleaf_cache_params(.layers = layers, .num_layers = rig->layers, .pools = &rig->pool, .num_pools = 1,
                                .q_dtype = (kvleaf_dtype)shape->q_dtype, .out_dtype = (kvleaf_dtype)shape->q_dtype,
                                .max_sequences = config->batch, .free_order = work->order,
                                .free_count = work->num_blocks),
            &rig->cache);
    free(layers);
    if (status)
        return status;
    return kvleaf_plan_create(rig->cache, kvleaf_plan_params(.max_tokens = config->batch * config->context),
                              &rig->plan);
}

static void close_rig(step_rig *rig)
{
    kvleaf_plan_destroy(&rig->plan);
    kvleaf_cache_destroy(&rig->cache);
    kvleaf_pool_destroy(&rig->pool);
    if (rig->rows)
        clReleaseMemObject(rig->rows);
    for (int i = 0; i < TENSORS; i++)
        if (rig->buffers[i])
            clReleaseMemObject(rig->buffers[i]);
    kvleaf_device_destroy(&rig->device);
    free(rig->entries);
}

static kvleaf_status extend(const host_batch *work, const step_rig *rig, int count)
{
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < work->config->batch; i++) {
        const kvleaf_tokens tokens = {.struct_size = sizeof(tokens), .count = count};
        if (count > 1)
            status = kvleaf_seq_create(rig->cache, NULL, &work->seqs[i]);
        if (!status)
            status = kvleaf_seq_extend(rig->cache, work->seqs[i], &tokens, NULL);
        rig->entries[i] = (kvleaf_batch_entry){.seq = work->seqs[i], .num_q = count};
    }
    return status;
}

static kvleaf_status run_layers(const host_batch *work, const step_rig *rig, int way)
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    const kvleaf_tensor *at = way == APART ? rig->apart : rig->beside;
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < rig->layers; i++) {
        if (way != TWO_CALLS) {
            status = kvleaf_append_attend(rig->plan, i, &at[K], &at[V], &at[Q], &at[OUT], NULL, &exec);
            continue;
        }
        status = kvleaf_append(rig->plan, i, &at[K], &at[V], &exec);
        if (!status)
            status = kvleaf_attend(rig->plan, i, &at[Q], &at[OUT], NULL, &exec);
    }
    return status;
}

/* A step of `count` tokens a sequence; `way` < 0: without its launches, as for the prompts. */
static kvleaf_status run_step(const host_batch *work, const step_rig *rig, int count, int way, step_times *times)
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = work->rig->queue};
    kvleaf_status status = extend(work, rig, count);
    double start = bench_seconds();
    if (!status)
        status = kvleaf_plan_build(rig->plan, rig->cache, rig->entries, work->config->batch, &exec);
    double planned = bench_seconds();
    clFinish(work->rig->queue);
    if (status)
        return status;
    if (way >= 0) {
        int64_t before = launches;
        double driver = enqueue_seconds;
        double begun = bench_seconds();
        status = run_layers(work, rig, way);
        double enqueued = bench_seconds();
        if (clFinish(work->rig->queue) != CL_SUCCESS)
            return KVLEAF_DEVICE;
        if (times) {
            host_add_time(&times->plan, planned - start);
            host_add_time(&times->whole[way], (bench_seconds() - begun) / rig->layers);
            if (timing)
                host_add_time(&times->enqueue[way], (enqueue_seconds - driver) / rig->layers);
            else
                host_add_time(&times->host[way], (enqueued - begun) / rig->layers);
            times->launches[way] = (double)(launches - before) / rig->layers;
        }
    }
    return status ? status : kvleaf_plan_commit(rig->plan, NULL);
}

static kvleaf_status time_steps(const host_batch *work, step_times *times)
{
    step_rig rig = {.entries = calloc((size_t)work->config->batch, sizeof(*rig.entries)),
                    .layers = work->config->layers ? work->config->layers
                              : work->rig->gpu     ? 8
                                                   : 2};
    kvleaf_status status = rig.entries ? open_device(work, &rig) : KVLEAF_NO_MEMORY;
    if (!status)
        status = open_rows(work, &rig);
    if (!status)
        status = open_cache(work, &rig);
    if (!status)
        status = run_step(work, &rig, work->config->context, -1, NULL);
    for (int run = -HOST_WARM_RUNS; !status && (run < work->runs || run < HOST_LEAST_STEPS); run++) {
        timing = (run + HOST_WARM_RUNS) / WAYS % 2;
        status = run_step(work, &rig, 1, (run + HOST_WARM_RUNS) % WAYS, run < 0 ? NULL : times);
    }
    if (!status)
        snprintf(times->variant, sizeof(times->variant), "%s", kvleaf_plan_variant(rig.plan, "decode"));
    close_rig(&rig);
    return status;
}

static int measure_step(const host_batch *work)
{
    static step_times times;
    if (time_steps(work, &times))
        return cli_fail(work->rig->program, "the step");
    double one = host_median(&times.whole[ONE_CALL]) * 1e6, one_host = host_median(&times.host[ONE_CALL]) * 1e6;
    const host_figure figures[] = {
        {"two_calls_us", host_median(&times.whole[TWO_CALLS]) * 1e6},
        {"one_call_us", one},
        {"two_calls_launches", times.launches[TWO_CALLS]},
        {"one_call_launches", times.launches[ONE_CALL]},
        {"two_calls_host_us", host_median(&times.host[TWO_CALLS]) * 1e6},
        {"one_call_host_us", one_host},
        {"host_us_a_launch", one_host / times.launches[ONE_CALL]},
        {"enqueue_us_a_launch", host_median(&times.enqueue[ONE_CALL]) * 1e6 / times.launches[ONE_CALL]},
        {"apart_host_us_a_launch", host_median(&times.host[APART]) * 1e6 / times.launches[APART]},
        {"apart_enqueue_us_a_launch", host_median(&times.enqueue[APART]) * 1e6 / times.launches[APART]},
        {"plan_us", host_median(&times.plan) * 1e6}};
    host_print(work, "step", work->rig->caps.device_name, times.variant, &times.whole[ONE_CALL], figures,
               sizeof(figures) / sizeof(figures[0]));
    return CLI_OK;
}

int bench_step_run(const bench_rig *rig, const bench_config *config)
{
    return host_run(rig, config, rig->gpu ? 64 : 16, rig->gpu ? 4096 : 512, measure_step);
}
