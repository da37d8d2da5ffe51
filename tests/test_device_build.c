/* SPDX-License-Identifier: Apache-2.0 */
/* Protects programs in memory: each is built once however many ask at once, an edited source is built again, a failed
 * build says where, and nothing stays behind when the device goes. */
#define _XOPEN_SOURCE 700
#include "device_rig.h"

#include "device/device.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static int setup(void **state)
{
    *state = device_rig_open(support_kernels(17), KVLEAF_LOG_DEBUG);
    return 0;
}

static int teardown(void **state)
{
    device_rig_close(*state);
    return 0;
}

static void test_built_once(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    cl_program first = NULL, again = NULL, other = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "-DX=1", &first));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "-DX=1", &again));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "-DX=2", &other));
    assert_ptr_equal(first, again);
    assert_ptr_not_equal(first, other);
    assert_int_equal(shim.calls_of[SHIM_BuildProgram], 2);
    ASSERT_OK(kvl_device_program(device, "answer.cl", NULL, &first));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "", &again));
    assert_ptr_equal(first, again);
    assert_int_equal(support_answer(device, first), 17);
    kvleaf_device_destroy(&device);
}

/* Edit and rerun: the folder is read at each build, and a program already handed out stays what it was. */
static void test_edited_source_is_built_again(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    cl_program before = NULL, after = NULL, back = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "", &before));
    support_kernels_edit(f->kernels, 18);
    ASSERT_OK(kvl_device_program(device, "answer.cl", "", &after));
    assert_int_equal(support_answer(device, before), 17);
    assert_int_equal(support_answer(device, after), 18);
    support_kernels_edit(f->kernels, 17);
    ASSERT_OK(kvl_device_program(device, "answer.cl", "", &back));
    assert_ptr_equal(back, before);
    kvleaf_device_destroy(&device);
}

static void test_failed_build_says_where(void **state)
{
    static const char bad[] = "#include \"common/answer.clh\"\n__kernel void answer(__global int *out)\n{\n"
                              "    out[0] = ANSWER + no_such_name;\n}\n";
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    cl_program program = NULL;
    device_rig_write(f, "bad.cl", bad);
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_STATUS(KVLEAF_DEVICE, kvl_device_program(device, "bad.cl", "-DX=1", &program));
    const kvleaf_error *error = kvleaf_last_error();
    assert_int_equal(error->cl_error, CL_BUILD_PROGRAM_FAILURE);
    assert_non_null(strstr(error->message, "cl_kernels/bad.cl"));
    assert_non_null(strstr(error->build_log, "no_such_name"));
    assert_non_null(strstr(error->build_log, "cl_kernels/bad.cl:4"));
    assert_non_null(strstr(f->lines.text, "cl_kernels/bad.cl:4:     out[0] = ANSWER + no_such_name;"));
    assert_non_null(strstr(f->lines.text, "cl_kernels/common/answer.clh:1: #define ANSWER 17"));
    assert_non_null(strstr(f->lines.text, "-DX=1"));
    assert_null(program);
    /* The same file, mended. */
    char mended[sizeof bad];
    snprintf(mended, sizeof mended, "%s", bad);
    memset(strstr(mended, "+ no_such_name"), ' ', strlen("+ no_such_name"));
    device_rig_write(f, "bad.cl", mended);
    ASSERT_OK(kvl_device_program(device, "bad.cl", "-DX=1", &program));
    assert_int_equal(support_answer(device, program), 17);
    kvleaf_device_destroy(&device);
}

static void test_missing_kernel(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    cl_program program = NULL;
    cl_kernel kernel = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_FAILS(KVLEAF_INVALID, "kernel_dir", kvl_device_program(device, "none.cl", "", &program));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "", &program));
    ASSERT_FAILS(KVLEAF_DEVICE, "clCreateKernel", kvl_device_kernel(device, program, "no_such_kernel", &kernel));
    assert_null(kernel);
    ASSERT_OK(kvl_device_kernel(device, program, "answer", &kernel));
    cl_mem buffer = NULL;
    ASSERT_OK(kvl_device_buffer(device, "out", 4, &buffer));
    int wrong = 0;
    ASSERT_OK(kvl_kernel_args(device, kernel, (kvl_arg[]){KVL_ARG(buffer)}, 1));
    ASSERT_FAILS(KVLEAF_DEVICE, "clSetKernelArg",
                 kvl_kernel_args(device, kernel, (kvl_arg[]){KVL_ARG(buffer), KVL_ARG(wrong)}, 2));
    shim_table()->ReleaseKernel(kernel);
    shim_table()->ReleaseMemObject(buffer);
    kvleaf_device_destroy(&device);
}

enum { THREADS = 8, PROGRAMS = 3 };

typedef struct worker {
    kvleaf_device *device;
    pthread_barrier_t *start;
    cl_program programs[PROGRAMS];
    int failures;
} worker;

static void *work(void *argument)
{
    worker *w = argument;
    kvl_device_retain(w->device);
    pthread_barrier_wait(w->start);
    for (int i = 0; i < PROGRAMS; i++) {
        char options[32];
        cl_kernel kernel = NULL;
        snprintf(options, sizeof options, "-DX=%d", i + 1);
        if (kvl_device_program(w->device, "answer.cl", options, &w->programs[i]) != KVLEAF_OK ||
            kvl_device_kernel(w->device, w->programs[i], "answer", &kernel) != KVLEAF_OK)
            w->failures++;
        else
            shim_table()->ReleaseKernel(kernel);
    }
    kvl_device_release(w->device);
    return NULL;
}

static void test_eight_threads_at_first_use(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    pthread_barrier_t start;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    f->params.log = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.device = device, .start = &start};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start);
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(workers[i].failures, 0);
        assert_memory_equal(workers[i].programs, workers[0].programs, sizeof workers[0].programs);
    }
    assert_int_equal(shim.calls_of[SHIM_BuildProgram], PROGRAMS);
    assert_int_equal(device->references, 1);
    for (int i = 0; i < PROGRAMS; i++)
        assert_int_equal(support_answer(device, workers[0].programs[i]), 17);
    kvleaf_device_destroy(&device);
}

/* The device's last holder may be another thread; references are counted right under contention. */
static void *hold(void *argument)
{
    kvleaf_device *device = argument;
    for (int i = 0; i < 20000; i++) {
        kvl_device_retain(device);
        kvl_device_release(device);
    }
    kvl_device_release(device);
    return NULL;
}

static void test_references_between_threads(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    pthread_t threads[THREADS];
    ASSERT_OK(kvleaf_device_open(&f->params, &device));
    for (int i = 0; i < THREADS; i++)
        kvl_device_retain(device);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, hold, device), 0);
    kvleaf_device_destroy(&device);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(shim_balance(), 0);
}

/* Contexts that come and go leave neither memory nor a program of the one before. */
static void test_fifty_contexts(void **state)
{
    enum { WARM = 10, ROUNDS = 50, PAGES = 4 << 20 };
    device_rig *f = *state;
    uint64_t resident = 0;
    support_memory memory = {0};
    f->params.log = NULL;
    f->params.allocator = support_allocator(&memory);
    for (int i = 0; i < ROUNDS; i++) {
        kvleaf_device *device = NULL;
        cl_program program = NULL;
        cl_context context = NULL;
        support_kernels_edit(f->kernels, 17 + i % 2);
        ASSERT_OK(kvleaf_device_open(&f->params, &device));
        ASSERT_OK(kvl_device_program(device, "answer.cl", "", &program));
        assert_int_equal(clGetProgramInfo(program, CL_PROGRAM_CONTEXT, sizeof context, &context, NULL), CL_SUCCESS);
        assert_ptr_equal(context, kvleaf_device_context(device));
        assert_int_equal(support_answer(device, program), 17 + i % 2);
        kvleaf_device_destroy(&device);
        assert_int_equal(memory.live, 0);
        assert_int_equal(shim_balance(), 0);
        if (i == WARM)
            resident = support_resident();
    }
    if (resident && support_resident() > resident + PAGES)
        fail_msg("resident memory grew from %llu to %llu bytes in %d contexts", (unsigned long long)resident,
                 (unsigned long long)support_resident(), ROUNDS - WARM);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_built_once),     TEST(test_edited_source_is_built_again), TEST(test_failed_build_says_where),
        TEST(test_missing_kernel), TEST(test_eight_threads_at_first_use),   TEST(test_references_between_threads),
        TEST(test_fifty_contexts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
