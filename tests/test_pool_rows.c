/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens between blocks and rows: every layout against kvleaf_layout_offset, element by element; runs of neighbouring
 * blocks and scattered ones; what is not named keeps its bytes; each call failing. */
#include "moves.h"
#include "shim.h"

enum { LAYERS = 2, BLOCKS = 9, ENTRIES = 5, MAX_ELEMENT = 4 };

typedef struct rows_case {
    kvleaf_dtype dtype;
    kvleaf_layout layout;
    int32_t block_size, num_kv_heads, head_dim;
} rows_case;

static const rows_case cases[] = {
    {KVLEAF_F16, KVLEAF_LAYOUT_ROWS, 1, 1, 1},    {KVLEAF_F32, KVLEAF_LAYOUT_ROWS, 5, 3, 7},
    {KVLEAF_F32, KVLEAF_LAYOUT_CPU16, 16, 2, 20}, {KVLEAF_F16, KVLEAF_LAYOUT_CPU16, 32, 1, 80},
    {KVLEAF_BF16, KVLEAF_LAYOUT_DIM8, 8, 2, 12},  {KVLEAF_F16, KVLEAF_LAYOUT_SWIZZLE8, 8, 2, 80},
};

static const int32_t tables[][ENTRIES] = {
    {0, 1, 2, 3, 4}, /* one run */
    {7, 2, 3, 8, 0},
};

/* A pool with random bytes, the same bytes beside it, and what it is made of. */
typedef struct scene {
    kvleaf_device *owner;
    cl_command_queue commands;
    kvleaf_pool *pool;
    kvleaf_pool_params params;
    size_t element, tile, padded, layer_bytes;
    unsigned char *expected[LAYERS];
} scene;

static void open_scene(scene *s, kvleaf_device *owner, const rows_case *c)
{
    *s = (scene){.owner = owner, .commands = support_queue(owner), .params = {.struct_size = sizeof s->params}};
    ASSERT_OK(kvleaf_pool_create(owner,
                                 kvleaf_pool_params(.num_layers = LAYERS, .num_blocks = BLOCKS,
                                                    .block_size = c->block_size, .num_kv_heads = c->num_kv_heads,
                                                    .head_dim_k = c->head_dim, .dtype = c->dtype, .layout = c->layout),
                                 &s->pool));
    ASSERT_OK(kvleaf_pool_query(s->pool, &s->params));
    s->element = kvleaf_dtype_size(c->dtype);
    s->tile = kvleaf_layout_tile(c->layout, c->block_size, c->head_dim);
    s->padded = s->tile / (size_t)c->block_size;
    s->layer_bytes = s->tile * s->element * (size_t)c->num_kv_heads * 2 * BLOCKS;
    for (int layer = 0; layer < LAYERS; layer++) {
        s->expected[layer] = random_bytes(s->layer_bytes);
        assert_int_equal(clEnqueueWriteBuffer(s->commands, s->pool->memory[layer], CL_TRUE, 0, s->layer_bytes,
                                              s->expected[layer], 0, NULL, NULL),
                         CL_SUCCESS);
    }
}

static void close_scene(scene *s)
{
    for (int layer = 0; layer < LAYERS; layer++)
        free(s->expected[layer]);
    kvleaf_pool_destroy(&s->pool);
    clReleaseCommandQueue(s->commands);
}

static void check_scene(const scene *s, const char *what)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        uint8_t *now = support_read(s->commands, s->pool->memory[layer], s->layer_bytes);
        for (size_t i = 0; i < s->layer_bytes; i++)
            if (now[i] != s->expected[layer][i])
                fail_msg("%s: %s, layer %d, byte %zu is %02x, expected %02x", what,
                         kvleaf_layout_name(s->params.layout), layer, i, now[i], s->expected[layer][i]);
        free(now);
    }
}

/* side = 2 * layer, + 1 for V */
static unsigned char *element(const scene *s, int side, const int32_t *table, int64_t token, int32_t head, int32_t dim)
{
    const kvleaf_pool_params *p = &s->params;
    size_t block = 2 * (size_t)table[token / p->block_size] + (size_t)(side % 2);
    size_t offset =
        kvleaf_layout_offset(p->layout, side % 2, p->block_size, p->head_dim_k, (int32_t)(token % p->block_size), dim);
    return s->expected[side / 2] + ((block * (size_t)p->num_kv_heads + (size_t)head) * s->tile + offset) * s->element;
}

static kvleaf_status run(const scene *s, const kvl_rows *rows, int64_t from, void *bytes, bool write)
{
    kvl_chain chain;
    kvleaf_status status = kvl_chain_begin(&chain, s->owner, &(kvleaf_exec){.queue = s->commands});
    if (status)
        return status;
    status = write ? kvl_pool_write_rows(s->pool, rows, from, bytes, &chain)
                   : kvl_pool_read_rows(s->pool, rows, bytes, &chain);
    return kvl_chain_end(&chain, status);
}

/* Both directions of one range against the layout, an element at a time. */
static void check_range(scene *s, const int32_t *table, int64_t start, int64_t count, int64_t from)
{
    const kvl_rows rows = {.table = table, .start = start, .count = count};
    uint64_t size = kvl_pool_rows_bytes(s->pool, count);
    const kvleaf_pool_params *p = &s->params;
    assert_int_equal(size, (uint64_t)count * LAYERS * 2 * (uint64_t)(p->num_kv_heads * p->head_dim_k) * s->element);
    unsigned char *bytes = support_guarded((size_t)size), *fresh = random_bytes((size_t)size), *at = bytes;
    ASSERT_OK(run(s, &rows, 0, bytes, false));
    check_scene(s, "read");
    for (int side = 0; side < LAYERS * 2; side++)
        for (int64_t token = start; token < start + count; token++)
            for (int32_t head = 0; head < p->num_kv_heads; head++)
                for (int32_t dim = 0; dim < p->head_dim_k; dim++, at += s->element)
                    assert_memory_equal(at, element(s, side, table, token, head, dim), s->element);
    support_guarded_free(bytes);
    ASSERT_OK(run(s, &rows, from, fresh, true));
    static const unsigned char zero[MAX_ELEMENT] = {0};
    at = fresh;
    for (int side = 0; side < LAYERS * 2; side++)
        for (int64_t token = start; token < start + count; token++)
            for (int32_t head = 0; head < p->num_kv_heads; head++)
                for (int32_t dim = 0; dim < (int32_t)s->padded; dim++) {
                    if (token >= from)
                        memcpy(element(s, side, table, token, head, dim), dim < p->head_dim_k ? at : zero, s->element);
                    at += dim < p->head_dim_k ? s->element : 0;
                }
    check_scene(s, "write");
    free(fresh);
}

static void test_ranges(void **state)
{
    (void)state;
    for (int i = 0; i < COUNT(cases); i++)
        for (int t = 0; t < COUNT(tables); t++) {
            scene s;
            open_scene(&s, device, &cases[i]);
            int64_t all = (int64_t)ENTRIES * cases[i].block_size;
            check_range(&s, tables[t], 0, all, 0);
            check_range(&s, tables[t], 0, 1, 0);
            check_range(&s, tables[t], all - 1, 1, 0);
            check_range(&s, tables[t], 0, all, all); /* nothing to write */
            for (int round = 0; round < 4; round++) {
                int64_t start = random_below((int32_t)all), count = 1 + random_below((int32_t)(all - start));
                check_range(&s, tables[t], start, count, start + random_below((int32_t)count));
            }
            close_scene(&s);
        }
}

/* More than what is moved at once, in one run. */
static void test_long_run(void **state)
{
    (void)state;
    enum { MANY = 70, BYTES = 16 * 8 * 128 * 2 };
    kvleaf_pool *pool;
    ASSERT_OK(kvleaf_pool_create(device,
                                 kvleaf_pool_params(.num_blocks = MANY, .block_size = 16, .num_kv_heads = 8,
                                                    .head_dim_k = 128, .layout = KVLEAF_LAYOUT_ROWS),
                                 &pool));
    int32_t table[MANY];
    for (int32_t i = 0; i < MANY; i++)
        table[i] = i;
    const kvl_rows rows = {.table = table, .start = 3, .count = MANY * 16 - 4};
    size_t size = (size_t)kvl_pool_rows_bytes(pool, rows.count);
    unsigned char *bytes = random_bytes(size), *back = support_guarded(size);
    const scene s = {.owner = device, .commands = queue, .pool = pool};
    ASSERT_OK(run(&s, &rows, 0, bytes, true));
    ASSERT_OK(run(&s, &rows, 0, back, false));
    assert_memory_equal(bytes, back, size);
    support_guarded_free(back);
    free(bytes);
    kvleaf_pool_destroy(&pool);
}

static void test_sizes(void **state)
{
    (void)state;
    scene s;
    open_scene(&s, device, &cases[1]);
    assert_int_equal(kvl_pool_rows_bytes(s.pool, 0), 0);
    assert_true(kvl_pool_rows_bytes(s.pool, INT64_MAX) == UINT64_MAX);
    close_scene(&s);
}

/* The k-th call or allocation fails, every k: tokens that are not to be written keep their bytes. */
static void test_faults(void **state)
{
    (void)state;
    enum { START = 5, TOKENS = 100, FROM = 50 };
    static const struct {
        bool write, allocation;
        int64_t attempts; /* until nothing is left to fail */
    } kinds[] = {
        {false, false, 1 + LAYERS * 3 + 1}, /* the queue's properties, then a read a run */
        {false, true, 3 + 1},
        {true, false, 1 + LAYERS * (2 + 2) + 1}, /* both runs are read and written */
        {true, true, 3 + 1},
    };
    support_memory memory = {0};
    kvleaf_device_params params = support_params();
    params.opencl = shim_table();
    params.allocator = support_allocator(&memory);
    for (int i = 0; i < COUNT(kinds); i++) {
        shim_reset();
        kvleaf_device *fresh;
        ASSERT_OK(kvleaf_device_open(&params, &fresh));
        scene s;
        open_scene(&s, fresh, &cases[3]);
        const kvl_rows rows = {.table = tables[1], .start = START, .count = TOKENS};
        size_t size = (size_t)kvl_pool_rows_bytes(s.pool, TOKENS), row = size / (LAYERS * 2 * TOKENS);
        unsigned char *bytes = allocate(size);
        ASSERT_OK(run(&s, &rows, 0, bytes, false));
        for (size_t side = 0; side < LAYERS * 2; side++) /* to be written: what is there, or never */
            memset(bytes + side * TOKENS * row, 0xa5, (FROM - START) * row);
        int64_t balance = shim_balance(), live = memory.live, at = 0;
        kvleaf_status status;
        do {
            at++;
            shim.fail_at = kinds[i].allocation ? 0 : shim.calls + at;
            memory.fail_at = kinds[i].allocation ? memory.allocations + at : 0;
            status = run(&s, &rows, FROM, bytes, kinds[i].write);
            shim.fail_at = memory.fail_at = 0;
            if (status)
                assert_int_equal(status, kinds[i].allocation ? KVLEAF_NO_MEMORY : KVLEAF_DEVICE);
            assert_int_equal(shim_balance(), balance);
            assert_int_equal(memory.live, live);
            check_scene(&s, "faults");
        } while (status);
        assert_int_equal(at, kinds[i].attempts);
        free(bytes);
        close_scene(&s);
        kvleaf_device_destroy(&fresh);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_long_run),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests_name("rows", tests, open_device, close_device);
}
