/* SPDX-License-Identifier: Apache-2.0 */
/* Protects how a device object comes to be: the device that is asked for or the best, the application's own context,
 * what was read off the device and capped, and a clear status where a driver is missing, broken or wrong. */
#define _XOPEN_SOURCE 700
#include "shim.h"
#include "support.h"

#include "device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *self; /* argv[0], to run children under another ICD folder */

static int setup(void **state)
{
    (void)state;
    shim_reset();
    return 0;
}

static kvleaf_device_params shimmed(void)
{
    kvleaf_device_params params = support_params();
    params.opencl = shim_table();
    return params;
}

static void test_dtypes(void **state)
{
    (void)state;
    assert_int_equal(kvleaf_dtype_size(KVLEAF_F16), 2);
    assert_int_equal(kvleaf_dtype_size(KVLEAF_BF16), 2);
    assert_int_equal(kvleaf_dtype_size(KVLEAF_F32), 4);
    assert_int_equal(kvleaf_dtype_size((kvleaf_dtype)77), 0);
    assert_string_equal(kvleaf_dtype_name(KVLEAF_F16), "f16");
    assert_string_equal(kvleaf_dtype_name(KVLEAF_BF16), "bf16");
    assert_string_equal(kvleaf_dtype_name(KVLEAF_F32), "f32");
    assert_string_equal(kvleaf_dtype_name((kvleaf_dtype)-1), "?");
}

static void test_open_takes_what_is_selected(void **state)
{
    static const char *const selects[] = {"Portable Computing Language", "portable computing", "PTHREAD"};
    (void)state;
    if (getenv("KVLEAF_TEST_DEVICE"))
        skip();
    for (size_t i = 0; i < sizeof selects / sizeof *selects; i++) {
        kvleaf_device_params params = support_params();
        kvleaf_device *device = NULL;
        kvleaf_caps caps = {.struct_size = sizeof caps};
        params.select = selects[i];
        ASSERT_OK(kvleaf_device_open(&params, &device));
        ASSERT_OK(kvleaf_device_query(device, &caps));
        assert_string_equal(caps.platform_name, "Portable Computing Language");
        assert_int_equal(caps.type & CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_CPU);
        assert_true(caps.max_work_group_size >= 64 && caps.local_bytes >= 32768 && caps.compute_units >= 1);
        assert_true(caps.max_alloc_bytes <= caps.global_bytes && caps.max_alloc_bytes > 1 << 20);
        assert_true(caps.opencl_c_major >= 1 && caps.float_vector_width >= 1);
        assert_true(*caps.device_name && *caps.driver_version && *caps.device_version);
        kvleaf_device_destroy(&device);
        assert_null(device);
    }
}

static void test_open_without_a_match_lists_what_there_is(void **state)
{
    kvleaf_device_params params = support_params();
    kvleaf_device *device = NULL;
    (void)state;
    params.select = "no such device";
    ASSERT_FAILS(KVLEAF_INVALID, "select", kvleaf_device_open(&params, &device));
    assert_non_null(strstr(kvleaf_last_error()->message, "no such device"));
    assert_non_null(strstr(kvleaf_last_error()->message, "Portable Computing Language"));
    assert_null(device);
}

static void test_no_platform_is_a_clear_status(void **state)
{
    kvleaf_device_params params = shimmed();
    kvleaf_device *device = NULL;
    (void)state;
    shim.no_platform = true;
    ASSERT_FAILS(KVLEAF_DEVICE, "select", kvleaf_device_open(&params, &device));
    assert_non_null(strstr(kvleaf_last_error()->message, "no OpenCL platform"));
    assert_null(device);
}

static void test_broken_platform_beside_a_good_one(void **state)
{
    support_lines lines = {.count = 0};
    kvleaf_device_params params = shimmed();
    kvleaf_device *device = NULL;
    (void)state;
    shim.broken_platform = true;
    params.log = support_log;
    params.log_user = &lines;
    params.log_level = KVLEAF_LOG_WARNING;
    ASSERT_OK(kvleaf_device_open(&params, &device));
    assert_non_null(strstr(lines.text, "passed over"));
    kvleaf_device_destroy(&device);
    assert_int_equal(shim_balance(), 0);
}

/* A device that is listed and can't be opened gives way to the next, and leaves no error behind. */
static void test_device_that_does_not_open(void **state)
{
    kvleaf_device_params params = shimmed();
    kvleaf_device *device = NULL;
    (void)state;
    shim.twin_device = true;
    shim.fail_only = SHIM_CreateContext;
    shim.fail_at = 1;
    kvl_fail(KVLEAF_STALE, "before", 1, 2, "an older failure");
    ASSERT_OK(kvleaf_device_open(&params, &device));
    assert_int_equal(shim.failed_entry, SHIM_CreateContext);
    assert_string_equal(kvleaf_last_error()->field, "before");
    kvleaf_device_destroy(&device);
    assert_int_equal(shim_balance(), 0);
    shim.twin_device = false;
    shim.calls = 0;
    ASSERT_FAILS(KVLEAF_DEVICE, "clCreateContext", kvleaf_device_open(&params, &device));
    assert_int_equal(kvleaf_last_error()->cl_error, CL_OUT_OF_RESOURCES);
    assert_null(device);
}

static void test_create_over_the_applications_context(void **state)
{
    kvleaf_device *opened = support_device(), *device = NULL;
    cl_uint before = 0, during = 0, after = 0;
    cl_context context = kvleaf_device_context(opened);
    (void)state;
    clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof before, &before, NULL);
    ASSERT_OK(
        kvleaf_device_create(kvleaf_device_params(.context = context, .device = kvleaf_device_id(opened)), &device));
    clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof during, &during, NULL);
    assert_true(during > before);
    assert_ptr_equal(kvleaf_device_context(device), context);
    assert_ptr_equal(kvleaf_device_id(device), kvleaf_device_id(opened));
    kvl_device_retain(device);
    kvleaf_device *kept = device;
    kvleaf_device_destroy(&device);
    assert_ptr_equal(kvleaf_device_context(kept), context);
    kvl_device_release(kept);
    clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof after, &after, NULL);
    assert_int_equal(after, before);
    kvleaf_device_destroy(&opened);
    kvleaf_device_destroy(&opened);
    kvleaf_device_destroy(NULL);
}

static void test_create_refuses_what_is_wrong(void **state)
{
    kvleaf_device *opened = support_device(), *device = NULL;
    cl_context context = kvleaf_device_context(opened);
    cl_device_id id = kvleaf_device_id(opened);
    kvleaf_opencl holed = *kvleaf_opencl_loader();
    support_memory memory = {0};
    kvleaf_allocator half = support_allocator(&memory);
    (void)state;
    holed.GetPlatformIDs = NULL;
    half.release = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_device_create(NULL, &device));
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_device_open(NULL, &device));
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size",
                 kvleaf_device_create(&(kvleaf_device_params){.context = context, .device = id}, &device));
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size",
                 kvleaf_device_open(&(kvleaf_device_params){.context = context}, &device));
    ASSERT_FAILS(KVLEAF_INVALID, "context", kvleaf_device_create(kvleaf_device_params(.device = id), &device));
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_device_create(kvleaf_device_params(.context = context), &device));
    ASSERT_FAILS(KVLEAF_INVALID, "out",
                 kvleaf_device_create(kvleaf_device_params(.context = context, .device = id), NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_device_open(kvleaf_device_params(.select = NULL), NULL));
    ASSERT_FAILS(
        KVLEAF_INVALID, "opencl",
        kvleaf_device_create(kvleaf_device_params(.context = context, .device = id, .opencl = &holed), &device));
    ASSERT_FAILS(KVLEAF_INVALID, "opencl", kvleaf_device_open(kvleaf_device_params(.opencl = &holed), &device));
    ASSERT_FAILS(
        KVLEAF_INVALID, "allocator",
        kvleaf_device_create(kvleaf_device_params(.context = context, .device = id, .allocator = half), &device));
    /* A handle that is some object's, but none of the context's devices. */
    ASSERT_FAILS(KVLEAF_INVALID, "device",
                 kvleaf_device_create(kvleaf_device_params(.context = context, .device = (cl_device_id)(void *)context),
                                      &device));
    assert_null(device);
    assert_int_equal(memory.allocations, 0);
    kvleaf_device_destroy(&opened);
}

static void test_caps_are_capped(void **state)
{
    kvleaf_device_params params = support_params();
    kvleaf_device *device = NULL;
    kvleaf_caps caps = {.struct_size = sizeof caps};
    (void)state;
    params.max_work_group_size = 32;
    params.max_local_bytes = 1000;
    params.max_alloc_bytes = 4096;
    ASSERT_OK(kvleaf_device_open(&params, &device));
    ASSERT_OK(kvleaf_device_query(device, &caps));
    assert_int_equal(caps.max_work_group_size, 32);
    assert_int_equal(caps.local_bytes, 1000);
    assert_int_equal(caps.max_alloc_bytes, 4096);
    kvleaf_device_destroy(&device);
    /* A cap above the device's own limit changes nothing. */
    params.max_work_group_size = UINT32_MAX;
    params.max_local_bytes = params.max_alloc_bytes = UINT64_MAX;
    ASSERT_OK(kvleaf_device_open(&params, &device));
    ASSERT_OK(kvleaf_device_query(device, &caps));
    assert_true(caps.max_work_group_size < 1 << 20 && caps.local_bytes < (uint64_t)1 << 40);
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_device_query(NULL, &caps));
    ASSERT_FAILS(KVLEAF_INVALID, "caps", kvleaf_device_query(device, NULL));
    caps.struct_size = 8;
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_device_query(device, &caps));
    assert_null(kvleaf_device_context(NULL));
    assert_null(kvleaf_device_id(NULL));
    kvleaf_device_destroy(&device);
}

static void test_extensions_are_read_as_words(void **state)
{
    static const struct {
        const char *list;
        bool fp16, subgroups;
    } cases[] = {
        {"cl_khr_byte_addressable_store", false, false},
        {"cl_khr_fp16", true, false},
        {"cl_khr_fp16x cl_intel_subgroups_short", false, false},
        {"xcl_khr_fp16 cl_khr_subgroups ", false, true},
        {"cl_khr_fp64 cl_khr_fp16 cl_intel_subgroups", true, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_device_params params = shimmed();
        kvleaf_device *device = NULL;
        kvleaf_caps caps = {.struct_size = sizeof caps};
        shim.extensions = cases[i].list;
        ASSERT_OK(kvleaf_device_open(&params, &device));
        ASSERT_OK(kvleaf_device_query(device, &caps));
        assert_int_equal(caps.has_fp16, cases[i].fp16);
        assert_int_equal(caps.has_subgroups, cases[i].subgroups);
        kvleaf_device_destroy(&device);
    }
}

static void test_buffers(void **state)
{
    kvleaf_device_params params = shimmed();
    kvleaf_device *device = NULL;
    cl_mem buffer = NULL;
    size_t size = 0;
    (void)state;
    shim.max_alloc = 4096;
    ASSERT_OK(kvleaf_device_open(&params, &device));
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "layer_bytes", kvl_device_buffer(device, "layer_bytes", 4097, &buffer));
    assert_int_equal(kvleaf_last_error()->value, 4097);
    assert_int_equal(kvleaf_last_error()->limit, 4096);
    assert_null(buffer);
    ASSERT_OK(kvl_device_buffer(device, "layer_bytes", 4096, &buffer));
    clReleaseMemObject(buffer);
    ASSERT_OK(kvl_device_buffer(device, "nothing", 0, &buffer));
    assert_int_equal(clGetMemObjectInfo(buffer, CL_MEM_SIZE, sizeof size, &size, NULL), CL_SUCCESS);
    assert_int_equal(size, 4);
    clReleaseMemObject(buffer);
    shim.fail_only = SHIM_CreateBuffer;
    shim.fail_at = shim.calls + 1;
    shim.error = CL_MEM_OBJECT_ALLOCATION_FAILURE;
    ASSERT_FAILS(KVLEAF_NO_MEMORY, "clCreateBuffer", kvl_device_buffer(device, "x", 64, &buffer));
    kvleaf_device_destroy(&device);
}

static void test_exec_is_checked(void **state)
{
    kvleaf_device *device = support_device(), *other = support_device();
    cl_command_queue queue = support_queue(device), foreign = support_queue(other);
    cl_event event = NULL;
    (void)state;
    assert_int_equal(clEnqueueMarkerWithWaitList(queue, 0, NULL, &event), CL_SUCCESS);
    kvleaf_exec exec = {.struct_size = sizeof exec, .queue = queue};
    ASSERT_OK(kvl_check_exec(device, &exec));
    exec.num_wait = 1;
    exec.wait_list = &event;
    ASSERT_OK(kvl_check_exec(device, &exec));
    exec.wait_list = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "wait_list", kvl_check_exec(device, &exec));
    exec.num_wait = 0;
    exec.wait_list = &event;
    ASSERT_FAILS(KVLEAF_INVALID, "num_wait", kvl_check_exec(device, &exec));
    exec.wait_list = NULL;
    exec.queue = foreign;
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvl_check_exec(device, &exec));
    exec.queue = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "queue", kvl_check_exec(device, &exec));
    exec.struct_size = 4;
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvl_check_exec(device, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvl_check_exec(device, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_device_queue_create(NULL, &queue));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_device_queue_create(device, NULL));
    clReleaseEvent(event);
    clReleaseCommandQueue(queue);
    clReleaseCommandQueue(foreign);
    kvleaf_device_destroy(&device);
    kvleaf_device_destroy(&other);
}

/* Runs this program as `role` with the ICD loader reading `vendors`; returns its exit code. */
static int run_child(const char *role, const char *vendors)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        setenv("OCL_ICD_VENDORS", vendors, 1);
        execl(self, self, role, (char *)NULL);
        _exit(99);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 98;
}

/* The loader itself, not the shim: an empty folder of drivers, and one with a driver that isn't there. */
static void test_real_loader(void **state)
{
    static const char missing[] = "/nonexistent/libno-such-driver.so.1\n";
    size_t size = 0;
    char *pocl = support_slurp("/etc/OpenCL/vendors/pocl.icd", &size);
    char *folder = support_folder(), *broken = support_path(folder, "a.icd"), *good = support_path(folder, "b.icd");
    (void)state;
    assert_int_equal(run_child("none", folder), 0);
    support_write(broken, missing, strlen(missing));
    assert_int_equal(run_child("none", folder), 0);
    support_write(good, pocl, size);
    assert_int_equal(run_child("good", folder), 0);
    free(pocl);
    free(good);
    free(broken);
    support_folder_remove(folder);
}

static int child(const char *role)
{
    kvleaf_device *device = NULL;
    kvleaf_status status = kvleaf_device_open(kvleaf_device_params(.select = NULL), &device);
    const char *message = kvleaf_last_error()->message;
    if (strcmp(role, "none") == 0)
        return status == KVLEAF_DEVICE && strstr(message, "no OpenCL platform") && !device ? 0 : 1;
    kvleaf_device_destroy(&device);
    return status == KVLEAF_OK ? 0 : 1;
}

#define TEST(name) cmocka_unit_test_setup(name, setup)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(test_dtypes),
        TEST(test_open_takes_what_is_selected),
        TEST(test_open_without_a_match_lists_what_there_is),
        TEST(test_no_platform_is_a_clear_status),
        TEST(test_broken_platform_beside_a_good_one),
        TEST(test_device_that_does_not_open),
        TEST(test_create_over_the_applications_context),
        TEST(test_create_refuses_what_is_wrong),
        TEST(test_caps_are_capped),
        TEST(test_extensions_are_read_as_words),
        TEST(test_buffers),
        TEST(test_exec_is_checked),
        TEST(test_real_loader),
    };
    self = argv[0];
    if (argc > 1)
        return child(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
