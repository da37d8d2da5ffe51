/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the trials of variants that rely on what no document promises: they run in a context of their own, once for
 * a program, device and driver; what fails there passes the variant over, and a trial that ended the process or failed
 * on the device is not run again, while the end of a process at any other time means nothing. */
#define _XOPEN_SOURCE 700
#include "device_rig.h"

#include "device/program.h"
#include "device/variant.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *self; /* argv[0], to run children */

typedef enum probe_end { PROBE_PASSES, PROBE_FAILS, PROBE_FAULTS, PROBE_ENDS_PROCESS, PROBE_LASTS } probe_end;

/* What the trial does and has seen. */
static struct {
    probe_end end;
    int launches, marks;
    const char *cache;
    cl_context application, own;
} probe;

/* As after a kernel that the device stopped. */
static kvleaf_status wait_in_vain(kvleaf_device *device)
{
    cl_command_queue queue = NULL;
    ASSERT_OK(kvleaf_device_queue_create(device, &queue));
    shim.calls = 0;
    shim.fail_only = SHIM_Finish;
    shim.fail_at = 1;
    cl_int error = device->cl->Finish(queue);
    shim.fail_at = 0;
    device->cl->ReleaseCommandQueue(queue);
    return kvl_fail_opencl("clFinish", error);
}

static kvleaf_status probe_trial(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry)
{
    kvl_chosen chosen;
    probe.launches++;
    probe.marks += probe.cache ? support_files(probe.cache, ".trial", NULL) : 0;
    probe.own = device->context;
    if (probe.end == PROBE_ENDS_PROCESS)
        _exit(7);
    if (probe.end == PROBE_LASTS)
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    if (probe.end == PROBE_FAILS)
        return kvl_fail(KVLEAF_UNSUPPORTED, "trial", 3, 0, "row 3 is wrong");
    if (probe.end == PROBE_FAULTS)
        return wait_in_vain(device);
    assert_string_equal(device->variants, "decode.edited");
    kvleaf_status status = kvl_variant_try(device, variant, geometry, &chosen); /* without a trial */
    if (!status)
        assert_int_equal(support_answer(device, chosen.program), 64);
    return status;
}

static const char good[] = "__kernel void answer(__global int *out)\n{\n    out[0] = WORK_GROUP;\n}\n";
static const char other[] = "__kernel void answer(__global int *out)\n{\n    out[0] = 0 + WORK_GROUP;\n}\n";

#define ROW(row_name, ...)                                                                                             \
    {                                                                                                                  \
        .family = "decode", .name = row_name, .file = "good.cl", .kernels = {"answer"}, .work_group = 64, __VA_ARGS__  \
    }

static const kvl_variant table[] = {ROW("plain", .persistent = false),
                                    ROW("edited", .options = "-DMORE=1", .undocumented = true, .trial = probe_trial)};

static const kvl_geometry usual = {.kv_dtype = KVLEAF_F16,
                                   .layout = KVLEAF_LAYOUT_ROWS,
                                   .num_heads = 8,
                                   .num_kv_heads = 2,
                                   .head_dim = 128,
                                   .block_size = 16};

static int setup(void **state)
{
    device_rig *f = device_rig_open(support_folder(), KVLEAF_LOG_WARNING);
    memset(&probe, 0, sizeof probe);
    device_rig_write(f, "good.cl", good);
    f->params.cache_dir = f->cache;
    probe.cache = f->cache;
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    device_rig *f = *state;
    assert_int_equal(support_files(f->cache, ".trial", NULL), 0);
    device_rig_close(f);
    return 0;
}

/* Chooses with a device object; the program works, and neither the error before nor any object is lost. */
static void choose_with(kvleaf_device *device, const char *name)
{
    kvl_chosen chosen = {0};
    int64_t contexts = shim.contexts, queues = shim.queues;
    kvl_fail(KVLEAF_STALE, "before", 1, 2, "an older failure");
    ASSERT_OK(kvl_variant_choose(device, table, 2, &usual, &chosen));
    assert_string_equal(kvleaf_last_error()->field, "before");
    if (strcmp(chosen.variant->name, name) != 0)
        fail_msg("took %s, expected %s", chosen.variant->name, name);
    assert_int_equal(support_answer(device, chosen.program), 64);
    assert_int_equal(shim.contexts, contexts);
    assert_int_equal(shim.queues, queues);
}

/* The same with a new one, which makes so many launches. */
static void choose(device_rig *f, const char *name, int launches)
{
    kvleaf_device *device = NULL;
    f->lines = (support_lines){.count = 0};
    probe.launches = probe.marks = 0;
    ASSERT_OK(support_create(&f->params, &device));
    choose_with(device, name);
    assert_int_equal(probe.launches, launches);
    kvleaf_device_destroy(&device);
}

static void assert_logged(const device_rig *f, const char *text)
{
    if (!strstr(f->lines.text, text))
        fail_msg("the log does not say \"%s\":\n%s", text, f->lines.text);
}

/* Without a folder: once for a device object, in another context, and again where the program is another. */
static void test_runs_apart_and_once(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    f->params.cache_dir = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    for (int i = 0; i < 3; i++)
        choose_with(device, "edited");
    assert_int_equal(probe.launches, 1);
    assert_non_null(probe.own);
    assert_ptr_not_equal(probe.own, kvleaf_device_context(device));
    device_rig_write(f, "good.cl", other);
    choose_with(device, "edited");
    choose_with(device, "edited");
    assert_int_equal(probe.launches, 2);
    kvleaf_device_destroy(&device);
    choose(f, "edited", 1);
    assert_int_equal(support_files(f->cache, "", NULL), 0);
}

static void test_wrong_results_pass_it_over(void **state)
{
    device_rig *f = *state;
    kvleaf_device *device = NULL;
    kvl_chosen chosen;
    probe.end = PROBE_FAILS;
    ASSERT_OK(support_create(&f->params, &device));
    choose_with(device, "plain");
    assert_logged(f, "decode.edited.q_f16.kv_f16.d128.b16 is passed over: trial launch: row 3 is wrong");
    choose_with(device, "plain");
    assert_int_equal(f->lines.count, 1);
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant", kvl_variant_try(device, &table[1], &usual, &chosen));
    assert_int_equal(probe.launches, 1);
    kvleaf_device_destroy(&device);
    assert_int_equal(support_files(f->cache, "", NULL), 0); /* another start may find it right */
    choose(f, "plain", 1);
    probe.end = PROBE_PASSES;
    choose(f, "edited", 1);
}

/* Nobody knows what else such a failure took along: later starts leave the variant alone, at once. */
static void test_fault_on_the_device_stays_marked(void **state)
{
    device_rig *f = *state;
    char name[256];
    probe.end = PROBE_FAULTS;
    choose(f, "plain", 1);
    assert_int_equal(support_files(f->cache, ".trial", name), 1);
    assert_int_equal(support_files(f->cache, "", NULL), 1);
    char *path = support_path(f->cache, name);
    assert_logged(f, "is passed over: trial launch: clFinish failed with OpenCL error -5");
    assert_logged(f, path);
    int64_t contexts = shim.calls_of[SHIM_CreateContext];
    choose(f, "plain", 0);
    assert_logged(f, path);
    assert_int_equal(shim.calls_of[SHIM_CreateContext], contexts);
    kvl_file_remove(path);
    free(path);
    probe.end = PROBE_PASSES;
    choose(f, "edited", 1);
    probe.end = PROBE_FAULTS; /* without a folder it is known as long as the device object lives */
    f->params.cache_dir = NULL;
    choose(f, "plain", 1);
}

/* Each call of the trial that can fail, by either kind of error: the next variant serves, or this one does. */
static void test_each_call_of_the_trial(void **state)
{
    static const cl_int errors[] = {CL_OUT_OF_RESOURCES, CL_OUT_OF_HOST_MEMORY};
    device_rig *f = *state;
    f->params.cache_dir = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        int passed_over = 0;
        bool contexts = false;
        for (int64_t k = 1;; k++) {
            kvleaf_device *device = NULL;
            kvl_chosen chosen = {0};
            shim_reset();
            ASSERT_OK(support_create(&f->params, &device));
            probe.launches = 0;
            shim.calls = 0;
            shim.fail_at = k;
            shim.error = errors[i];
            kvleaf_status status = kvl_trial_pass(device, &table[1], &usual);
            int failed = shim.failed_entry;
            shim.fail_at = 0;
            assert_true(status == KVLEAF_OK || status == KVLEAF_UNSUPPORTED);
            ASSERT_OK(kvl_variant_choose(device, table, 2, &usual, &chosen));
            assert_string_equal(chosen.variant->name, status ? "plain" : "edited");
            passed_over += status != KVLEAF_OK;
            contexts = contexts || (status && failed == SHIM_CreateContext);
            kvleaf_device_destroy(&device);
            assert_int_equal(shim_balance(), 0);
            if (failed < 0)
                break;
        }
        assert_in_range(passed_over, 10, 100);
        assert_true(contexts);
    }
}

static void test_each_allocation_of_the_trial(void **state)
{
    device_rig *f = *state;
    support_memory memory = {0};
    int failures = 0;
    f->params.allocator = support_allocator(&memory);
    for (int64_t k = 1;; k++) {
        char name[256];
        kvleaf_device *device = NULL;
        kvl_chosen chosen = {0};
        ASSERT_OK(support_create(&f->params, &device));
        memory.allocations = 0;
        memory.fail_at = k;
        kvleaf_status status = kvl_trial_pass(device, &table[1], &usual);
        bool over = memory.allocations < k;
        memory.fail_at = 0;
        /* A source that can't be held reads as one that isn't there. */
        assert_true(status == KVLEAF_OK || status == KVLEAF_NO_MEMORY || status == KVLEAF_UNSUPPORTED ||
                    status == KVLEAF_INVALID);
        assert_int_equal(support_files(f->cache, ".trial", NULL), 0);
        failures += status != KVLEAF_OK;
        ASSERT_OK(kvl_variant_choose(device, table, 2, &usual, &chosen));
        kvleaf_device_destroy(&device);
        assert_int_equal(memory.live, 0);
        if (support_files(f->cache, ".bin", name) == 1) {
            char *path = support_path(f->cache, name);
            assert_int_equal(remove(path), 0);
            free(path);
        }
        if (over)
            break;
    }
    assert_in_range(failures, 15, 200);
}

/* A second start finds the record: no mark, no other context, no launch. */
static void test_passed_is_recorded(void **state)
{
    device_rig *f = *state;
    choose(f, "edited", 1);
    assert_int_equal(probe.marks, 1);
    assert_int_equal(support_files(f->cache, ".bin", NULL), 1);
    assert_int_equal(support_files(f->cache, "", NULL), 1);
    int64_t contexts = shim.calls_of[SHIM_CreateContext];
    assert_true(contexts > 0);
    choose(f, "edited", 0);
    assert_int_equal(shim.calls_of[SHIM_CreateContext], contexts);
    shim.driver_version = "99.1";
    choose(f, "edited", 1);
    choose(f, "edited", 0);
    device_rig_write(f, "good.cl", other);
    choose(f, "edited", 1);
    shim.driver_version = NULL;
    choose(f, "edited", 1);
    device_rig_write(f, "good.cl", good);
    choose(f, "edited", 0);
    f->params.max_work_group_size = 63;
    kvleaf_device *device = NULL;
    kvl_chosen chosen;
    ASSERT_OK(support_create(&f->params, &device));
    probe.end = PROBE_FAILS; /* it would answer another work-group */
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "variant", kvl_variant_try(device, &table[1], &usual, &chosen));
    kvleaf_device_destroy(&device);
}

/* A record that is damaged, or another driver's under this name, says nothing. */
static void test_records_that_are_none(void **state)
{
    device_rig *f = *state;
    char name[256];
    size_t size = 0;
    choose(f, "edited", 1);
    assert_int_equal(support_files(f->cache, ".bin", name), 1);
    char *path = support_path(f->cache, name), *whole = support_slurp(path, &size);
    const size_t lengths[] = {0, 20, size - 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        support_write(path, whole, lengths[i]);
        choose(f, "edited", 1);
        assert_logged(f, "it is made again");
        choose(f, "edited", 0);
    }
    for (size_t at = 0; at < size; at += size / 5) {
        whole[at] ^= 0x20;
        support_write(path, whole, size);
        whole[at] ^= 0x20;
        choose(f, "edited", 1);
        choose(f, "edited", 0);
    }
    assert_int_equal(remove(path), 0);
    shim.driver_version = "99.1";
    choose(f, "edited", 1);
    assert_int_equal(support_files(f->cache, ".bin", name), 1);
    char *others = support_path(f->cache, name);
    assert_string_not_equal(others, path);
    support_write(others, whole, size);
    choose(f, "edited", 1);
    assert_logged(f, "belongs to another");
    free(others);
    free(whole);
    free(path);
}

static void test_folder_that_cannot_be_used(void **state)
{
    device_rig *f = *state;
    for (int i = 0; device_rig_unusable(f, i); i++) {
        choose(f, "edited", 1);
        bool written = i == 0 && support_files(f->cache, "", NULL) == 1;
        choose(f, "edited", written ? 0 : 1);
    }
}

enum { DURING, LATER, TOGETHER, PROCESSES = 4 };

/* A process that chooses, and ends in a way of its own. */
static int child(const char *kernels, const char *cache, int how)
{
    kvleaf_device_params params = support_params();
    kvleaf_device *device = NULL;
    kvl_chosen chosen;
    params.kernel_dir = kernels;
    params.cache_dir = cache;
    probe.end = how == DURING ? PROBE_ENDS_PROCESS : how == TOGETHER ? PROBE_LASTS : PROBE_PASSES;
    if (kvleaf_device_open(&params, &device) || kvl_variant_choose(device, table, 2, &usual, &chosen))
        return 1;
    bool edited = strcmp(chosen.variant->name, "edited") == 0;
    if (how == LATER)
        kill(getpid(), SIGKILL);
    kvleaf_device_destroy(&device);
    return edited ? 0 : 2;
}

static pid_t start(const device_rig *f, int how, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", how);
    return device_rig_start(f, self, number, text);
}

static void test_process_that_ended(void **state)
{
    device_rig *f = *state;
    char name[256];
    int status = device_rig_end_of(start(f, DURING, 0));
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 7);
    assert_int_equal(support_files(f->cache, ".trial", name), 1);
    char *path = support_path(f->cache, name);
    for (int i = 0; i < 2; i++) {
        choose(f, "plain", 0);
        assert_logged(f, path);
    }
    kvl_file_remove(path);
    status = device_rig_end_of(start(f, LATER, 0));
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
    choose(f, "edited", 0);
    free(path);
}

/* A trial that goes on elsewhere is no reason to pass the variant over. */
static void test_processes_at_once(void **state)
{
    device_rig *f = *state;
    pid_t processes[PROCESSES];
    for (int i = 0; i < PROCESSES; i++)
        processes[i] = start(f, TOGETHER, i);
    for (int i = 0; i < PROCESSES; i++)
        assert_int_equal(device_rig_end_of(processes[i]), 0);
    assert_int_equal(support_files(f->cache, "", NULL), 1);
    choose(f, "edited", 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(test_runs_apart_and_once),
        TEST(test_wrong_results_pass_it_over),
        TEST(test_fault_on_the_device_stays_marked),
        TEST(test_each_call_of_the_trial),
        TEST(test_each_allocation_of_the_trial),
        TEST(test_passed_is_recorded),
        TEST(test_records_that_are_none),
        TEST(test_folder_that_cannot_be_used),
        TEST(test_process_that_ended),
        TEST(test_processes_at_once),
    };
    self = argv[0];
    if (argc > 3)
        return child(argv[1], argv[2], atoi(argv[3]));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
