/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the launch that a variant's trial makes: every kind of geometry passes where the kernels are right, each way
 * of being wrong is seen, and what fails on the way leaves nothing over. The variants that are tried so in earnest need
 * a GPU; here others stand for them. */
#define _XOPEN_SOURCE 700
#include "shim.h"
#include "support.h"

#include "attention/trial.h"
#include "attention/variants.h"
#include "device/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const kvl_variant *row_of(kvl_operation operation, const char *name)
{
    int count = 0, i = 0;
    const kvl_variant *rows = kvl_variants(operation, &count);
    while (i < count && strcmp(rows[i].name, name) != 0)
        i++;
    assert_in_range(i, 0, count - 1);
    return &rows[i];
}

/* A device that takes this variant only. */
static kvleaf_device *device_for(const kvl_variant *variant, kvleaf_device_params *params)
{
    char name[64];
    kvleaf_device *device = NULL;
    snprintf(name, sizeof name, "%s.%s", variant->family, variant->name);
    params->variants = name;
    ASSERT_OK(support_create(params, &device));
    return device;
}

static kvl_geometry geometry_of(kvleaf_layout layout, kvleaf_dtype q, kvleaf_dtype kv, int32_t heads, int32_t kv_heads,
                                int32_t head_dim, int32_t block_size, int32_t window)
{
    return (kvl_geometry){.q_dtype = q,
                          .kv_dtype = kv,
                          .out_dtype = q,
                          .layout = layout,
                          .num_heads = heads,
                          .num_kv_heads = kv_heads,
                          .head_dim = head_dim,
                          .block_size = block_size,
                          .window = window};
}

static void test_right_kernels_pass(void **state)
{
    const struct {
        kvl_operation operation;
        const char *name;
        kvl_geometry geometry;
        float softcap;
    } cases[] = {
        {KVL_DECODE, "cpu", geometry_of(KVLEAF_LAYOUT_CPU16, KVLEAF_F16, KVLEAF_F16, 32, 8, 128, 16, 0), 0},
        {KVL_PREFILL, "cpu", geometry_of(KVLEAF_LAYOUT_CPU16, KVLEAF_BF16, KVLEAF_BF16, 4, 4, 80, 32, 4096), 8},
        {KVL_DECODE, "portable_fixed", geometry_of(KVLEAF_LAYOUT_SWIZZLE8, KVLEAF_BF16, KVLEAF_BF16, 16, 1, 80, 8, 50),
         0},
        {KVL_PREFILL, "portable_fixed", geometry_of(KVLEAF_LAYOUT_SWIZZLE8, KVLEAF_F32, KVLEAF_F16, 8, 2, 64, 256, 0),
         0},
        {KVL_DECODE, "cpu", geometry_of(KVLEAF_LAYOUT_STRIDED, KVLEAF_F16, KVLEAF_F32, 12, 2, 72, 5, 0), 0},
        {KVL_PREFILL, "cpu", geometry_of(KVLEAF_LAYOUT_STRIDED, KVLEAF_F32, KVLEAF_BF16, 6, 3, 64, 0, 0), 0},
        {KVL_DECODE, "cpu", geometry_of(KVLEAF_LAYOUT_STRIDED, KVLEAF_F16, KVLEAF_BF16, 2, 1, 64, 0, 70), 3},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_device_params params = support_params();
        const kvl_variant *variant = row_of(cases[i].operation, cases[i].name);
        kvleaf_device *device = device_for(variant, &params);
        kvl_geometry geometry = cases[i].geometry;
        geometry.softcap = cases[i].softcap;
        ASSERT_OK(kvl_trial_launch(device, variant, &geometry));
        kvleaf_device_destroy(&device);
    }
}

/* The embedded kernels in a folder, with one piece of one file replaced. */
static char *broken_kernels(const char *name, const char *piece, const char *instead)
{
    char *folder = support_folder();
    static const char *const folders[] = {"common", "cpu", "nvidia", "portable"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        char *path = support_path(folder, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
        free(path);
    }
    bool replaced = false;
    for (int i = 0; i < kvl_source_count; i++) {
        const kvl_source *source = &kvl_sources[i];
        char *path = support_path(folder, source->name);
        const char *at = strcmp(source->name, name) == 0 ? strstr(source->text, piece) : NULL;
        size_t before = at ? (size_t)(at - source->text) : source->size;
        char *text = calloc(source->size + strlen(instead) + 1, 1);
        assert_non_null(text);
        memcpy(text, source->text, before);
        if (at) {
            strcpy(text + before, instead);
            strcat(text, at + strlen(piece));
            replaced = true;
        }
        support_write(path, text, strlen(text));
        free(text);
        free(path);
    }
    assert_true(replaced);
    return folder;
}

static void test_wrong_kernels_are_seen(void **state)
{
    static const struct {
        kvl_operation operation;
        const char *file, *piece, *instead, *message;
    } cases[] = {
        {KVL_DECODE, "common/config.clh", "#define LN2 0.69", "#define LN2 0.66", "the LSE of row"},
        {KVL_DECODE, "common/plan.h", "#define ROW_FIRST ", "#define ROW_FIRST 0 * ", "of row"},
        {KVL_DECODE, "cpu/decode.cl", "append_new(&now, ", "if (0) append_new(&now, ", "is nan"},
        {KVL_PREFILL, "common/masks.clh", "max(position - entry[ENTRY_WINDOW] + 1, 0)",
         "max(position - entry[ENTRY_WINDOW] + 2, 0)", "of row"},
        {KVL_PREFILL, "common/masks.clh", "== 0 ? position : end", "== 0 ? position + 1 : end", "of row"},
        {KVL_PREFILL, "common/masks.clh", "(SOFTCAP * tanh_of((s) * (1.0f / SOFTCAP)))", "(s)", "of row"},
        {KVL_PREFILL, "common/config.clh", "#define LN2 0.69", "#define LN2 0.66", "the LSE of row"},
    };
    kvl_geometry geometry = geometry_of(KVLEAF_LAYOUT_CPU16, KVLEAF_F16, KVLEAF_F16, 2, 1, 64, 16, 60);
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        geometry.softcap = strstr(cases[i].piece, "SOFTCAP") ? 8 : 0;
        char *folder = broken_kernels(cases[i].file, cases[i].piece, cases[i].instead);
        kvleaf_device_params params = support_params();
        const kvl_variant *variant = row_of(cases[i].operation, "cpu");
        params.kernel_dir = folder;
        kvleaf_device *device = device_for(variant, &params);
        ASSERT_FAILS(KVLEAF_UNSUPPORTED, "trial", kvl_trial_launch(device, variant, &geometry));
        if (!strstr(kvleaf_last_error()->message, cases[i].message))
            fail_msg("case %zu: %s", i, kvleaf_last_error()->message);
        kvleaf_device_destroy(&device);
        support_folder_remove(folder);
    }
}

/* Answers for another variant are none for this one. */
static void test_another_variant_in_its_place(void **state)
{
    const kvl_geometry geometry = geometry_of(KVLEAF_LAYOUT_CPU16, KVLEAF_F16, KVLEAF_F16, 2, 1, 64, 16, 0);
    kvleaf_device_params params = support_params();
    kvleaf_device *device = device_for(row_of(KVL_DECODE, "cpu"), &params);
    (void)state;
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant",
                 kvl_trial_launch(device, row_of(KVL_DECODE, "portable_fixed"), &geometry));
    assert_non_null(strstr(kvleaf_last_error()->message, "decode.cpu"));
    kvleaf_device_destroy(&device);
}

/* What a call leaves alive; programs are the device's. */
static int64_t left_over(void)
{
    return shim_balance() - shim.programs;
}

static void test_each_call_and_allocation(void **state)
{
    static const kvl_operation operations[] = {KVL_DECODE, KVL_PREFILL};
    const kvl_geometry geometry = geometry_of(KVLEAF_LAYOUT_CPU16, KVLEAF_F16, KVLEAF_F16, 2, 1, 64, 16, 0);
    (void)state;
    for (int i = 0; i < 4; i++) {
        bool calls = i % 2 == 0;
        support_memory memory = {0};
        kvleaf_device_params params = support_params();
        const kvl_variant *variant = row_of(operations[i / 2], "cpu");
        shim_reset();
        params.opencl = shim_table();
        params.allocator = support_allocator(&memory);
        kvleaf_device *device = device_for(variant, &params);
        ASSERT_OK(kvl_trial_launch(device, variant, &geometry));
        int64_t objects = left_over();
        for (int64_t k = 1;; k++) {
            shim.calls = 0;
            shim.failed_entry = -1;
            shim.fail_at = calls ? k : 0;
            memory.allocations = 0;
            memory.fail_at = calls ? 0 : k;
            kvleaf_status status = kvl_trial_launch(device, variant, &geometry);
            bool failed = calls ? shim.failed_entry >= 0 : memory.allocations >= k;
            if (left_over() != objects)
                fail_msg("%lld, %s: something is left", (long long)k, shim_entry_name(shim.failed_entry));
            if (!failed) {
                assert_int_equal(status, KVLEAF_OK);
                assert_in_range(k, 10, 1000);
                break;
            }
            /* The waits of the end find nothing to do. */
            bool waited = shim.failed_entry == SHIM_Finish || shim.failed_entry == SHIM_WaitForEvents;
            bool command =
                shim.failed_entry == SHIM_EnqueueNDRangeKernel || shim.failed_entry == SHIM_EnqueueReadBuffer;
            bool object = shim.failed_entry == SHIM_CreateBuffer || shim.failed_entry == SHIM_CreateCommandQueue;
            assert_true(!command || status == KVLEAF_DEVICE);
            assert_true(!object || status == KVLEAF_UNSUPPORTED);
            if (status == KVLEAF_OK && !waited)
                fail_msg("call or allocation %lld, %s: passed", (long long)k, shim_entry_name(shim.failed_entry));
        }
        kvleaf_device_destroy(&device);
        assert_int_equal(memory.live, 0);
        assert_int_equal(shim_balance(), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_kernels_pass),
        cmocka_unit_test(test_wrong_kernels_are_seen),
        cmocka_unit_test(test_another_variant_in_its_place),
        cmocka_unit_test(test_each_call_and_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
