/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory and a small managed cache: what the figures stand on. */
#include "tour.h"

#include <stdio.h>
#include <stdlib.h>

void tour_must(tour *t, kvleaf_status status, const char *what)
{
    if (status != KVLEAF_OK)
        exit(cli_fail(t->program, what));
}

static void must_opencl(tour *t, cl_int error, const char *what)
{
    if (error != CL_SUCCESS) {
        fprintf(stderr, "%s: %s failed: OpenCL error %d\n", t->program->name, what, error);
        exit(CLI_FAILED);
    }
}

cl_mem tour_upload(tour *t, const void *data, size_t bytes)
{
    cl_int error;
    cl_mem memory = clCreateBuffer(kvleaf_device_context(t->device), CL_MEM_READ_WRITE, bytes, NULL, &error);

    must_opencl(t, error, "clCreateBuffer");
    must_opencl(t, clEnqueueWriteBuffer(t->queue, memory, CL_TRUE, 0, bytes, data, 0, NULL, NULL),
                "clEnqueueWriteBuffer");
    return memory;
}

void tour_download(tour *t, cl_mem memory, void *data, size_t bytes)
{
    must_opencl(t, clEnqueueReadBuffer(t->queue, memory, CL_TRUE, 0, bytes, data, 0, NULL, NULL),
                "clEnqueueReadBuffer");
}

kvleaf_tensor tour_floats_tensor(cl_mem memory)
{
    return (kvleaf_tensor){.handle = memory, .dtype = KVLEAF_F32};
}

void small_open(tour *t, small *s, int32_t num_blocks, int32_t block_size, const int32_t *free_order,
                int32_t free_count)
{
    kvleaf_layer layer = {.num_heads = s->heads, .num_kv_heads = s->heads, .head_dim_k = s->dim};

    MUST(kvleaf_pool_create(t->device,
                            kvleaf_pool_params(.num_blocks = num_blocks, .block_size = block_size,
                                               .num_kv_heads = s->heads, .head_dim_k = s->dim, .dtype = KVLEAF_F32),
                            &s->pool));
    MUST(kvleaf_cache_create(t->device,
                             kvleaf_cache_params(.layers = &layer, .num_layers = 1, .pools = &s->pool, .num_pools = 1,
                                                 .q_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32,
                                                 .free_order = free_order, .free_count = free_count),
                             &s->cache));
    MUST(kvleaf_plan_create(s->cache, kvleaf_plan_params(.max_tokens = 256), &s->plan));
}

void small_close(small *s)
{
    kvleaf_plan_destroy(&s->plan);
    kvleaf_cache_destroy(&s->cache);
    kvleaf_pool_destroy(&s->pool);
}

int32_t small_extend(tour *t, small *s, kvleaf_seq seq, const int32_t *ids, int32_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    int64_t cached = 0;

    MUST(kvleaf_seq_extend(s->cache, seq, &tokens, &cached));
    return (int32_t)cached;
}

void small_compute(tour *t, small *s, kvleaf_seq seq, int32_t count, const float *q, const float *k, const float *v,
                   float *out, float *k_back, float *v_back)
{
    size_t token = (size_t)s->heads * (size_t)s->dim * sizeof *q, bytes = (size_t)count * token, all;
    kvleaf_seq_info info = {.struct_size = sizeof info};
    kvleaf_batch_entry entry = {.seq = seq, .num_q = count};
    kvleaf_exec exec = {.struct_size = sizeof exec, .queue = t->queue};
    cl_mem q_mem = tour_upload(t, q, bytes), k_mem = tour_upload(t, k, bytes), v_mem = tour_upload(t, v, bytes);
    cl_mem out_mem = tour_upload(t, q, bytes);
    kvleaf_tensor q_in = tour_floats_tensor(q_mem), k_in = tour_floats_tensor(k_mem), v_in = tour_floats_tensor(v_mem);
    kvleaf_tensor result = tour_floats_tensor(out_mem);

    MUST(kvleaf_plan_build(s->plan, s->cache, &entry, 1, &exec));
    MUST(kvleaf_append(s->plan, 0, &k_in, &v_in, &exec));
    MUST(kvleaf_attend(s->plan, 0, &q_in, &result, NULL, &exec));
    MUST(kvleaf_seq_query(s->cache, seq, &info));
    all = (size_t)info.extended * token;
    if (k_back && v_back) {
        cl_mem k_all = NULL, v_all = NULL;
        cl_int error;

        k_all = clCreateBuffer(kvleaf_device_context(t->device), CL_MEM_READ_WRITE, all, NULL, &error);
        must_opencl(t, error, "clCreateBuffer");
        v_all = clCreateBuffer(kvleaf_device_context(t->device), CL_MEM_READ_WRITE, all, NULL, &error);
        must_opencl(t, error, "clCreateBuffer");
        kvleaf_tensor k_out = tour_floats_tensor(k_all), v_out = tour_floats_tensor(v_all);
        MUST(kvleaf_gather(s->plan, 0, &k_out, &v_out, &exec));
        tour_download(t, k_all, k_back, all);
        tour_download(t, v_all, v_back, all);
        clReleaseMemObject(k_all);
        clReleaseMemObject(v_all);
    }
    MUST(kvleaf_plan_commit(s->plan, NULL));
    tour_download(t, out_mem, out, bytes);
    clReleaseMemObject(q_mem);
    clReleaseMemObject(k_mem);
    clReleaseMemObject(v_mem);
    clReleaseMemObject(out_mem);
}

void small_step(tour *t, small *s, kvleaf_seq seq, int32_t count, const float *q, const float *k, const float *v,
                float *out, float *k_back, float *v_back)
{
    small_extend(t, s, seq, NULL, count);
    small_compute(t, s, seq, count, q, k, v, out, k_back, v_back);
}

int32_t small_table(tour *t, const small *s, kvleaf_seq seq, const char *name, int32_t *table)
{
    int32_t count = 0;

    MUST(kvleaf_seq_table(s->cache, seq, 0, table, 16, &count));
    tour_ints(t, name, table, count);
    return count;
}
