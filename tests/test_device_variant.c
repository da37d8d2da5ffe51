/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the choice of kernel variants: the last that serves, builds and keeps within the limits; what is asked for
 * by a glob; the same answer from the query (kvl_variant_try) and the dispatch; a clear reason where nothing serves. */
#include "device_rig.h"

#include "attention/variants.h"

#include <string.h>

/* `answer` gives back the options it was built with. LOCAL_FLOATS of local memory a work-item in the greedy one. */
static const char good[] = "__kernel void answer(__global int *out)\n{\n    out[0] = WORK_GROUP;\n}\n"
                           "__kernel void second(__global int *out)\n{\n    out[0] = Q_DTYPE + KV_DTYPE + OUT_DTYPE + "
                           "KV_LAYOUT + KV_PAGED;\n}\n";
static const char greedy[] = "__kernel void answer(__global int *out)\n{\n    __local int room[WORK_GROUP * 16];\n"
                             "    room[get_local_id(0)] = (int)get_global_id(0);\n    barrier(CLK_LOCAL_MEM_FENCE);\n"
                             "    out[0] = room[0];\n}\n";
static const char broken[] = "__kernel void answer(__global int *out)\n{\n    out[0] = no_such_name;\n}\n";
/* Says which constants it was given. */
static const char fixed[] =
    "#ifndef HEAD_DIM\n#define HEAD_DIM 0\n#endif\n#ifndef GROUP\n#define GROUP 0\n#endif\n"
    "#ifndef BLOCK_SIZE\n#define BLOCK_SIZE 0\n#endif\n#ifndef SPLIT_TOKENS\n"
    "#define SPLIT_TOKENS 0\n#endif\n#ifndef TILE_ROWS\n#define TILE_ROWS 0\n#endif\n#ifndef MORE\n"
    "#define MORE 0\n#endif\n__kernel void answer(__global int *out)\n{\n    out[0] = HEAD_DIM + "
    "1000 * GROUP + 10000 * BLOCK_SIZE + 1000000 * (SPLIT_TOKENS + TILE_ROWS + MORE);\n}\n";

static int setup(void **state)
{
    device_rig *f = device_rig_open(support_folder(), KVLEAF_LOG_INFO);
    device_rig_write(f, "good.cl", good);
    device_rig_write(f, "greedy.cl", greedy);
    device_rig_write(f, "broken.cl", broken);
    device_rig_write(f, "fixed.cl", fixed);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    device_rig_close(*state);
    return 0;
}

static const char *refuses(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    return geometry->head_dim == 128 ? "not for head_dim 128" : NULL;
}

static const kvl_geometry usual = {.q_dtype = KVLEAF_F32,
                                   .kv_dtype = KVLEAF_F16,
                                   .out_dtype = KVLEAF_F32,
                                   .layout = KVLEAF_LAYOUT_ROWS,
                                   .num_heads = 8,
                                   .num_kv_heads = 2,
                                   .head_dim = 128,
                                   .block_size = 16};

#define ROW(row_name, row_file, ...)                                                                                   \
    {                                                                                                                  \
        .family = "decode", .name = row_name, .file = row_file, .kernels = {"answer"}, .work_group = 64, __VA_ARGS__   \
    }

static kvleaf_device *device_of(device_rig *f)
{
    kvleaf_device *device = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    return device;
}

static void test_key(void **state)
{
    const kvl_variant row = ROW("cpu", "good.cl", .persistent = true);
    char key[128];
    (void)state;
    kvl_variant_key(&row, &usual, key, sizeof key);
    assert_string_equal(key, "decode.cpu.q_f32.kv_f16.d128.b16");
    kvl_geometry contiguous = usual;
    contiguous.block_size = 0;
    contiguous.kv_dtype = KVLEAF_BF16;
    kvl_variant_key(&row, &contiguous, key, sizeof key);
    assert_string_equal(key, "decode.cpu.q_f32.kv_bf16.d128.b0");
    kvl_geometry windowed = usual;
    const kvl_variant serving = ROW("cpu", "good.cl", .windows = true);
    windowed.window = 4096;
    kvl_variant_key(&serving, &windowed, key, sizeof key);
    assert_string_equal(key, "decode.cpu.q_f32.kv_f16.d128.b16.w4096");
    kvl_variant_key(&row, &windowed, key, sizeof key); /* no matter of this program */
    assert_string_equal(key, "decode.cpu.q_f32.kv_f16.d128.b16");
    kvl_variant_key(&row, &usual, key, 10);
    assert_string_equal(key, "decode.cp");
}

/* Better ones stand behind generic ones; one that refuses, doesn't build, lacks its kernel or its source is passed
 * over, and the last error stays as it was. */
static void test_last_that_serves_is_taken(void **state)
{
    static const kvl_variant table[] = {
        ROW("generic", "good.cl", .persistent = false),
        ROW("better", "good.cl", .options = "-DBETTER=1"),
        ROW("refusing", "good.cl", .refuses = refuses),
        ROW("unbuildable", "broken.cl", .persistent = false),
        ROW("sourceless", "none.cl", .persistent = false),
        {.family = "decode", .name = "kernelless", .file = "good.cl", .kernels = {"answer", "none"}, .work_group = 64},
    };
    device_rig *f = *state;
    kvleaf_device *device = device_of(f);
    kvl_chosen chosen = {0};
    kvl_geometry other = usual;
    kvl_fail(KVLEAF_STALE, "before", 1, 2, "an older failure");
    ASSERT_OK(kvl_variant_choose(device, table, 6, &usual, &chosen));
    assert_string_equal(kvleaf_last_error()->field, "before");
    assert_string_equal(chosen.variant->name, "better");
    assert_string_equal(chosen.key, "decode.better.q_f32.kv_f16.d128.b16");
    assert_int_equal(chosen.work_group, 64);
    assert_int_equal(support_answer(device, chosen.program), 64);
    assert_non_null(strstr(f->lines.text, "decode.better.q_f32.kv_f16.d128.b16"));
    other.head_dim = 64;
    ASSERT_OK(kvl_variant_choose(device, table, 6, &other, &chosen));
    assert_string_equal(chosen.variant->name, "refusing");
    kvleaf_device_destroy(&device);
}

static void test_nothing_serves_gives_every_reason(void **state)
{
    static const kvl_variant table[] = {ROW("unbuildable", "broken.cl", .persistent = false),
                                        ROW("refusing", "good.cl", .refuses = refuses)};
    device_rig *f = *state;
    kvleaf_device *device = device_of(f);
    kvl_chosen chosen = {0};
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant", kvl_variant_choose(device, table, 2, &usual, &chosen));
    const char *message = kvleaf_last_error()->message;
    assert_non_null(strstr(message, "refusing: not for head_dim 128"));
    assert_non_null(strstr(message, "unbuildable: building cl_kernels/broken.cl failed"));
    assert_null(chosen.variant);
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant", kvl_variant_choose(device, table, 0, &usual, &chosen));
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant", kvl_variant_try(device, &table[1], &usual, &chosen));
    assert_string_equal(kvleaf_last_error()->message, "not for head_dim 128");
    ASSERT_STATUS(KVLEAF_DEVICE, kvl_variant_try(device, &table[0], &usual, &chosen));
    assert_non_null(strstr(kvleaf_last_error()->build_log, "no_such_name"));
    kvleaf_device_destroy(&device);
}

static void test_globs(void **state)
{
    static const kvl_variant table[] = {
        ROW("portable", "good.cl", .persistent = false),
        ROW("portable_fixed", "good.cl", .options = "-DA=1"),
        ROW("cpu", "good.cl", .options = "-DB=1"),
        ROW("refusing", "good.cl", .refuses = refuses),
    };
    static const struct {
        const char *globs, *taken;
    } cases[] = {
        {NULL, "cpu"},
        {"", "cpu"},
        {"decode.portable*", "portable_fixed"},
        {"decode.portable", "portable"},
        {"decode.portable.*", "portable"},
        {"decode.portable.q_f32.kv_f16.d128.b16", "portable"},
        {"decode.portable.q_f32.kv_f16.d128.b32", "cpu"},
        {"prefill.*", "cpu"},
        {"prefill.cpu,decode.portable", "portable"},
        {" decode.portable , decode.portable_fixed ,", "portable_fixed"},
        {"decode.refusing", "cpu"},
        {"decode.refusing,decode.portable", "portable"},
        {"*.kv_f16.*", "cpu"},
        {",,", "cpu"},
    };
    device_rig *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        f->params.variants = cases[i].globs;
        kvleaf_device *device = device_of(f);
        kvl_chosen chosen = {0};
        ASSERT_OK(kvl_variant_choose(device, table, 4, &usual, &chosen));
        if (strcmp(chosen.variant->name, cases[i].taken) != 0)
            fail_msg("\"%s\" took %s, expected %s", cases[i].globs, chosen.variant->name, cases[i].taken);
        kvleaf_device_destroy(&device);
    }
}

static void test_options_come_from_the_geometry(void **state)
{
    static const kvl_variant table[] = {
        ROW("none", "fixed.cl", .split_tokens = 0),
        ROW("dim", "fixed.cl", .fixed = KVL_FIX_HEAD_DIM, .split_tokens = 7),
        ROW("group", "fixed.cl", .fixed = KVL_FIX_GROUP, .tile_rows = 5),
        ROW("block", "fixed.cl", .fixed = KVL_FIX_BLOCK_SIZE, .options = "-DMORE=3"),
    };
    static const int expected[] = {0, 7000128, 5004000, 3160000};
    device_rig *f = *state;
    kvleaf_device *device = device_of(f);
    kvl_chosen chosen = {0};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        ASSERT_OK(kvl_variant_try(device, &table[i], &usual, &chosen));
        assert_int_equal(support_answer(device, chosen.program), expected[i]);
    }
    kvleaf_device_destroy(&device);
}

/* Limits capped from outside: by the params, by the device, by what the compiler says of the kernel. */
static void test_work_group_bends_to_the_limits(void **state)
{
    static const kvl_variant plain = ROW("plain", "good.cl", .min_work_group = 16);
    static const kvl_variant local = ROW("local", "greedy.cl", .min_work_group = 16);
    static const struct {
        const kvl_variant *variant;
        uint32_t params_group;
        uint64_t params_local;
        size_t device_group, kernel_group;
        int32_t work_group; /* 0 = does not serve */
        const char *field;
    } cases[] = {
        {&plain, 0, 0, 0, 0, 64, ""},
        {&plain, 64, 0, 0, 0, 64, ""},
        {&plain, 63, 0, 0, 0, 32, ""},
        {&plain, 16, 0, 0, 0, 16, ""},
        {&plain, 15, 0, 0, 0, 0, "max_work_group_size"},
        {&plain, 0, 0, 16, 0, 16, ""},
        {&plain, 0, 0, 0, 40, 32, ""},
        {&plain, 0, 0, 0, 16, 16, ""},
        {&plain, 0, 0, 0, 15, 0, "work_group"},
        {&local, 0, 0, 0, 0, 64, ""},
        {&local, 0, 4096, 0, 0, 64, ""},
        {&local, 0, 4095, 0, 0, 32, ""},
        {&local, 0, 1100, 0, 0, 16, ""},
        {&local, 0, 1023, 0, 0, 0, "local_bytes"},
    };
    device_rig *f = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvl_chosen tried = {0}, chosen = {0};
        f->params.max_work_group_size = cases[i].params_group;
        f->params.max_local_bytes = cases[i].params_local;
        shim.max_work_group = cases[i].device_group;
        shim.kernel_work_group = cases[i].kernel_group;
        kvleaf_device *device = device_of(f);
        kvleaf_status status = cases[i].work_group ? KVLEAF_OK : KVLEAF_UNSUPPORTED;
        ASSERT_STATUS(status, kvl_variant_try(device, cases[i].variant, &usual, &tried));
        if (status != KVLEAF_OK)
            support_assert_field(cases[i].field, __FILE__, __LINE__);
        ASSERT_STATUS(status, kvl_variant_choose(device, cases[i].variant, 1, &usual, &chosen));
        assert_int_equal(tried.work_group, cases[i].work_group);
        assert_int_equal(chosen.work_group, cases[i].work_group);
        assert_ptr_equal(tried.program, chosen.program);
        if (i == 2)
            assert_int_equal(support_answer(device, chosen.program), cases[i].work_group);
        kvleaf_device_destroy(&device);
    }
}

static void test_undocumented_can_be_denied(void **state)
{
    static const kvl_variant table[] = {ROW("plain", "good.cl", .persistent = false),
                                        ROW("edited", "good.cl", .undocumented = true)};
    device_rig *f = *state;
    for (uint32_t deny = 0; deny < 2; deny++) {
        f->params.deny_undocumented = deny;
        kvleaf_device *device = device_of(f);
        kvl_chosen chosen = {0};
        ASSERT_OK(kvl_variant_choose(device, table, 2, &usual, &chosen));
        assert_string_equal(chosen.variant->name, deny ? "plain" : "edited");
        kvleaf_device_destroy(&device);
    }
}

/* The library's own tables: what is chosen is the last that a trial on its own calls usable, whatever the limits, and
 * no extension is needed for it. */
static void test_query_and_dispatch_agree(void **state)
{
    static const struct {
        uint32_t group;
        uint64_t local;
        const char *extensions;
    } limits[] = {{0, 0, NULL}, {1, 256, "cl_khr_global_int32_base_atomics"}};
    device_rig *f = *state;
    f->params.kernel_dir = NULL;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        f->params.max_work_group_size = limits[i].group;
        f->params.max_local_bytes = limits[i].local;
        shim.extensions = limits[i].extensions;
        kvleaf_device *device = device_of(f);
        static const kvl_operation operations[] = {KVL_APPEND, KVL_MERGE};
        for (size_t o = 0; o < sizeof operations / sizeof *operations; o++) {
            int count = 0, last = -1;
            const kvl_variant *table = kvl_variants(operations[o], &count);
            kvl_chosen tried = {0}, chosen = {0};
            for (int row = 0; row < count; row++) {
                if (kvl_variant_try(device, &table[row], &usual, &tried) == KVLEAF_OK)
                    last = row;
            }
            kvleaf_status status = kvl_variant_choose(device, table, count, &usual, &chosen);
            assert_int_equal(status, last < 0 ? KVLEAF_UNSUPPORTED : KVLEAF_OK);
            assert_ptr_equal(chosen.variant, last < 0 ? NULL : &table[last]);
        }
        kvleaf_device_destroy(&device);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_key),
        TEST(test_last_that_serves_is_taken),
        TEST(test_nothing_serves_gives_every_reason),
        TEST(test_globs),
        TEST(test_options_come_from_the_geometry),
        TEST(test_work_group_bends_to_the_limits),
        TEST(test_undocumented_can_be_denied),
        TEST(test_query_and_dispatch_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
