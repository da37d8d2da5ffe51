/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of whole blocks: every variant, all layers, nothing else changed; order by events; bad ids and handles. */
#include "moves.h"
#include "shim.h"

enum { LAYERS = 3, BLOCKS = 23 };

typedef struct copy_case {
    const char *variant; /* forced */
    kvleaf_dtype dtype;
    kvleaf_layout layout;
    int32_t block_size, num_kv_heads, head_dim;
} copy_case;

static const copy_case cases[] = {
    {"copy.portable_4", KVLEAF_F16, KVLEAF_LAYOUT_ROWS, 3, 1, 5}, /* 60 bytes a block */
    {"copy.portable_4", KVLEAF_F16, KVLEAF_LAYOUT_ROWS, 1, 1, 1}, /* 4 */
    {"copy.portable_4", KVLEAF_BF16, KVLEAF_LAYOUT_ROWS, 4, 3, 17},
    {"copy.portable_4", KVLEAF_F32, KVLEAF_LAYOUT_ROWS, 1, 1, 1},
    {"copy.portable_16", KVLEAF_F16, KVLEAF_LAYOUT_DIM8, 16, 2, 128},
    {"copy.portable_16", KVLEAF_F32, KVLEAF_LAYOUT_ROWS, 256, 1, 20},
    {"copy.portable_16", KVLEAF_F16, KVLEAF_LAYOUT_ROWS, 4, 1, 6}, /* 96: no 64 */
    {"copy.cpu", KVLEAF_F16, KVLEAF_LAYOUT_CPU16, 16, 2, 128},
    {"copy.cpu", KVLEAF_F32, KVLEAF_LAYOUT_CPU16, 256, 8, 64},
};

typedef struct filled_pool {
    kvleaf_device *owner;
    cl_command_queue commands;
    kvleaf_pool *pool;
    size_t layer_bytes, block_bytes;
    unsigned char *bytes[LAYERS]; /* what each buffer must hold */
} filled_pool;

static cl_mem pool_buffer(const filled_pool *p, int layer)
{
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_memory(p->pool, layer, &memory));
    return memory;
}

static void fill_pool(filled_pool *p, kvleaf_device *owner, const copy_case *c)
{
    p->owner = owner;
    p->commands = support_queue(owner);
    const kvleaf_pool_params *params =
        kvleaf_pool_params(.num_layers = LAYERS, .num_blocks = BLOCKS, .block_size = c->block_size,
                           .num_kv_heads = c->num_kv_heads, .head_dim_k = c->head_dim, .dtype = c->dtype,
                           .layout = c->layout);
    kvleaf_pool_bytes bytes = {.struct_size = sizeof bytes};
    ASSERT_OK(kvleaf_pool_size(owner, params, &bytes));
    ASSERT_OK(kvleaf_pool_create(owner, params, &p->pool));
    p->layer_bytes = bytes.layer_bytes;
    p->block_bytes = bytes.block_bytes;
    for (int i = 0; i < LAYERS; i++) {
        p->bytes[i] = random_bytes(p->layer_bytes);
        assert_int_equal(clEnqueueWriteBuffer(p->commands, pool_buffer(p, i), CL_TRUE, 0, p->layer_bytes, p->bytes[i],
                                              0, NULL, NULL),
                         CL_SUCCESS);
    }
}

/* Every byte of every layer. */
static void check_pool(const filled_pool *p)
{
    for (int i = 0; i < LAYERS; i++) {
        uint8_t *now = support_read(p->commands, pool_buffer(p, i), p->layer_bytes);
        for (size_t at = 0; at < p->layer_bytes; at++)
            if (now[at] != p->bytes[i][at])
                fail_msg("layer %d: byte %zu (block %zu) is %02x, expected %02x", i, at, at / p->block_bytes, now[at],
                         p->bytes[i][at]);
        free(now);
    }
}

static void empty_pool(filled_pool *p)
{
    kvleaf_pool_destroy(&p->pool);
    clReleaseCommandQueue(p->commands);
    for (int i = 0; i < LAYERS; i++)
        free(p->bytes[i]);
}

static void expect_copies(filled_pool *p, const int32_t *src, const int32_t *dst, int32_t count)
{
    for (int i = 0; i < LAYERS; i++)
        for (int32_t c = 0; c < count; c++)
            memcpy(p->bytes[i] + (size_t)dst[c] * p->block_bytes, p->bytes[i] + (size_t)src[c] * p->block_bytes,
                   p->block_bytes);
}

static kvleaf_exec exec_on(cl_command_queue commands)
{
    return (kvleaf_exec){.struct_size = sizeof(kvleaf_exec), .queue = commands};
}

/* Sources (some of them more than once) from one half of a random order of the blocks, destinations from the other. */
static int32_t random_pairs(int32_t *src, int32_t *dst)
{
    int32_t order[BLOCKS], count = 1 + random_below(BLOCKS / 2);
    for (int32_t i = 0; i < BLOCKS; i++) {
        int32_t j = random_below(i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int32_t i = 0; i < count; i++) {
        src[i] = order[random_below(BLOCKS / 2)];
        dst[i] = order[BLOCKS / 2 + i];
    }
    return count;
}

static void test_every_variant(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(cases); i++) {
        support_lines lines = {.count = 0};
        kvleaf_device_params params = support_params();
        params.variants = cases[i].variant;
        params.log = support_log;
        params.log_user = &lines;
        params.log_level = KVLEAF_LOG_INFO;
        kvleaf_device *forced;
        ASSERT_OK(support_create(&params, &forced));
        filled_pool p;
        fill_pool(&p, forced, &cases[i]);
        bool cpu_only = strcmp(cases[i].variant, "copy.cpu") == 0 && !(forced->caps.type & CL_DEVICE_TYPE_CPU);
        if (!cpu_only && !strstr(lines.text, cases[i].variant))
            fail_msg("%s was not taken: %s", cases[i].variant, lines.text);
        kvleaf_exec exec = exec_on(p.commands);
        for (int round = 0; round < 5; round++) {
            int32_t src[BLOCKS], dst[BLOCKS], count = random_pairs(src, dst);
            ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, src, dst, count, &exec));
            expect_copies(&p, src, dst, count);
            check_pool(&p);
        }
        empty_pool(&p);
        kvleaf_device_destroy(&forced);
    }
}

/* The best variant of each geometry: no case is left to one that would tear it. */
static void test_best_variant(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(cases); i++) {
        filled_pool p;
        fill_pool(&p, device, &cases[i]);
        kvleaf_exec exec = exec_on(p.commands);
        int32_t src[BLOCKS], dst[BLOCKS], count = random_pairs(src, dst);
        ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, src, dst, count, &exec));
        expect_copies(&p, src, dst, count);
        check_pool(&p);
        empty_pool(&p);
    }
}

static cl_command_queue out_of_order_queue(void)
{
    cl_int error;
    cl_command_queue commands =
        device->cl->CreateCommandQueue(device->context, device->id, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &error);
    if (error == CL_INVALID_QUEUE_PROPERTIES)
        skip();
    assert_int_equal(error, CL_SUCCESS);
    return commands;
}

/* The call waits for its list on the device only, reads the host arrays before it returns, and its event stands for all
 * layers, on in-order and out-of-order queues. */
static void test_order(void **state)
{
    (void)state;
    for (int out_of_order = 0; out_of_order < 2; out_of_order++) {
        filled_pool p;
        fill_pool(&p, device, &cases[4]);
        cl_command_queue commands = out_of_order ? out_of_order_queue() : support_queue(device);
        cl_int error;
        cl_event gate = clCreateUserEvent(device->context, &error), first, second;
        assert_int_equal(error, CL_SUCCESS);
        kvleaf_exec exec = {sizeof exec, commands, 1, &gate, &first};
        int32_t src[2] = {3, 7}, dst[2] = {11, 0};
        ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, src, dst, 2, &exec));
        src[0] = dst[1] = 21; /* too late to matter */
        exec.wait_list = &first;
        exec.event_out = &second;
        const int32_t next_src = 11, next_dst = 5; /* moves on what the first call brought */
        ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, &next_src, &next_dst, 1, &exec));
        check_pool(&p); /* the gate is closed: nothing has moved */
        assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
        assert_int_equal(clWaitForEvents(1, &second), CL_SUCCESS);
        expect_copies(&p, (const int32_t[]){3, 7}, (const int32_t[]){11, 0}, 2);
        expect_copies(&p, &next_src, &next_dst, 1);
        check_pool(&p);
        clReleaseEvent(gate);
        clReleaseEvent(first);
        clReleaseEvent(second);
        clReleaseCommandQueue(commands);
        empty_pool(&p);
    }
}

/* No pairs: no work, but the event comes, after the wait list. */
static void test_nothing_to_copy(void **state)
{
    (void)state;
    filled_pool p;
    fill_pool(&p, device, &cases[0]);
    cl_event event = NULL;
    kvleaf_exec exec = exec_on(p.commands);
    ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, NULL, NULL, 0, &exec));
    exec.event_out = &event;
    ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, NULL, NULL, 0, &exec));
    assert_non_null(event);
    assert_int_equal(clWaitForEvents(1, &event), CL_SUCCESS);
    clReleaseEvent(event);
    check_pool(&p);
    empty_pool(&p);
}

static void run_copier(const filled_pool *p, kvl_pool_copier *copier, const kvl_pool_copies *copies)
{
    kvl_chain chain;
    cl_event event;
    ASSERT_OK(kvl_chain_begin(&chain, p->owner, &(kvleaf_exec){.queue = p->commands, .event_out = &event}));
    ASSERT_OK(kvl_chain_end(&chain, kvl_pool_copier_chain(copier, copies, &chain)));
    assert_int_equal(clWaitForEvents(1, &event), CL_SUCCESS);
    clReleaseEvent(event);
}

/* A step's copier: pairs on the device, found behind other data. */
static void test_copier(void **state)
{
    (void)state;
    filled_pool p;
    fill_pool(&p, device, &cases[7]);
    kvl_pool_copier *copier;
    ASSERT_OK(kvl_pool_copier_create(p.pool, &copier));
    const int32_t meta[] = {-1, -1, -1, 4, 9, 22, 1, -1};
    cl_mem pairs = make_buffer(sizeof meta, meta);
    run_copier(&p, copier, &(kvl_pool_copies){pairs, 3, 2});
    clReleaseMemObject(pairs);
    expect_copies(&p, (const int32_t[]){4, 22}, (const int32_t[]){9, 1}, 2);
    check_pool(&p);
    kvl_pool_copier_destroy(&copier);
    assert_null(copier);
    kvl_pool_copier_destroy(&copier);
    empty_pool(&p);
}

static void run_host_copies(const filled_pool *p, kvl_host_pool *host, const kvleaf_swap_copy *copies, int32_t count,
                            bool out)
{
    kvl_chain chain;
    cl_event event;
    ASSERT_OK(kvl_chain_begin(&chain, p->owner, &(kvleaf_exec){.queue = p->commands, .event_out = &event}));
    ASSERT_OK(kvl_chain_end(&chain, kvl_host_pool_copy(host, p->pool, 1, copies, count, out, &chain)));
    assert_int_equal(clWaitForEvents(1, &event), CL_SUCCESS);
    clReleaseEvent(event);
}

/* Blocks of one group go to host memory and come back to other places, alone and in runs; what is not named, and what
 * is of another group, stays. */
static void test_host_pool(void **state)
{
    (void)state;
    enum { HOST_BLOCKS = 5 };
    for (int i = 0; i < COUNT(cases); i++) {
        filled_pool p;
        fill_pool(&p, device, &cases[i]);
        kvl_host_pool *host;
        ASSERT_OK(kvl_host_pool_create(p.pool, HOST_BLOCKS, &host));
        const kvleaf_swap_copy out[] = {{1, 3, 0}, {1, 4, 1}, {0, 5, 2}, {1, 5, 2}, {1, 22, 4}};
        const kvleaf_swap_copy back[] = {{0, 1, 0}, {1, 9, 4}, {1, 14, 1}, {1, 15, 2}, {1, 7, 0}};
        run_host_copies(&p, host, out, 5, true);
        check_pool(&p);
        run_host_copies(&p, host, (const kvleaf_swap_copy[]){{1, 5, 2}, {1, 4, 1}, {1, 3, 0}}, 3, true);
        run_host_copies(&p, host, back, 5, false);
        expect_copies(&p, (const int32_t[]){22, 4, 5, 3}, (const int32_t[]){9, 14, 15, 7}, 4);
        check_pool(&p);
        kvl_host_pool_destroy(&host);
        assert_null(host);
        kvl_host_pool_destroy(&host);
        empty_pool(&p);
    }
}

/* Whatever fails on the way, destroying it finds no copy in flight that it does not wait for. */
static void test_host_pool_faults(void **state)
{
    (void)state;
    kvleaf_device_params params = support_params();
    params.opencl = shim_table();
    for (int out = 0; out < 2; out++) {
        shim_reset();
        kvleaf_device *fresh;
        ASSERT_OK(support_create(&params, &fresh));
        filled_pool p;
        fill_pool(&p, fresh, &cases[4]);
        const kvleaf_swap_copy copies[] = {{0, 9, 4}, {0, 8, 3}, {0, 3, 0}, {0, 4, 1}, {0, 7, 2}}; /* three runs */
        int64_t balance = shim_balance(), at = 0;
        kvleaf_status status;
        do {
            kvl_host_pool *host;
            ASSERT_OK(kvl_host_pool_create(p.pool, 5, &host));
            kvl_chain chain;
            ASSERT_OK(kvl_chain_begin(&chain, fresh, &(kvleaf_exec){.queue = p.commands}));
            int64_t finished = shim.calls_of[SHIM_Finish];
            shim.fail_at = shim.calls + ++at;
            status = kvl_chain_end(&chain, kvl_host_pool_copy(host, p.pool, 0, copies, 5, out, &chain));
            bool marker = shim.failed_entry == SHIM_EnqueueMarkerWithWaitList;
            shim.fail_at = 0;
            shim.failed_entry = -1;
            assert_int_equal(shim.calls_of[SHIM_Finish] - finished, marker);
            int64_t waited = shim.calls_of[SHIM_WaitForEvents];
            kvl_host_pool_destroy(&host);
            assert_int_equal(shim.calls_of[SHIM_WaitForEvents] - waited, !marker);
            assert_int_equal(shim_balance(), balance);
        } while (status);
        assert_int_equal(at, LAYERS * 3 + 1 + 1);
        assert_int_equal(clFinish(p.commands), CL_SUCCESS);
        if (out)
            check_pool(&p);
        empty_pool(&p);
        kvleaf_device_destroy(&fresh);
    }
}

static void test_host_pool_refused(void **state)
{
    (void)state;
    kvleaf_device_params params = support_params();
    params.max_alloc_bytes = 1 << 20;
    params.opencl = shim_table();
    shim_reset();
    kvleaf_device *small;
    ASSERT_OK(support_create(&params, &small));
    filled_pool p;
    fill_pool(&p, small, &cases[4]);
    kvl_host_pool *host = NULL;
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "swap_blocks", kvl_host_pool_create(p.pool, (1 << 20) / 16384 + 1, &host));
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "swap_blocks", kvl_host_pool_create(p.pool, INT32_MAX, &host));
    int64_t balance = shim_balance(), at = 0;
    kvleaf_status status;
    do {
        shim.fail_at = shim.calls + ++at;
        status = kvl_host_pool_create(p.pool, 2, &host);
        shim.fail_at = 0;
        if (status)
            assert_int_equal(shim_balance(), balance);
    } while (status);
    assert_int_equal(at, LAYERS + 1);
    kvl_host_pool_destroy(&host);
    assert_int_equal(shim_balance(), balance);
    empty_pool(&p);
    kvleaf_device_destroy(&small);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *field;
        int64_t value;
        int32_t count, src[3], dst[3];
    } bad[] = {
        {"src", -1, 2, {0, -1}, {5, 6}},
        {"src", BLOCKS, 2, {BLOCKS, 0}, {5, 6}},
        {"dst", INT32_MAX, 1, {0}, {INT32_MAX}},
        {"dst", INT32_MIN, 3, {0, 1, 2}, {5, 6, INT32_MIN}},
        {"dst", 4, 1, {4}, {4}},
        {"dst", 2, 3, {0, 1, 2}, {5, 2, 6}},
        {"dst", 7, 3, {0, 1, 2}, {7, 8, 7}},
        {"count", -1, -1, {0}, {1}},
        {"count", BLOCKS + 1, BLOCKS + 1, {0}, {1}},
    };
    filled_pool p;
    fill_pool(&p, device, &cases[2]);
    kvleaf_exec exec = exec_on(p.commands);
    for (int i = 0; i < COUNT(bad); i++) {
        ASSERT_FAILS(KVLEAF_INVALID, bad[i].field,
                     kvleaf_pool_copy_blocks(p.pool, bad[i].src, bad[i].dst, bad[i].count, &exec));
        assert_int_equal(kvleaf_last_error()->value, bad[i].value);
    }
    const int32_t one = 1, two = 2;
    ASSERT_FAILS(KVLEAF_INVALID, "pool", kvleaf_pool_copy_blocks(NULL, &one, &two, 1, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "src", kvleaf_pool_copy_blocks(p.pool, NULL, &two, 1, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "dst", kvleaf_pool_copy_blocks(p.pool, &one, NULL, 1, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvleaf_pool_copy_blocks(p.pool, &one, &two, 1, NULL));
    exec.queue = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "queue", kvleaf_pool_copy_blocks(p.pool, &one, &two, 1, &exec));
    kvleaf_device *other = support_device();
    exec.queue = support_queue(other);
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_pool_copy_blocks(p.pool, &one, &two, 1, &exec));
    clReleaseCommandQueue(exec.queue);
    kvleaf_device_destroy(&other);
    assert_int_equal(clFinish(p.commands), CL_SUCCESS);
    check_pool(&p);
    /* What was refused left no mark: the same blocks copy now. */
    exec = exec_on(p.commands);
    const int32_t src[] = {0, 1, 2}, dst[] = {5, 7, 8};
    ASSERT_OK(kvleaf_pool_copy_blocks(p.pool, src, dst, 3, &exec));
    expect_copies(&p, src, dst, 3);
    check_pool(&p);
    empty_pool(&p);
}

/* Each OpenCL call of a copy fails once: an error, and every event, buffer and kernel is accounted for. */
static void test_each_call_fails(void **state)
{
    (void)state;
    kvleaf_device_params params = support_params();
    params.opencl = shim_table();
    for (int out_of_order = 0; out_of_order < 2; out_of_order++) {
        shim_reset();
        kvleaf_device *fresh;
        ASSERT_OK(support_create(&params, &fresh));
        filled_pool p;
        fill_pool(&p, fresh, &cases[5]);
        cl_int error;
        cl_command_queue commands = shim_table()->CreateCommandQueue(
            fresh->context, fresh->id, out_of_order ? CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE : 0, &error);
        if (out_of_order && error == CL_INVALID_QUEUE_PROPERTIES) { /* the device has none: in-order stands for both */
            commands = shim_table()->CreateCommandQueue(fresh->context, fresh->id, 0, &error);
        }
        assert_int_equal(error, CL_SUCCESS);
        int64_t balance = shim_balance(), at = 0;
        const int32_t src = 3, dst = 8;
        cl_event event = NULL;
        kvleaf_exec exec = {sizeof exec, commands, 0, NULL, &event};
        kvleaf_status status;
        do {
            shim.fail_at = shim.calls + ++at;
            status = kvleaf_pool_copy_blocks(p.pool, &src, &dst, 1, &exec);
            shim.fail_at = 0;
            assert_int_equal(event != NULL, status == KVLEAF_OK);
            assert_int_equal(shim_balance(), balance + (status == KVLEAF_OK));
        } while (status);
        assert_in_range(at, 1 + LAYERS * 5 + 1, 100); /* four arguments and a launch a layer, and a buffer */
        assert_int_equal(clWaitForEvents(1, &event), CL_SUCCESS);
        shim_table()->ReleaseEvent(event);
        assert_int_equal(clFinish(commands), CL_SUCCESS);
        shim_table()->ReleaseCommandQueue(commands);
        expect_copies(&p, &src, &dst, 1);
        check_pool(&p);
        empty_pool(&p);
        kvleaf_device_destroy(&fresh);
    }
}

/* vllm #50427: blocks around byte 2^31 of a layer. The memory is reserved, little of it is touched. */
static void test_far_blocks(void **state)
{
    (void)state;
    enum { FAR_BLOCKS = 32772, BLOCK_BYTES = 2 * 16 * 8 * 128 * 2 };
    kvleaf_pool *pool = NULL;
    kvleaf_status status = kvleaf_pool_create(
        device, kvleaf_pool_params(.num_blocks = FAR_BLOCKS, .block_size = 16, .num_kv_heads = 8, .head_dim_k = 128),
        &pool);
    if (status == KVLEAF_UNSUPPORTED || status == KVLEAF_NO_MEMORY) {
        print_message("%s\n", kvleaf_last_error()->message);
        skip();
    }
    ASSERT_OK(status);
    static const int32_t src[] = {2, 32767, 32768}, dst[] = {32771, 3, 32765}, untouched[] = {0, 1, 32769};
    unsigned char *data = random_bytes(BLOCK_BYTES * 3), *guard = random_bytes(BLOCK_BYTES * 3);
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_memory(pool, 0, &memory));
    for (int i = 0; i < 3; i++) {
        size_t part = (size_t)i * BLOCK_BYTES;
        assert_int_equal(clEnqueueWriteBuffer(queue, memory, CL_TRUE, (size_t)src[i] * BLOCK_BYTES, BLOCK_BYTES,
                                              data + part, 0, NULL, NULL),
                         CL_SUCCESS);
        assert_int_equal(clEnqueueWriteBuffer(queue, memory, CL_TRUE, (size_t)untouched[i] * BLOCK_BYTES, BLOCK_BYTES,
                                              guard + part, 0, NULL, NULL),
                         CL_SUCCESS);
    }
    kvleaf_exec exec = exec_on(queue);
    ASSERT_OK(kvleaf_pool_copy_blocks(pool, src, dst, 3, &exec));
    unsigned char *now = allocate(BLOCK_BYTES);
    for (int i = 0; i < 6; i++) {
        const int32_t *ids = i / 3 ? untouched : dst;
        assert_int_equal(clEnqueueReadBuffer(queue, memory, CL_TRUE, (size_t)ids[i % 3] * BLOCK_BYTES, BLOCK_BYTES, now,
                                             0, NULL, NULL),
                         CL_SUCCESS);
        assert_memory_equal(now, (i / 3 ? guard : data) + (size_t)(i % 3) * BLOCK_BYTES, BLOCK_BYTES);
    }
    free(now);
    free(data);
    free(guard);
    kvleaf_pool_destroy(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_variant),
        cmocka_unit_test(test_best_variant),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_nothing_to_copy),
        cmocka_unit_test(test_copier),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_host_pool),
        cmocka_unit_test(test_host_pool_faults),
        cmocka_unit_test(test_host_pool_refused),
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_far_blocks),
    };
    return cmocka_run_group_tests_name("block copies", tests, open_device, close_device);
}
