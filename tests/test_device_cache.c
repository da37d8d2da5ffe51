/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the disk cache of program binaries: an entry serves exactly the program, device and driver it was made by,
 * bytes that are not whole never reach a driver, and a folder that can't be used costs a build and nothing else. */
#define _XOPEN_SOURCE 700
#include "device_rig.h"

#include "device/program.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char *self; /* argv[0], to run children */

static int setup(void **state)
{
    device_rig *f = device_rig_open(support_kernels(17), KVLEAF_LOG_WARNING);
    shim.platform_name = SHIM_OTHER_THAN_POCL;
    f->params.cache_dir = f->cache;
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    device_rig_close(*state);
    return 0;
}

/* Builds answer.cl on a new device, checks what it computes, and how it was come by. */
static void build(device_rig *f, const char *options, int answer, bool from_disk)
{
    kvleaf_device *device = NULL;
    cl_program program = NULL;
    int64_t sources = shim.calls_of[SHIM_CreateProgramWithSource];
    int64_t binaries = shim.calls_of[SHIM_CreateProgramWithBinary];
    f->lines = (support_lines){.count = 0};
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_OK(kvl_device_program(device, "answer.cl", options, &program));
    assert_int_equal(support_answer(device, program), answer);
    assert_int_equal(shim.calls_of[SHIM_CreateProgramWithSource] - sources, from_disk ? 0 : 1);
    assert_int_equal(shim.calls_of[SHIM_CreateProgramWithBinary] - binaries, from_disk ? 1 : 0);
    kvleaf_device_destroy(&device);
}

static char *only_entry(device_rig *f)
{
    char name[256];
    assert_int_equal(support_files(f->cache, "", name), 1);
    return support_path(f->cache, name);
}

static void test_second_device_finds_it(void **state)
{
    device_rig *f = *state;
    build(f, "", 17, false);
    build(f, "", 17, true);
    assert_int_equal(f->lines.count, 0);
    assert_int_equal(support_files(f->cache, ".bin", NULL), 1);
}

static void test_everything_that_matters_is_in_the_key(void **state)
{
    device_rig *f = *state;
    build(f, "", 17, false);
    build(f, "-DX=1", 17, false);
    support_kernels_edit(f->kernels, 18);
    build(f, "", 18, false);
    shim.driver_version = "99.1";
    build(f, "", 18, false);
    assert_int_equal(support_files(f->cache, ".bin", NULL), 4);
    build(f, "", 18, true);
    shim.driver_version = NULL;
    build(f, "", 18, true);
    support_kernels_edit(f->kernels, 17);
    build(f, "", 17, true);
    build(f, "-DX=1", 17, true);
}

/* Whatever happened to names, an entry of another driver is told by the key it repeats, and is replaced. */
static void test_entry_of_another_driver(void **state)
{
    device_rig *f = *state;
    size_t size = 0;
    build(f, "", 17, false);
    char *path = only_entry(f), *ours = support_slurp(path, &size);
    assert_int_equal(remove(path), 0);
    shim.driver_version = "99.1";
    build(f, "", 17, false);
    char *other = only_entry(f);
    assert_string_not_equal(other, path);
    support_write(other, ours, size);
    build(f, "", 17, false);
    assert_non_null(strstr(f->lines.text, "belongs to another"));
    build(f, "", 17, true);
    free(other);
    free(ours);
    free(path);
}

static void test_damaged_entries_are_built_again(void **state)
{
    device_rig *f = *state;
    size_t size = 0;
    build(f, "", 17, false);
    char *path = only_entry(f), *whole = support_slurp(path, &size), *data = malloc(size + 16);
    const size_t lengths[] = {0, 47, size - 1, size + 16};
    assert_non_null(data);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memset(data, 0, size + 16);
        memcpy(data, whole, size);
        support_write(path, data, lengths[i]);
        build(f, "", 17, false);
        assert_int_equal(f->lines.count, 1);
        build(f, "", 17, true);
    }
    const size_t places[] = {25, 60, size / 2, size - 1};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        memcpy(data, whole, size);
        data[places[i]] ^= 0x10;
        support_write(path, data, size);
        build(f, "", 17, false);
        assert_int_equal(f->lines.count, 1);
        build(f, "", 17, true);
    }
    free(data);
    free(whole);
    free(path);
}

/* Every cut and every flipped bit of a small entry, without a driver behind it. */
static void test_every_bit_counts(void **state)
{
    device_rig *f = *state;
    kvleaf_device device = {.cache_dir = f->cache};
    kvl_text key = {.data = (char *)"key", .size = 3};
    static const char binary[] = "some bytes of a driver";
    char *loaded = NULL;
    size_t size = 0, loaded_size = 0;
    assert_false(kvl_disk_load(&device, &key, &loaded, &loaded_size));
    kvl_disk_store(&device, &key, binary, sizeof binary);
    assert_true(kvl_disk_load(&device, &key, &loaded, &loaded_size));
    assert_int_equal(loaded_size, sizeof binary);
    assert_memory_equal(loaded, binary, sizeof binary);
    kvl_free(NULL, loaded);
    char *path = only_entry(f), *data = support_slurp(path, &size);
    for (size_t at = 0; at < size; at++) {
        support_write(path, data, at);
        assert_false(kvl_disk_load(&device, &key, &loaded, &loaded_size));
    }
    for (size_t bit = 0; bit < size * 8; bit++) {
        data[bit / 8] ^= (char)(1 << bit % 8);
        support_write(path, data, size);
        if (kvl_disk_load(&device, &key, &loaded, &loaded_size))
            fail_msg("an entry with bit %zu flipped was taken", bit);
        data[bit / 8] ^= (char)(1 << bit % 8);
    }
    support_write(path, data, size);
    assert_true(kvl_disk_load(&device, &key, &loaded, &loaded_size));
    kvl_free(NULL, loaded);
    free(data);
    free(path);
}

static void test_folder_that_cannot_be_used(void **state)
{
    device_rig *f = *state;
    for (int i = 0; device_rig_unusable(f, i); i++) {
        build(f, "", 17, false);
        bool written = i == 0 && support_files(f->cache, "", NULL) == 1;
        assert_true(written ? f->lines.count == 0 : strstr(f->lines.text, "can't be written") != NULL);
    }
}

static void test_full_disk(void **state)
{
    device_rig *f = *state;
    kvl_logger logger = {support_log, &f->lines, KVLEAF_LOG_WARNING};
    kvleaf_device device = {.cache_dir = f->cache, .logger = logger};
    kvl_text key = {.data = (char *)"key", .size = 3};
    char *binary = calloc(1, 1 << 20), *loaded = NULL;
    size_t size = 0;
    struct rlimit before, limit;
    assert_non_null(binary);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    kvl_disk_store(&device, &key, binary, 1 << 20);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(f->lines.count, 1);
    assert_false(kvl_disk_load(&device, &key, &loaded, &size));
    assert_int_equal(support_files(f->cache, "", NULL), 0);
    free(binary);
}

/* A driver that refuses its own binary, at either step: the source is there. */
static void test_driver_refuses_the_binary(void **state)
{
    static const int entries[] = {SHIM_CreateProgramWithBinary, SHIM_BuildProgram};
    device_rig *f = *state;
    build(f, "", 17, false);
    for (size_t i = 0; i < 2; i++) {
        kvleaf_device *device = NULL;
        cl_program program = NULL;
        shim.calls = 0;
        shim.fail_only = entries[i];
        shim.fail_at = 1;
        ASSERT_OK(support_create(&f->params, &device));
        ASSERT_OK(kvl_device_program(device, "answer.cl", "", &program));
        assert_int_equal(shim.failed_entry, entries[i]);
        assert_int_equal(support_answer(device, program), 17);
        kvleaf_device_destroy(&device);
        shim.fail_at = 0;
    }
    build(f, "", 17, true);
}

static void test_no_folder_no_file(void **state)
{
    device_rig *f = *state;
    f->params.cache_dir = NULL;
    build(f, "", 17, false);
    build(f, "", 17, false);
    assert_int_equal(support_files(f->cache, "", NULL), 0);
}

/* PoCL would compile all kernels for a binary: it is not asked for one. */
static void test_pocl_keeps_its_own(void **state)
{
    device_rig *f = *state;
    shim.platform_name = "Portable Computing Language";
    build(f, "", 17, false);
    build(f, "", 17, false);
    assert_int_equal(shim.calls_of[SHIM_GetProgramInfo], 0);
    assert_int_equal(support_files(f->cache, "", NULL), 0);
}

enum { PROCESSES = 8, PROGRAMS = 20 };

/* What a cold process does: PROGRAMS programs, with a driver that compiles nothing and gives `binary` for each, so that
 * the processes are in the folder all the time. With an empty one it is the real driver, and one program, which runs.
 */
static int child(const char *kernels, const char *cache, const char *binary)
{
    support_lines lines = {.count = 0};
    kvleaf_device_params params = support_params();
    kvleaf_device *device = NULL;
    cl_program program = NULL;
    shim_reset();
    shim.platform_name = SHIM_OTHER_THAN_POCL;
    if (*binary)
        shim.binary = support_slurp(binary, &shim.binary_size);
    params.opencl = shim_table();
    params.kernel_dir = kernels;
    params.cache_dir = cache;
    params.log = support_log;
    params.log_user = &lines;
    params.log_level = KVLEAF_LOG_WARNING;
    if (kvleaf_device_open(&params, &device) != KVLEAF_OK)
        return 1;
    for (int i = 1; i <= (shim.binary ? PROGRAMS : 1); i++) {
        char options[32];
        snprintf(options, sizeof options, "-DX=%d", i);
        if (kvl_device_program(device, "answer.cl", options, &program) != KVLEAF_OK)
            return 2;
    }
    int answer = shim.binary ? 17 : support_answer(device, program);
    kvleaf_device_destroy(&device);
    if (lines.count)
        fprintf(stderr, "%s", lines.text);
    return answer == 17 && lines.count == 0 && shim_balance() == 0 ? 0 : 3;
}

/* The driver's binary of answer.cl, in a file. */
static char *write_binary(device_rig *f)
{
    kvleaf_device *device = NULL;
    cl_program program = NULL;
    size_t size = 0;
    f->params.cache_dir = NULL;
    ASSERT_OK(support_create(&f->params, &device));
    ASSERT_OK(kvl_device_program(device, "answer.cl", "-DX=1", &program));
    assert_int_equal(clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, NULL), CL_SUCCESS);
    unsigned char *binary = malloc(size);
    assert_non_null(binary);
    assert_int_equal(clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL), CL_SUCCESS);
    char *path = support_path(f->kernels, "answer.bin");
    support_write(path, binary, size);
    free(binary);
    kvleaf_device_destroy(&device);
    f->params.cache_dir = f->cache;
    return path;
}

/* pocl #1480: whoever comes first, each finds whole entries or none, and one of each is left. */
static void test_eight_cold_processes(void **state)
{
    device_rig *f = *state;
    pid_t children[PROCESSES];
    char *binary = write_binary(f);
    for (int i = 0; i < PROCESSES; i++)
        children[i] = device_rig_start(f, self, i, i == 0 ? "" : binary);
    for (int i = 0; i < PROCESSES; i++)
        assert_int_equal(device_rig_end_of(children[i]), 0);
    assert_int_equal(support_files(f->cache, "", NULL), PROGRAMS);
    build(f, "-DX=1", 17, true);
    build(f, "-DX=20", 17, true);
    assert_int_equal(f->lines.count, 0);
    free(binary);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(test_second_device_finds_it),
        TEST(test_everything_that_matters_is_in_the_key),
        TEST(test_entry_of_another_driver),
        TEST(test_damaged_entries_are_built_again),
        TEST(test_every_bit_counts),
        TEST(test_folder_that_cannot_be_used),
        TEST(test_full_disk),
        TEST(test_driver_refuses_the_binary),
        TEST(test_no_folder_no_file),
        TEST(test_pocl_keeps_its_own),
        TEST(test_eight_cold_processes),
    };
    self = argv[0];
    if (argc > 3)
        return child(argv[1], argv[2], argv[3]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
