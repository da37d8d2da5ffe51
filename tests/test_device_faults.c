/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the device layer against a driver or an allocator that fails at any point: a clear status, no object left
 * over, outputs as they were, and the application's context with the references it had. */
#include "device_rig.h"

#include "device/variant.h"

#include <string.h>

static const kvl_variant variant = {
    .family = "decode", .name = "only", .file = "answer.cl", .kernels = {"answer"}, .work_group = 8};
static const kvl_geometry geometry = {.layout = KVLEAF_LAYOUT_ROWS, .num_heads = 1, .num_kv_heads = 1, .head_dim = 16};

static int setup(void **state)
{
    device_rig *f = device_rig_open(support_kernels(17), KVLEAF_LOG_WARNING);
    shim.platform_name = SHIM_OTHER_THAN_POCL;
    f->params.allocator = support_allocator(&f->memory);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    device_rig_close(*state);
    return 0;
}

/* Everything the layer does with a device, up to the first failure. */
static kvleaf_status use(kvleaf_device *device)
{
    const kvleaf_opencl *cl = shim_table();
    cl_command_queue queue = NULL;
    cl_mem buffer = NULL;
    cl_program program = NULL;
    cl_kernel kernel = NULL;
    kvl_chosen chosen = {0};
    kvleaf_status status = kvleaf_device_queue_create(device, &queue);
    kvleaf_exec exec = {.struct_size = sizeof exec, .queue = queue};
    if (status == KVLEAF_OK)
        status = kvl_check_exec(device, &exec);
    if (status == KVLEAF_OK)
        status = kvl_device_buffer(device, "out", 64, &buffer);
    if (status == KVLEAF_OK)
        status = kvl_device_program(device, "answer.cl", "-DX=1", &program);
    if (status == KVLEAF_OK)
        status = kvl_device_kernel(device, program, "answer", &kernel);
    if (status == KVLEAF_OK)
        status = kvl_kernel_args(device, kernel, (kvl_arg[]){KVL_ARG(buffer)}, 1);
    if (status == KVLEAF_OK)
        status = kvl_variant_choose(device, &variant, 1, &geometry, &chosen);
    assert_true((chosen.variant != NULL) == (status == KVLEAF_OK));
    if (kernel)
        cl->ReleaseKernel(kernel);
    if (buffer)
        cl->ReleaseMemObject(buffer);
    if (queue)
        cl->ReleaseCommandQueue(queue);
    return status;
}

static void assert_clear(kvleaf_status status, kvleaf_status by_code, const char *what)
{
    const kvleaf_error *error = kvleaf_last_error();
    if (status != KVLEAF_DEVICE && status != by_code && status != KVLEAF_UNSUPPORTED)
        fail_msg("%s failed: %s, %s", what, kvleaf_status_name(status), error->message);
    assert_int_equal(error->status, status);
    assert_true(strlen(error->message) > 10);
}

/* Makes call number k fail, for every k there is; returns how many of them the layer answered with an error. */
static int fail_each_call(device_rig *f, cl_int code, kvleaf_status by_code)
{
    int failures = 0;
    for (int64_t k = 1;; k++) {
        kvleaf_device *device = NULL;
        shim_reset();
        shim.platform_name = SHIM_OTHER_THAN_POCL;
        shim.fail_at = k;
        shim.error = code;
        kvleaf_status status = kvleaf_device_open(&f->params, &device);
        assert_true((device != NULL) == (status == KVLEAF_OK));
        if (status == KVLEAF_OK)
            status = use(device);
        if (status != KVLEAF_OK)
            assert_clear(status, by_code, shim_entry_name(shim.failed_entry));
        failures += status != KVLEAF_OK;
        kvleaf_device_destroy(&device);
        if (shim_balance() != 0)
            fail_msg("%lld objects are left after %s failed", (long long)shim_balance(),
                     shim_entry_name(shim.failed_entry));
        assert_int_equal(f->memory.live, 0);
        if (shim.failed_entry < 0) {
            assert_int_equal(status, KVLEAF_OK);
            return failures;
        }
        assert_in_range(k, 1, 1000);
    }
}

static void test_each_call(void **state)
{
    device_rig *f = *state;
    assert_in_range(fail_each_call(f, CL_OUT_OF_RESOURCES, KVLEAF_DEVICE), 20, 100);
}

static void test_each_call_out_of_memory(void **state)
{
    device_rig *f = *state;
    assert_in_range(fail_each_call(f, CL_OUT_OF_HOST_MEMORY, KVLEAF_NO_MEMORY), 20, 100);
}

/* With a disk cache, cold and warm: what fails about an entry only costs the entry. */
static void test_each_call_with_a_disk_cache(void **state)
{
    device_rig *f = *state;
    f->params.cache_dir = f->cache;
    assert_in_range(fail_each_call(f, CL_OUT_OF_RESOURCES, KVLEAF_DEVICE), 15, 100);
    assert_true(support_files(f->cache, ".bin", NULL) > 0);
}

static void test_create_leaves_the_context_as_it_was(void **state)
{
    device_rig *f = *state;
    kvleaf_device *owner = support_device();
    cl_context context = kvleaf_device_context(owner);
    cl_uint before = 0, after = 0;
    bool failed = true;
    f->params.context = context;
    f->params.device = kvleaf_device_id(owner);
    clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof before, &before, NULL);
    for (int64_t k = 1; failed; k++) {
        kvleaf_device *device = NULL;
        shim_reset();
        shim.fail_at = k;
        kvleaf_status status = kvleaf_device_create(&f->params, &device);
        failed = shim.failed_entry >= 0;
        assert_true((device != NULL) == (status == KVLEAF_OK));
        assert_true(status == KVLEAF_OK || (status == KVLEAF_DEVICE && kvleaf_last_error()->cl_error == shim.error));
        kvleaf_device_destroy(&device);
        assert_int_equal(shim_balance(), 0);
        clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof after, &after, NULL);
        assert_int_equal(after, before);
        assert_int_equal(f->memory.live, 0);
    }
    kvleaf_device_destroy(&owner);
}

static void test_each_allocation(void **state)
{
    device_rig *f = *state;
    int failures = 0;
    f->params.cache_dir = f->cache;
    f->params.variants = "decode.only";
    for (int64_t k = 1;; k++) {
        kvleaf_device *device = NULL;
        f->memory = (support_memory){.fail_at = k};
        kvleaf_status status = kvleaf_device_open(&f->params, &device);
        assert_true((device != NULL) == (status == KVLEAF_OK));
        if (status == KVLEAF_OK)
            status = use(device);
        /* A source that can't be held reads as one that isn't there. */
        if (status != KVLEAF_OK && status != KVLEAF_NO_MEMORY && status != KVLEAF_INVALID &&
            status != KVLEAF_UNSUPPORTED)
            fail_msg("allocation %lld: %s, %s", (long long)k, kvleaf_status_name(status), kvleaf_last_error()->message);
        failures += status != KVLEAF_OK;
        kvleaf_device_destroy(&device);
        assert_int_equal(f->memory.live, 0);
        assert_int_equal(shim_balance(), 0);
        if (f->memory.allocations < k) {
            assert_int_equal(status, KVLEAF_OK);
            break;
        }
        assert_in_range(k, 1, 1000);
    }
    assert_in_range(failures, 15, 200);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_each_call),
        TEST(test_each_call_out_of_memory),
        TEST(test_each_call_with_a_disk_cache),
        TEST(test_create_leaves_the_context_as_it_was),
        TEST(test_each_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
