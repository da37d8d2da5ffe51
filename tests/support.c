/* SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include "support.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GUARD = 256, GUARD_BYTE = 0xc5, FILL_BYTE = 0x7f };

void support_assert(kvleaf_status expected, kvleaf_status actual, const char *call, const char *file, int line)
{
    if (actual == expected)
        return;
    print_error("%s gave %s, expected %s\n", call, kvleaf_status_name(actual), kvleaf_status_name(expected));
    if (actual != KVLEAF_OK)
        print_error("%s\n%s\n", kvleaf_last_error()->message, kvleaf_last_error()->build_log);
    _fail(file, line);
}

void support_assert_field(const char *field, const char *file, int line)
{
    const kvleaf_error *error = kvleaf_last_error();
    if (strcmp(error->field, field) == 0 && *error->message)
        return;
    print_error("the last error names \"%s\" (%s), expected \"%s\"\n", error->field, error->message, field);
    _fail(file, line);
}

kvleaf_device_params support_params(void)
{
    const char *select = getenv("KVLEAF_TEST_DEVICE");
    return (kvleaf_device_params){.struct_size = sizeof(kvleaf_device_params),
                                  .select = select && *select ? select : "Portable Computing Language"};
}

kvleaf_device *support_device(void)
{
    kvleaf_device_params params = support_params();
    kvleaf_device *device = NULL;
    ASSERT_OK(kvleaf_device_open(&params, &device));
    return device;
}

kvleaf_device *support_shared(void)
{
    static kvleaf_device *shared;
    if (!shared)
        shared = support_device();
    return shared;
}

kvleaf_status support_create(const kvleaf_device_params *params, kvleaf_device **out)
{
    kvleaf_device_params own = *params;
    own.context = kvleaf_device_context(support_shared());
    own.device = kvleaf_device_id(support_shared());
    return kvleaf_device_create(&own, out);
}

cl_command_queue support_queue(kvleaf_device *device)
{
    cl_command_queue queue = NULL;
    ASSERT_OK(kvleaf_device_queue_create(device, &queue));
    return queue;
}

uint64_t support_seed(uint64_t fallback)
{
    const char *given = getenv("KVLEAF_TEST_SEED");
    uint64_t seed = given && *given ? strtoull(given, NULL, 0) : fallback;
    print_message("KVLEAF_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

uint64_t support_next(support_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int32_t support_range(support_rng *rng, int32_t low, int32_t high)
{
    uint64_t count = (uint64_t)((int64_t)high - low) + 1;
    return (int32_t)(low + (int64_t)(support_next(rng) % count));
}

float support_float(support_rng *rng)
{
    return (float)((double)(support_next(rng) >> 11) / 4503599627370496.0 - 1.0);
}

void *support_guarded(size_t size)
{
    unsigned char *base = malloc(size + 2 * GUARD);
    assert_non_null(base);
    memset(base, GUARD_BYTE, size + 2 * GUARD);
    memcpy(base, &size, sizeof size);
    memset(base + GUARD, FILL_BYTE, size);
    return base + GUARD;
}

void support_guarded_check(const void *memory)
{
    const unsigned char *base = (const unsigned char *)memory - GUARD;
    size_t size;
    memcpy(&size, base, sizeof size);
    for (size_t i = sizeof size; i < GUARD; i++) {
        if (base[i] != GUARD_BYTE)
            fail_msg("byte %zu before the memory was written", GUARD - i);
    }
    for (size_t i = 0; i < GUARD; i++) {
        if (base[GUARD + size + i] != GUARD_BYTE)
            fail_msg("byte %zu behind the memory was written", i);
    }
}

void support_guarded_free(void *memory)
{
    if (!memory)
        return;
    support_guarded_check(memory);
    free((unsigned char *)memory - GUARD);
}

cl_mem support_buffer(kvleaf_device *device, cl_command_queue queue, size_t size, uint8_t poison)
{
    cl_int error = CL_SUCCESS;
    cl_mem buffer = clCreateBuffer(kvleaf_device_context(device), CL_MEM_READ_WRITE, size, NULL, &error);
    assert_int_equal(error, CL_SUCCESS);
    assert_int_equal(clEnqueueFillBuffer(queue, buffer, &poison, 1, 0, size, 0, NULL, NULL), CL_SUCCESS);
    assert_int_equal(clFinish(queue), CL_SUCCESS);
    return buffer;
}

uint8_t *support_read(cl_command_queue queue, cl_mem buffer, size_t size)
{
    uint8_t *bytes = malloc(size ? size : 1);
    assert_non_null(bytes);
    assert_int_equal(clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, size, bytes, 0, NULL, NULL), CL_SUCCESS);
    return bytes;
}

char *support_folder(void)
{
    const char *parent = getenv("TMPDIR");
    char *path = support_path(parent && *parent ? parent : "/tmp", "kvleaf-test-XXXXXX");
    assert_non_null(mkdtemp(path));
    return path;
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk)
{
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

void support_folder_remove(char *path)
{
    chmod(path, 0700);
    assert_int_equal(nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
    free(path);
}

char *support_path(const char *folder, const char *name)
{
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = malloc(size);
    assert_non_null(path);
    snprintf(path, size, "%s/%s", folder, name);
    return path;
}

void support_write(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

char *support_slurp(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = calloc(*size + 1, 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *size, file), *size);
    fclose(file);
    return data;
}

int support_files(const char *folder, const char *ending, char name[256])
{
    DIR *listing = opendir(folder);
    if (!listing)
        return 0;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(listing)) != NULL;) {
        size_t length = strlen(entry->d_name), tail = strlen(ending);
        if (entry->d_name[0] == '.' || length < tail || strcmp(entry->d_name + length - tail, ending) != 0)
            continue;
        count++;
        if (name)
            snprintf(name, 256, "%s", entry->d_name);
    }
    closedir(listing);
    return count;
}

char *support_kernels(int answer)
{
    static const char text[] = "#include \"common/answer.clh\"\n"
                               "__kernel void answer(__global int *out)\n{\n    out[0] = ANSWER;\n}\n";
    char *folder = support_folder(), *common = support_path(folder, "common"),
         *file = support_path(folder, "answer.cl");
    assert_int_equal(mkdir(common, 0700), 0);
    support_write(file, text, strlen(text));
    support_kernels_edit(folder, answer);
    free(file);
    free(common);
    return folder;
}

void support_kernels_edit(const char *folder, int answer)
{
    char text[64], *file = support_path(folder, "common/answer.clh");
    snprintf(text, sizeof text, "#define ANSWER %d\n", answer);
    support_write(file, text, strlen(text));
    free(file);
}

int support_answer(kvleaf_device *device, cl_program program)
{
    cl_int error = CL_SUCCESS, answer = -1;
    const size_t one = 1;
    cl_context context = kvleaf_device_context(device);
    cl_command_queue queue = clCreateCommandQueue(context, kvleaf_device_id(device), 0, &error);
    assert_int_equal(error, CL_SUCCESS);
    cl_mem out = clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof answer, NULL, &error);
    assert_int_equal(error, CL_SUCCESS);
    cl_kernel kernel = clCreateKernel(program, "answer", &error);
    assert_int_equal(error, CL_SUCCESS);
    assert_int_equal(clSetKernelArg(kernel, 0, sizeof out, &out), CL_SUCCESS);
    assert_int_equal(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, NULL), CL_SUCCESS);
    assert_int_equal(clEnqueueReadBuffer(queue, out, CL_TRUE, 0, sizeof answer, &answer, 0, NULL, NULL), CL_SUCCESS);
    clReleaseKernel(kernel);
    clReleaseMemObject(out);
    clReleaseCommandQueue(queue);
    return answer;
}

void support_log(void *user, kvleaf_log_level level, const char *message)
{
    support_lines *lines = user;
    size_t used = strlen(lines->text);
    (void)level;
    if (strlen(message) + 2 < sizeof lines->text - used)
        snprintf(lines->text + used, sizeof lines->text - used, "%s\n", message);
    lines->count++;
}

static void *allocate(void *user, size_t size)
{
    support_memory *memory = user;
    if (++memory->allocations == memory->fail_at)
        return NULL;
    memory->live++;
    return malloc(size);
}

static void release(void *user, void *block)
{
    ((support_memory *)user)->live--;
    free(block);
}

kvleaf_allocator support_allocator(support_memory *memory)
{
    return (kvleaf_allocator){allocate, release, memory};
}

uint64_t support_resident(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long long total = 0, resident = 0;
    if (!file)
        return 0;
    if (fscanf(file, "%llu %llu", &total, &resident) != 2)
        resident = 0;
    fclose(file);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}
