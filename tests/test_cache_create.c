/* SPDX-License-Identifier: Apache-2.0 */
/* Making caches and plans: every refusal by name, defaults, who keeps whom alive, null, stale and foreign handles. */
#include <string.h>

#include "rig.h"

static void test_cache_refuses(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    const kvleaf_layer good = {.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 16};
    kvleaf_layer second = good;
    const float sink = 0;
    int32_t twice[] = {1, 1};
    kvleaf_pool *const pools[] = {r.pools[0], r.pools[0]};
    typedef struct refusal {
        kvleaf_layer layer;
        kvleaf_cache_params params; /* layers, pools are filled in where they are not said to be null */
        kvleaf_status status;
        const char *field;
    } refusal;
#define LAYER(status_, field_, ...)                                                                                    \
    {                                                                                                                  \
        .layer = {.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 16, __VA_ARGS__}, .status = status_,                \
        .field = field_                                                                                                \
    }
#define PARAMS(status_, field_, ...)                                                                                   \
    {                                                                                                                  \
        .layer = {.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 16}, .params = {__VA_ARGS__}, .status = status_,    \
        .field = field_                                                                                                \
    }
    const refusal cases[] = {
        {{.num_heads = 3, .num_kv_heads = 2, .head_dim_k = 16}, {0}, KVLEAF_INVALID, "num_heads"},
        {{.num_heads = 0, .num_kv_heads = 2, .head_dim_k = 16}, {0}, KVLEAF_INVALID, "num_heads"},
        {{.num_heads = 4, .num_kv_heads = 0, .head_dim_k = 16}, {0}, KVLEAF_INVALID, "num_kv_heads"},
        {{.num_heads = 4, .num_kv_heads = -2, .head_dim_k = 16}, {0}, KVLEAF_INVALID, "num_kv_heads"},
        {{.num_heads = 4, .num_kv_heads = 4, .head_dim_k = 16}, {0}, KVLEAF_INVALID, "num_kv_heads"},
        {{.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 32}, {0}, KVLEAF_INVALID, "head_dim_k"},
        LAYER(KVLEAF_UNSUPPORTED, "head_dim_v", .head_dim_v = 8),
        LAYER(KVLEAF_INVALID, "window", .window = -1),
        LAYER(KVLEAF_INVALID, "softcap", .softcap = -1),
        LAYER(KVLEAF_INVALID, "softcap", .softcap = 1e38f * 1e38f),
        LAYER(KVLEAF_UNSUPPORTED, "sinks", .sinks = &sink),
        LAYER(KVLEAF_INVALID, "softmax_scale", .softmax_scale = -1),
        LAYER(KVLEAF_INVALID, "softmax_scale", .softmax_scale = 1e38f * 1e38f),
        LAYER(KVLEAF_INVALID, "kv_layer", .kv_layer = 2),
        LAYER(KVLEAF_INVALID, "kv_layer", .kv_layer = -1),
        LAYER(KVLEAF_INVALID, "num_layers", .kv_layer = 1),
        {{.num_heads = 8, .num_kv_heads = 2, .head_dim_k = 16}, {0}, KVLEAF_UNSUPPORTED, "layers"},
        LAYER(KVLEAF_UNSUPPORTED, "layers", .softcap = 1),
        PARAMS(KVLEAF_INVALID, "struct_size", .struct_size = 8),
        PARAMS(KVLEAF_INVALID, "num_layers", .num_layers = -1),
        PARAMS(KVLEAF_INVALID, "num_layers", .num_layers = 1),
        PARAMS(KVLEAF_INVALID, "num_pools", .num_pools = -1),
        PARAMS(KVLEAF_INVALID, "num_pools", .num_pools = 2),
        PARAMS(KVLEAF_INVALID, "q_dtype", .q_dtype = (kvleaf_dtype)9),
        PARAMS(KVLEAF_INVALID, "out_dtype", .out_dtype = (kvleaf_dtype)9),
        PARAMS(KVLEAF_INVALID, "max_sequences", .max_sequences = -1),
        PARAMS(KVLEAF_INVALID, "max_context", .max_context = -1),
        PARAMS(KVLEAF_INVALID, "swap_blocks", .swap_blocks = -1),
        PARAMS(KVLEAF_INVALID, "free_order", .free_count = 3),
        PARAMS(KVLEAF_INVALID, "free_order", .free_order = twice, .free_count = 2),
        PARAMS(KVLEAF_INVALID, "free_count", .free_order = twice, .free_count = 65),
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* A wrong geometry must be wrong by itself, another one only beside a good layer. */
        second = cases[i].layer;
        bool other = cases[i].status == KVLEAF_UNSUPPORTED && strcmp(cases[i].field, "layers") == 0;
        kvleaf_layer layers[2] = {other || second.kv_layer ? good : second, second};
        kvleaf_cache_params params = cases[i].params;
        params.struct_size = params.struct_size ? params.struct_size : sizeof params;
        params.layers = layers;
        params.num_layers = params.num_layers ? params.num_layers : 2;
        params.pools = pools;
        params.num_pools = params.num_pools ? params.num_pools : 1;
        kvleaf_cache *cache = NULL;
        ASSERT_FAILS(cases[i].status, cases[i].field, kvleaf_cache_create(r.device, &params, &cache));
        assert_null(cache);
    }
    rig_close(&r);
}

static void test_cache_nulls_and_foreign_pool(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    kvleaf_device *other = support_device();
    const kvleaf_layer layers[2] = {{.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 16},
                                    {.num_heads = 4, .num_kv_heads = 2, .head_dim_k = 16}};
    kvleaf_pool *none = NULL;
    kvleaf_cache *cache = NULL;
    kvleaf_cache_params params = {
        .struct_size = sizeof params, .layers = layers, .num_layers = 2, .pools = r.pools, .num_pools = 1};
    ASSERT_FAILS(KVLEAF_FOREIGN, "pools", kvleaf_cache_create(other, &params, &cache));
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_cache_create(NULL, &params, &cache));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_cache_create(r.device, &params, NULL));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_cache_create(r.device, NULL, &cache));
    params.layers = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "layers", kvleaf_cache_create(r.device, &params, &cache));
    params.layers = layers;
    params.pools = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "pools", kvleaf_cache_create(r.device, &params, &cache));
    params.pools = &none;
    ASSERT_FAILS(KVLEAF_INVALID, "pools", kvleaf_cache_create(r.device, &params, &cache));
    assert_null(cache);
    kvleaf_cache_destroy(NULL);
    kvleaf_cache_destroy(&cache);
    kvleaf_plan_destroy(NULL);
    kvleaf_device_destroy(&other);
    rig_close(&r);
}

static void test_plan_refuses(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    const struct {
        kvleaf_plan_params params;
        const char *field;
    } cases[] = {
        {{.struct_size = 3}, "struct_size"},          {{.max_entries = -1}, "max_entries"},
        {{.max_tokens = -1}, "max_tokens"},           {{.max_decode_keys = -1}, "max_decode_keys"},
        {{.steps_in_flight = -1}, "steps_in_flight"}, {{.steps_in_flight = 100000}, "steps_in_flight"},
        {{.sharing = (kvleaf_sharing)3}, "sharing"},
    };
    kvleaf_plan *plan = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_plan_params params = cases[i].params;
        params.struct_size = params.struct_size ? params.struct_size : sizeof params;
        ASSERT_FAILS(KVLEAF_INVALID, cases[i].field, kvleaf_plan_create(r.cache, &params, &plan));
        assert_null(plan);
    }
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_plan_create(NULL, NULL, &plan));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_plan_create(r.cache, NULL, NULL));
    ASSERT_OK(kvleaf_plan_create(r.cache, NULL, &plan)); /* all defaults */
    assert_true(strncmp(kvleaf_plan_variant(plan, "decode"), "decode.", 7) == 0);
    assert_true(strncmp(kvleaf_plan_variant(plan, "append"), "append.", 7) == 0);
    assert_string_equal(kvleaf_plan_variant(plan, "merge"), "");
    assert_string_equal(kvleaf_plan_variant(plan, NULL), "");
    assert_string_equal(kvleaf_plan_variant(NULL, "decode"), "");
    kvleaf_plan_destroy(&plan);
    rig_close(&r);
}

/* Whichever is destroyed first, what still needs the others keeps them. */
static void test_lifetimes(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.own_device = true;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 5);
    kvleaf_pool_destroy(&r.pools[0]);
    kvleaf_device_destroy(&r.device);
    const rig_step step = {.seqs = {seq}, .num_q = {5}, .n = 1};
    ASSERT_OK(rig_build(&r, &step));
    rig_layers(&r, &step, "pool and device released by the application");
    kvleaf_cache_destroy(&r.cache);
    ASSERT_OK(kvleaf_plan_commit(r.plan, NULL));
    rig_close(&r);
}

static void test_sequences(void **state)
{
    (void)state;
    rig r, other;
    rig_params p = rig_defaults();
    p.max_context = 40;
    rig_open(&r, &p);
    rig_open(&other, &p);
    rig_seq *seq = rig_seq_new(&r), *foreign = rig_seq_new(&other), *gone = rig_seq_new(&r);
    kvleaf_seq stale = gone->seq;
    rig_seq_end(&r, gone);
    kvleaf_seq_info info = {.struct_size = sizeof info};
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    kvleaf_tokens one = {.struct_size = sizeof one, .count = 1}, many = {.struct_size = sizeof many, .count = 41};
    int32_t count;
    bool can;
    kvleaf_seq handle = seq->seq;
    const struct {
        kvleaf_seq seq;
        kvleaf_status status;
    } bad[] = {{0, KVLEAF_INVALID}, {stale, KVLEAF_STALE}, {foreign->seq, KVLEAF_FOREIGN}};
    for (size_t i = 0; i < 3; i++) {
        kvleaf_seq copy = bad[i].seq;
        ASSERT_STATUS(bad[i].status, kvleaf_seq_extend(r.cache, bad[i].seq, &one, NULL));
        ASSERT_STATUS(bad[i].status, kvleaf_can_extend(r.cache, bad[i].seq, 1, &can));
        ASSERT_STATUS(bad[i].status, kvleaf_seq_fork(r.cache, bad[i].seq, 0, &copy));
        ASSERT_STATUS(bad[i].status, kvleaf_seq_truncate(r.cache, bad[i].seq, 0));
        ASSERT_STATUS(bad[i].status, kvleaf_seq_query(r.cache, bad[i].seq, &info));
        ASSERT_STATUS(bad[i].status, kvleaf_seq_table(r.cache, bad[i].seq, 0, NULL, 0, &count));
        ASSERT_STATUS(bad[i].status, kvleaf_seq_destroy(r.cache, &copy));
        assert_int_equal(copy, bad[i].seq);
    }
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_create(NULL, NULL, &handle));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_extend(NULL, handle, &one, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_can_extend(NULL, handle, 1, &can));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_fork(NULL, handle, 0, &handle));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_truncate(NULL, handle, 0));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_query(NULL, handle, &info));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_table(NULL, handle, 0, NULL, 0, &count));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_destroy(NULL, &handle));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_cache_query(NULL, &stats));
    assert_null(kvleaf_cache_blocks(NULL));
    /* More than a sequence may ever have, more than there is. */
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "count", kvleaf_seq_extend(r.cache, seq->seq, &many, NULL));
    assert_int_equal(kvleaf_last_error()->limit, 40);
    rig_extend(&r, seq, 40);
    ASSERT_OK(kvleaf_seq_query(r.cache, seq->seq, &info));
    assert_int_equal(info.num_blocks, 10);
    assert_int_equal(kvleaf_blocks_refcount(kvleaf_cache_blocks(r.cache), 0, 9), 1);
    assert_int_equal(rig_stats(&r).used, 10);
    rig_seq_end(&r, seq);
    rig_seq_end(&other, foreign);
    rig_close(&other);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cache_refuses), cmocka_unit_test(test_cache_nulls_and_foreign_pool),
        cmocka_unit_test(test_plan_refuses),  cmocka_unit_test(test_lifetimes),
        cmocka_unit_test(test_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
