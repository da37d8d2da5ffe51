/* SPDX-License-Identifier: Apache-2.0 */
/* A pool's size, its creation with own and with supplied memory, and every way in which that is refused or fails. */
#include <kvleaf/attention.h>

#include "moves.h"
#include "shim.h"

#define BYTES_INIT                                                                                                     \
    {                                                                                                                  \
        .struct_size = sizeof(kvleaf_pool_bytes)                                                                       \
    }

static kvleaf_pool_params small_params(void)
{
    return *kvleaf_pool_params(.num_layers = 3, .num_blocks = 5, .block_size = 4, .num_kv_heads = 2, .head_dim_k = 20,
                               .dtype = KVLEAF_F16, .layout = KVLEAF_LAYOUT_ROWS);
}

/* Seed document 002: a sequence of a 13-billion-parameter LLaMA takes up to 1.7 GB. */
static void test_seed_size_of_a_sequence(void **state)
{
    (void)state;
    kvleaf_pool_bytes bytes = BYTES_INIT;
    const kvleaf_pool_params *llama = kvleaf_pool_params(.num_layers = 40, .num_blocks = 2048 / 16, .block_size = 16,
                                                         .num_kv_heads = 40, .head_dim_k = 128, .dtype = KVLEAF_F16);
    const kvleaf_device *devices[] = {NULL, device};
    for (int i = 0; i < COUNT(devices); i++) {
        ASSERT_OK(kvleaf_pool_size(devices[i], llama, &bytes));
        assert_int_equal(bytes.total_bytes, 1677721600);
        assert_int_equal(bytes.layer_bytes, 1677721600 / 40);
        assert_int_equal(bytes.token_bytes, 1677721600 / 2048);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        kvleaf_layout layout;
        kvleaf_dtype dtype;
        int32_t block_size, head_dim;
        uint64_t tile_bytes;
    } cases[] = {
        {KVLEAF_LAYOUT_ROWS, KVLEAF_F32, 4, 1, 16},
        {KVLEAF_LAYOUT_ROWS, KVLEAF_BF16, 256, 256, 131072},
        {KVLEAF_LAYOUT_CPU16, KVLEAF_F32, 16, 1, 16 * 16 * 4},
        {KVLEAF_LAYOUT_CPU16, KVLEAF_F16, 32, 72, 32 * 80 * 2},
        {KVLEAF_LAYOUT_DIM8, KVLEAF_F16, 8, 20, 8 * 24 * 2},
        {KVLEAF_LAYOUT_SWIZZLE8, KVLEAF_F16, 8, 20, 8 * 64 * 2},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        kvleaf_pool_bytes bytes = BYTES_INIT;
        const kvleaf_pool_params *params =
            kvleaf_pool_params(.num_layers = 2, .num_blocks = 7, .block_size = cases[i].block_size, .num_kv_heads = 3,
                               .head_dim_k = cases[i].head_dim, .dtype = cases[i].dtype, .layout = cases[i].layout);
        ASSERT_OK(kvleaf_pool_size(NULL, params, &bytes));
        assert_int_equal(bytes.block_bytes, cases[i].tile_bytes * 3 * 2);
        assert_int_equal(bytes.layer_bytes, cases[i].tile_bytes * 3 * 2 * 7);
        assert_int_equal(bytes.total_bytes, cases[i].tile_bytes * 3 * 7 * 4);
        assert_int_equal(bytes.token_bytes * 7 * (uint64_t)cases[i].block_size, bytes.total_bytes);
        assert_int_equal(bytes.layout, cases[i].layout);
    }
}

typedef struct bad_params {
    kvleaf_pool_params params;
    kvleaf_status status;
    const char *field;
    int64_t value, limit;
} bad_params;

#define BAD(status, field, value, limit, ...)                                                                          \
    {                                                                                                                  \
        {.struct_size = sizeof(kvleaf_pool_params),                                                                    \
         .num_blocks = 4,                                                                                              \
         .num_kv_heads = 2,                                                                                            \
         .head_dim_k = 64,                                                                                             \
         __VA_ARGS__},                                                                                                 \
            status, field, value, limit                                                                                \
    }

/* Each field out of range, named with its value and its limit, by the size function and at creation. */
static void test_bad_fields(void **state)
{
    (void)state;
    static const bad_params cases[] = {
        {{.struct_size = 4}, KVLEAF_INVALID, "struct_size", 4, sizeof(kvleaf_pool_params)},
        BAD(KVLEAF_INVALID, "num_layers", -1, 1, .num_layers = -1),
        {{.struct_size = sizeof(kvleaf_pool_params), .num_kv_heads = 2, .head_dim_k = 64},
         KVLEAF_INVALID,
         "num_blocks",
         0,
         1},
        BAD(KVLEAF_INVALID, "block_size", -4, 1, .block_size = -4),
        BAD(KVLEAF_INVALID, "block_size", 257, 256, .block_size = 257),
        {{.struct_size = sizeof(kvleaf_pool_params), .num_blocks = 4, .head_dim_k = 64},
         KVLEAF_INVALID,
         "num_kv_heads",
         0,
         1},
        {{.struct_size = sizeof(kvleaf_pool_params), .num_blocks = 4, .num_kv_heads = 2},
         KVLEAF_INVALID,
         "head_dim_k",
         0,
         1},
        {{.struct_size = sizeof(kvleaf_pool_params), .num_blocks = 4, .num_kv_heads = 2, .head_dim_k = 257},
         KVLEAF_INVALID,
         "head_dim_k",
         257,
         256},
        BAD(KVLEAF_INVALID, "num_heads", -2, 2, .num_heads = -2),
        BAD(KVLEAF_INVALID, "num_heads", 7, 2, .num_heads = 7),
        BAD(KVLEAF_INVALID, "head_dim_v", -1, 1, .head_dim_v = -1),
        BAD(KVLEAF_UNSUPPORTED, "head_dim_v", 128, 64, .head_dim_v = 128),
        BAD(KVLEAF_INVALID, "dtype", 17, KVLEAF_F32, .dtype = (kvleaf_dtype)17),
        BAD(KVLEAF_INVALID, "layout", KVLEAF_LAYOUT_STRIDED, KVLEAF_LAYOUT_SWIZZLE8, .layout = KVLEAF_LAYOUT_STRIDED),
        BAD(KVLEAF_INVALID, "layout", 77, KVLEAF_LAYOUT_SWIZZLE8, .layout = (kvleaf_layout)77),
        BAD(KVLEAF_INVALID, "block_size", 24, 16, .block_size = 24, .layout = KVLEAF_LAYOUT_CPU16),
        BAD(KVLEAF_INVALID, "block_size", 12, 8, .block_size = 12, .layout = KVLEAF_LAYOUT_DIM8),
        BAD(KVLEAF_INVALID, "block_size", 12, 8, .block_size = 12, .layout = KVLEAF_LAYOUT_SWIZZLE8),
    };
    for (int i = 0; i < COUNT(cases); i++) {
        const bad_params *c = &cases[i];
        kvleaf_pool_bytes bytes = BYTES_INIT;
        kvleaf_pool *pool = NULL;
        ASSERT_FAILS(c->status, c->field, kvleaf_pool_size(NULL, &c->params, &bytes));
        ASSERT_FAILS(c->status, c->field, kvleaf_pool_create(device, &c->params, &pool));
        assert_null(pool);
        assert_int_equal(bytes.total_bytes, 0);
        assert_int_equal(kvleaf_last_error()->value, c->value);
        assert_int_equal(kvleaf_last_error()->limit, c->limit);
    }
}

static void test_null_handles(void **state)
{
    (void)state;
    kvleaf_pool_params params = small_params();
    kvleaf_pool_bytes bytes = {.struct_size = 1};
    kvleaf_pool *pool = NULL;
    cl_mem memory = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_pool_size(device, &params, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_pool_size(device, &params, &bytes));
    bytes.struct_size = sizeof bytes;
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_pool_size(device, NULL, &bytes));
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_pool_create(NULL, &params, &pool));
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_pool_create(device, NULL, &pool));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_pool_create(device, &params, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "pool", kvleaf_pool_query(NULL, &params));
    ASSERT_FAILS(KVLEAF_INVALID, "pool", kvleaf_pool_memory(NULL, 0, &memory));
    kvleaf_pool_destroy(NULL);
    kvleaf_pool_destroy(&pool);

    ASSERT_OK(kvleaf_pool_create(device, &params, &pool));
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_pool_query(pool, NULL));
    kvleaf_pool_params wrong = {.struct_size = 3};
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_pool_query(pool, &wrong));
    ASSERT_FAILS(KVLEAF_INVALID, "layer", kvleaf_pool_memory(pool, -1, &memory));
    ASSERT_FAILS(KVLEAF_INVALID, "layer", kvleaf_pool_memory(pool, 3, &memory));
    ASSERT_FAILS(KVLEAF_INVALID, "memory", kvleaf_pool_memory(pool, 0, NULL));
    assert_null(memory);
    kvleaf_pool_destroy(&pool);
    assert_null(pool);
    kvleaf_pool_destroy(&pool);
}

/* Defaults filled in, AUTO resolved; each layer is a buffer of layer_bytes. */
static void test_query_and_memory(void **state)
{
    (void)state;
    kvleaf_pool *pool;
    const kvleaf_pool_params *params = kvleaf_pool_params(.num_blocks = 3, .num_kv_heads = 2, .head_dim_k = 64);
    kvleaf_pool_bytes bytes = BYTES_INIT;
    ASSERT_OK(kvleaf_pool_size(device, params, &bytes));
    ASSERT_OK(kvleaf_pool_create(device, params, &pool));
    kvleaf_pool_params got = {.struct_size = sizeof got};
    ASSERT_OK(kvleaf_pool_query(pool, &got));
    assert_int_equal(got.num_layers, 1);
    assert_int_equal(got.block_size, 16);
    assert_int_equal(got.head_dim_v, 64);
    assert_int_equal(got.layout, kvl_layout_best(device, KVLEAF_F16, 16, 64, 0));
    assert_int_equal(got.layout, bytes.layout);
    assert_null(got.memory);
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_memory(pool, 0, &memory));
    size_t size = 0;
    assert_int_equal(clGetMemObjectInfo(memory, CL_MEM_SIZE, sizeof size, &size, NULL), CL_SUCCESS);
    assert_int_equal(size, bytes.layer_bytes);
    assert_ptr_equal(kvl_pool_device(pool), device);
    kvleaf_pool_destroy(&pool);
}

/* A layer as the attention calls take it: the pool's buffer, V half a block behind K. */
static void test_view(void **state)
{
    (void)state;
    kvleaf_pool *pool;
    const kvleaf_pool_params params = small_params();
    kvleaf_pool_bytes bytes = BYTES_INIT;
    kvleaf_kv_view view = {.struct_size = 5};
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_size(device, &params, &bytes));
    ASSERT_OK(kvleaf_pool_create(device, &params, &pool));
    ASSERT_OK(kvleaf_pool_memory(pool, 1, &memory));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_pool_view(pool, 1, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_pool_view(pool, 1, &view));
    view.struct_size = sizeof view;
    ASSERT_FAILS(KVLEAF_INVALID, "pool", kvleaf_pool_view(NULL, 1, &view));
    ASSERT_FAILS(KVLEAF_INVALID, "layer", kvleaf_pool_view(pool, 3, &view));
    assert_null(view.k.handle);
    ASSERT_OK(kvleaf_pool_view(pool, 1, &view));
    assert_ptr_equal(view.k.handle, memory);
    assert_ptr_equal(view.v.handle, memory);
    assert_int_equal(view.k.offset, 0);
    assert_int_equal(view.v.offset, bytes.block_bytes / 2);
    assert_int_equal(view.block_stride * 2, bytes.block_bytes); /* of f16 */
    assert_int_equal(view.k.dtype, KVLEAF_F16);
    assert_int_equal(view.v.dtype, KVLEAF_F16);
    assert_int_equal(view.layout, KVLEAF_LAYOUT_ROWS);
    assert_int_equal(view.num_blocks, 5);
    kvleaf_pool_destroy(&pool);
}

/* compute-runtime #627: a buffer over the device's limit is refused with the limit named, as are sizes past 64 bits. */
static void test_too_large(void **state)
{
    (void)state;
    kvleaf_device_params limited_params = support_params();
    limited_params.max_alloc_bytes = 1 << 20;
    kvleaf_device *limited;
    ASSERT_OK(kvleaf_device_open(&limited_params, &limited));
    kvleaf_pool_params params = *kvleaf_pool_params(.num_layers = 9, .num_blocks = 32, .block_size = 16,
                                                    .num_kv_heads = 8, .head_dim_k = 64, .dtype = KVLEAF_F16);
    kvleaf_pool_bytes bytes = BYTES_INIT;
    kvleaf_pool *pool = NULL;
    ASSERT_OK(kvleaf_pool_size(limited, &params, &bytes));
    assert_int_equal(bytes.layer_bytes, 1 << 20);
    ASSERT_OK(kvleaf_pool_create(limited, &params, &pool));
    kvleaf_pool_destroy(&pool);
    params.num_blocks++;
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvleaf_pool_size(limited, &params, &bytes));
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvleaf_pool_create(limited, &params, &pool));
    assert_int_equal(kvleaf_last_error()->value, 33 * 32768);
    assert_int_equal(kvleaf_last_error()->limit, 1 << 20);
    assert_non_null(strstr(kvleaf_last_error()->message, "1048576"));
    kvleaf_device_destroy(&limited);

    params.num_blocks = params.num_kv_heads = params.num_layers = INT32_MAX;
    params.block_size = params.head_dim_k = 256;
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvleaf_pool_size(NULL, &params, &bytes));
    params.num_kv_heads = 4; /* one layer fits 64 bits, all of them do not */
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvleaf_pool_size(NULL, &params, &bytes));
    params.num_layers = 1;
    ASSERT_OK(kvleaf_pool_size(NULL, &params, &bytes));
    assert_int_equal(bytes.layer_bytes, (uint64_t)INT32_MAX * 4 * 65536 * 2 * 2);
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvleaf_pool_create(device, &params, &pool));
}

static cl_uint references(cl_mem memory)
{
    cl_uint count = 0;
    assert_int_equal(clGetMemObjectInfo(memory, CL_MEM_REFERENCE_COUNT, sizeof count, &count, NULL), CL_SUCCESS);
    return count;
}

enum { SMALL_BUFFERS = 3, SMALL_LAYER_BYTES = 5 * 2 * 2 * 4 * 20 * 2 };

static void make_small_memory(cl_mem *memory, cl_context context, size_t size)
{
    for (int i = 0; i < SMALL_BUFFERS; i++) {
        cl_int error;
        memory[i] = clCreateBuffer(context, CL_MEM_READ_WRITE, size, NULL, &error);
        assert_int_equal(error, CL_SUCCESS);
    }
}

static void release_small_memory(cl_mem *memory)
{
    for (int i = 0; i < SMALL_BUFFERS; i++) {
        assert_int_equal(references(memory[i]), 1);
        clReleaseMemObject(memory[i]);
    }
}

/* The application's buffers are used as they are, retained, and given back; bad ones are refused by number. */
static void test_supplied_memory(void **state)
{
    (void)state;
    cl_mem memory[SMALL_BUFFERS], given[SMALL_BUFFERS], got;
    make_small_memory(memory, kvleaf_device_context(device), SMALL_LAYER_BYTES);
    kvleaf_pool_params params = small_params();
    params.memory = given;
    kvleaf_pool *pool = NULL;
    memcpy(given, memory, sizeof memory);
    ASSERT_OK(kvleaf_pool_create(device, &params, &pool));
    memset(given, 0, sizeof given); /* the list itself is not kept */
    for (int layer = 0; layer < SMALL_BUFFERS; layer++) {
        ASSERT_OK(kvleaf_pool_memory(pool, layer, &got));
        assert_ptr_equal(got, memory[layer]);
        assert_int_equal(references(got), 2);
    }
    kvleaf_pool_destroy(&pool);

    memcpy(given, memory, sizeof memory);
    given[1] = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "memory", kvleaf_pool_create(device, &params, &pool));
    assert_int_equal(kvleaf_last_error()->value, 1);
    cl_int error;
    given[1] = clCreateBuffer(kvleaf_device_context(device), CL_MEM_READ_WRITE, SMALL_LAYER_BYTES - 1, NULL, &error);
    assert_int_equal(error, CL_SUCCESS);
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "memory", kvleaf_pool_create(device, &params, &pool));
    assert_int_equal(kvleaf_last_error()->value, SMALL_LAYER_BYTES - 1);
    assert_int_equal(kvleaf_last_error()->limit, SMALL_LAYER_BYTES);
    clReleaseMemObject(given[1]);
    assert_null(pool);
    release_small_memory(memory);
}

static void test_memory_of_another_context(void **state)
{
    (void)state;
    kvleaf_device *other = support_device();
    cl_mem memory[SMALL_BUFFERS], mine[SMALL_BUFFERS];
    make_small_memory(memory, kvleaf_device_context(other), SMALL_LAYER_BYTES);
    make_small_memory(mine, kvleaf_device_context(device), SMALL_LAYER_BYTES);
    cl_mem given[SMALL_BUFFERS] = {mine[0], mine[1], memory[2]};
    kvleaf_pool_params params = small_params();
    params.memory = given;
    kvleaf_pool *pool = NULL;
    ASSERT_FAILS(KVLEAF_FOREIGN, "memory", kvleaf_pool_create(device, &params, &pool));
    assert_int_equal(kvleaf_last_error()->value, 2);
    assert_null(pool);
    release_small_memory(memory);
    release_small_memory(mine);
    kvleaf_device_destroy(&other);
}

/* A pool outlives its device object's handle and, retained, its own. */
static void test_lifetimes(void **state)
{
    (void)state;
    shim_reset();
    kvleaf_device_params device_params = support_params();
    device_params.opencl = shim_table();
    kvleaf_device *short_lived;
    ASSERT_OK(kvleaf_device_open(&device_params, &short_lived));
    kvleaf_pool_params params = small_params();
    kvleaf_pool *pool, *held;
    ASSERT_OK(kvleaf_pool_create(short_lived, &params, &pool));
    kvleaf_device_destroy(&short_lived);
    held = pool;
    kvl_pool_retain(held);
    kvleaf_pool_destroy(&pool);
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_memory(held, 2, &memory));
    assert_int_equal(references(memory), 1);
    assert_int_equal(shim.buffers, SMALL_BUFFERS);
    kvl_pool_release(held);
    assert_int_equal(shim_balance(), 0);
}

enum { OPENCL_OWN, OPENCL_SUPPLIED, HOST, FAILING };

/* Opens a device over the shim, makes the at-th call (or allocation) of a creation fail, and destroys all; false where
 * the creation made fewer. */
static bool fail_one(int what, int64_t at, int *refused)
{
    support_memory host = {0};
    kvleaf_device_params device_params = support_params();
    device_params.opencl = shim_table();
    device_params.allocator = support_allocator(&host);
    kvleaf_device *fresh;
    shim_reset();
    ASSERT_OK(kvleaf_device_open(&device_params, &fresh));
    kvleaf_pool_params params = small_params();
    kvleaf_pool *pool = NULL;
    cl_mem memory[SMALL_BUFFERS];
    make_small_memory(memory, kvleaf_device_context(fresh), SMALL_LAYER_BYTES);
    if (what == OPENCL_SUPPLIED)
        params.memory = memory;
    int64_t fail_at = what == HOST ? (host.fail_at = host.allocations + at) : (shim.fail_at = shim.calls + at);
    kvleaf_status status = kvleaf_pool_create(fresh, &params, &pool);
    bool failed = (what == HOST ? host.allocations : shim.calls) >= fail_at;
    host.fail_at = shim.fail_at = 0;
    assert_int_equal(pool != NULL, status == KVLEAF_OK);
    assert_true(failed || status == KVLEAF_OK);
    *refused += status != KVLEAF_OK;
    if (status) {
        if (what == HOST)
            assert_int_equal(status, KVLEAF_NO_MEMORY);
        assert_int_equal(shim.buffers, 0);
        assert_int_equal(shim.kernels, 0);
        ASSERT_OK(kvleaf_pool_create(fresh, &params, &pool));
    }
    kvleaf_pool_destroy(&pool);
    release_small_memory(memory);
    kvleaf_device_destroy(&fresh);
    assert_int_equal(shim_balance(), 0);
    assert_int_equal(host.live, 0);
    return failed;
}

/* Every OpenCL call and every allocation of creation fails once: an error, nothing made, nothing left behind. (A
 * variant that fails to build leaves the place to the next one, so not each failure refuses the pool.) */
static void test_each_call_fails(void **state)
{
    (void)state;
    for (int what = 0; what < FAILING; what++) {
        int refused = 0;
        int64_t at = 1;
        while (fail_one(what, at, &refused))
            at++;
        assert_in_range(refused, what == HOST ? 4 : SMALL_BUFFERS + 1, at);
        print_message("%d of %d failures refused the pool\n", refused, (int)at - 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seed_size_of_a_sequence),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_bad_fields),
        cmocka_unit_test(test_null_handles),
        cmocka_unit_test(test_query_and_memory),
        cmocka_unit_test(test_view),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_supplied_memory),
        cmocka_unit_test(test_memory_of_another_context),
        cmocka_unit_test(test_lifetimes),
        cmocka_unit_test(test_each_call_fails),
    };
    return cmocka_run_group_tests_name("pool creation", tests, open_device, close_device);
}
