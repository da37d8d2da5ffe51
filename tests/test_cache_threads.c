/* SPDX-License-Identifier: Apache-2.0 */
/* Managers in threads of their own never meet, and caches on one device object, each in its own thread, compute what
 * they compute alone, bit for bit. Under ThreadSanitizer this also finds what they share without a lock. */
#define _POSIX_C_SOURCE 200809L
#include "blocks_driver.h"
#include "support.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <kvleaf/cache.h>

enum {
    THREADS = 4,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 16,
    BLOCK_SIZE = 4,
    BLOCKS = 64,
    SEQS = 3,
    STEPS = 6,
    ROWS = 16
};
enum { Q_ROW = HEADS * HEAD_DIM, KV_ROW = KV_HEADS * HEAD_DIM };

static void *run_manager(void *argument)
{
    driver_tally *tally = argument;
    const driver_params params = {.block_size = 4, .num_groups = 2};
    driver *d = driver_create(&params, (uint64_t)tally->operations + 1, NULL, 0);
    tally->operations = 0;
    for (int32_t i = 0; i < 1000; i++)
        driver_operate(d);
    driver_destroy(d, tally);
    return NULL;
}

static void test_managers_in_threads(void **state)
{
    pthread_t threads[THREADS];
    driver_tally tallies[THREADS] = {{.operations = 0}};
    (void)state;
    for (int i = 0; i < THREADS; i++) {
        tallies[i].operations = i; /* the seed */
        assert_int_equal(pthread_create(&threads[i], NULL, run_manager, &tallies[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        assert_true(tallies[i].operations > 900);
}

/* A cache of its own on a device that others use too, and what its steps put out. */
typedef struct worker {
    kvleaf_device *device;
    pthread_barrier_t *start; /* NULL: alone */
    cl_command_queue queue;
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    cl_mem q, k, v, out;
    kvleaf_seq seqs[SEQS];
    int failures;
    float outputs[STEPS][ROWS][Q_ROW];
} worker;

static kvleaf_status open_worker(worker *w)
{
    const kvleaf_layer layers[] = {{.num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_dim_k = HEAD_DIM}};
    kvleaf_status status = kvleaf_device_queue_create(w->device, &w->queue);
    if (!status)
        status = kvleaf_pool_create(w->device,
                                    kvleaf_pool_params(.num_blocks = BLOCKS, .block_size = BLOCK_SIZE,
                                                       .num_kv_heads = KV_HEADS, .head_dim_k = HEAD_DIM,
                                                       .dtype = KVLEAF_F32),
                                    &w->pool);
    if (!status)
        status = kvleaf_cache_create(w->device,
                                     kvleaf_cache_params(.layers = layers, .num_layers = 1, .pools = &w->pool,
                                                         .num_pools = 1, .q_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32,
                                                         .max_sequences = SEQS, .swap_blocks = BLOCKS),
                                     &w->cache);
    if (!status)
        status = kvleaf_plan_create(w->cache, kvleaf_plan_params(.max_tokens = ROWS, .steps_in_flight = 2), &w->plan);
    cl_context context = kvleaf_device_context(w->device);
    w->q = clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof w->outputs[0], NULL, NULL);
    w->out = clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof w->outputs[0], NULL, NULL);
    w->k = clCreateBuffer(context, CL_MEM_READ_WRITE, ROWS * KV_ROW * sizeof(float), NULL, NULL);
    w->v = clCreateBuffer(context, CL_MEM_READ_WRITE, ROWS * KV_ROW * sizeof(float), NULL, NULL);
    return status || !w->q || !w->out || !w->k || !w->v ? KVLEAF_NO_MEMORY : KVLEAF_OK;
}

static void close_worker(worker *w)
{
    const cl_mem buffers[] = {w->q, w->k, w->v, w->out};
    for (int i = 0; i < SEQS; i++)
        if (w->seqs[i] && kvleaf_seq_destroy(w->cache, &w->seqs[i]))
            w->failures++;
    kvleaf_plan_destroy(&w->plan);
    kvleaf_cache_destroy(&w->cache);
    kvleaf_pool_destroy(&w->pool);
    for (int i = 0; i < 4; i++)
        if (buffers[i])
            clReleaseMemObject(buffers[i]);
    if (w->queue)
        clReleaseCommandQueue(w->queue);
}

/* The same numbers for all workers. */
static void load(const worker *w, cl_mem buffer, int32_t step, int32_t what, int32_t width)
{
    float rows[ROWS * Q_ROW];
    support_rng rng = {(uint64_t)(step * 3 + what)};
    for (int32_t i = 0; i < ROWS * width; i++)
        rows[i] = support_float(&rng);
    clEnqueueWriteBuffer(w->queue, buffer, CL_TRUE, 0, (size_t)(ROWS * width) * sizeof *rows, rows, 0, NULL, NULL);
}

/* Prompts in the first step, one token each in the others. The last sequence is a fork of the first, the second one has
 * been to host memory and back. */
static kvleaf_status make_batch(worker *w, int32_t step, kvleaf_batch_entry *batch)
{
    static const int32_t prompts[SEQS] = {6, 9, 1};
    int32_t ids[ROWS];
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; i < ROWS; i++)
        ids[i] = 7 * i + step;
    for (int32_t i = 0; !status && i < SEQS; i++) {
        kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = step ? 1 : prompts[i]};
        if (step == 1 && i == SEQS - 1) {
            status = kvleaf_seq_destroy(w->cache, &w->seqs[i]);
            if (!status)
                status = kvleaf_seq_fork(w->cache, w->seqs[0], 5, &w->seqs[i]);
        }
        const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = w->queue};
        if (!status && step == 3 && i == 1)
            status = kvleaf_seq_swap_out(w->cache, w->seqs[i], &exec);
        if (!status && step == 3 && i == 1)
            status = kvleaf_seq_swap_in(w->cache, w->seqs[i], &exec);
        ids[0] = 100 + i; /* no prompt is found in another */
        if (!status)
            status = kvleaf_seq_extend(w->cache, w->seqs[i], &tokens, NULL);
        batch[i] = (kvleaf_batch_entry){.seq = w->seqs[i], .num_q = (int32_t)tokens.count};
    }
    return status;
}

static kvleaf_status run_step(worker *w, int32_t step)
{
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = w->queue};
    const kvleaf_tensor q = {.handle = w->q, .dtype = KVLEAF_F32}, k = {.handle = w->k, .dtype = KVLEAF_F32},
                        v = {.handle = w->v, .dtype = KVLEAF_F32}, out = {.handle = w->out, .dtype = KVLEAF_F32};
    kvleaf_batch_entry batch[SEQS];
    load(w, w->q, step, 0, Q_ROW);
    load(w, w->k, step, 1, KV_ROW);
    load(w, w->v, step, 2, KV_ROW);
    kvleaf_status status = make_batch(w, step, batch);
    if (!status)
        status = kvleaf_plan_build(w->plan, w->cache, batch, SEQS, &exec);
    if (!status)
        status = kvleaf_append(w->plan, 0, &k, &v, &exec);
    if (!status)
        status = kvleaf_attend(w->plan, 0, &q, &out, NULL, &exec);
    if (!status)
        status = kvleaf_plan_commit(w->plan, NULL);
    size_t rows = step ? SEQS : ROWS;
    if (clEnqueueReadBuffer(w->queue, w->out, CL_TRUE, 0, rows * Q_ROW * sizeof(float), w->outputs[step], 0, NULL,
                            NULL))
        return KVLEAF_DEVICE;
    return status;
}

static void *run_worker(void *argument)
{
    worker *w = argument;
    if (w->start)
        pthread_barrier_wait(w->start);
    kvleaf_status status = open_worker(w);
    for (int32_t i = 0; !status && i < SEQS; i++)
        status = kvleaf_seq_create(w->cache, NULL, &w->seqs[i]);
    for (int32_t step = 0; !status && step < STEPS; step++)
        status = run_step(w, step);
    w->failures += status != KVLEAF_OK;
    close_worker(w);
    return NULL;
}

static void test_caches_in_threads(void **state)
{
    kvleaf_device *device = support_device();
    pthread_barrier_t start;
    pthread_t threads[THREADS];
    worker *workers = calloc(THREADS + 1, sizeof *workers);
    (void)state;
    assert_non_null(workers);
    assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.device = device, .start = &start};
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    worker *alone = &workers[THREADS];
    alone->device = device;
    run_worker(alone);
    for (int i = 0; i <= THREADS; i++) {
        assert_int_equal(workers[i].failures, 0);
        assert_memory_equal(workers[i].outputs, alone->outputs, sizeof alone->outputs);
    }
    for (int32_t i = 0; i < SEQS * Q_ROW; i++)
        assert_true(alone->outputs[STEPS - 1][i / Q_ROW][i % Q_ROW] != 0);
    free(workers);
    kvleaf_device_destroy(&device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_managers_in_threads),
        cmocka_unit_test(test_caches_in_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
