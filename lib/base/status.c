/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_SIZE  1024
#define LOG_SIZE   16384
#define FIELD_SIZE 64

/* The library's only global state: one record a thread, with room of its own so that failing never allocates. */
struct kvl_error_state {
    kvleaf_error error;
    char field[FIELD_SIZE];
    char message[TEXT_SIZE];
    char build_log[LOG_SIZE];
};

static _Thread_local struct kvl_error_state last;

const kvleaf_error *kvleaf_last_error(void)
{
    last.error.field = last.field;
    last.error.message = last.message;
    last.error.build_log = last.build_log;
    return &last.error;
}

static kvleaf_status record(kvleaf_status status, const char *field, int64_t value, int64_t limit, int32_t cl_error)
{
    last.error = (kvleaf_error){.status = status, .cl_error = cl_error, .value = value, .limit = limit};
    snprintf(last.field, sizeof last.field, "%s", field);
    last.build_log[0] = 0;
    return status;
}

kvleaf_status kvl_fail(kvleaf_status status, const char *field, int64_t value, int64_t limit, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last.message, sizeof last.message, format, args);
    va_end(args);
    return record(status, field, value, limit, 0);
}

kvleaf_status kvl_fail_range(const char *field, int64_t value, int64_t low, int64_t high)
{
    return kvl_fail(KVLEAF_INVALID, field, value, value < low ? low : high, "%s is %lld, must be %lld .. %lld", field,
                    (long long)value, (long long)low, (long long)high);
}

kvleaf_status kvl_fail_null(const char *field)
{
    return kvl_fail(KVLEAF_INVALID, field, 0, 0, "%s is null", field);
}

kvleaf_status kvl_fail_memory(size_t bytes)
{
    return kvl_fail(KVLEAF_NO_MEMORY, "", (int64_t)bytes, 0, "no host memory for %zu bytes", bytes);
}

/* OpenCL's own codes; base does not include its header. */
enum { MEM_OBJECT_ALLOCATION_FAILURE = -4, OUT_OF_HOST_MEMORY = -6 };

kvleaf_status kvl_fail_opencl(const char *call, int32_t cl_error)
{
    bool memory = cl_error == MEM_OBJECT_ALLOCATION_FAILURE || cl_error == OUT_OF_HOST_MEMORY;
    snprintf(last.message, sizeof last.message, "%s failed with OpenCL error %d", call, (int)cl_error);
    return record(memory ? KVLEAF_NO_MEMORY : KVLEAF_DEVICE, call, cl_error, 0, cl_error);
}

kvleaf_status kvl_fail_device(const char *command, int32_t cl_error)
{
    snprintf(last.message, sizeof last.message, "%s failed on the device with OpenCL error %d", command, (int)cl_error);
    return record(KVLEAF_DEVICE, command, cl_error, 0, cl_error);
}

void kvl_fail_log(const char *build_log)
{
    snprintf(last.build_log, sizeof last.build_log, "%s", build_log);
}

kvl_error_state *kvl_error_save(const kvleaf_allocator *allocator)
{
    kvl_error_state *state = kvl_alloc(allocator, 1, sizeof *state);
    if (state)
        *state = last;
    return state;
}

void kvl_error_restore(const kvleaf_allocator *allocator, kvl_error_state *state)
{
    if (state)
        last = *state;
    kvl_free(allocator, state);
}

kvleaf_status kvl_check_struct(const void *params, uint32_t struct_size, size_t size, const char *field)
{
    if (!params)
        return kvl_fail_null(field);
    if (struct_size != size)
        return kvl_fail(KVLEAF_INVALID, "struct_size", struct_size, (int64_t)size,
                        "%s.struct_size is %u, this version's is %zu", field, (unsigned)struct_size, size);
    return KVLEAF_OK;
}

const char *kvleaf_status_name(kvleaf_status status)
{
    static const char *const names[] = {
        "KVLEAF_OK",        "KVLEAF_INVALID", "KVLEAF_UNSUPPORTED", "KVLEAF_NO_BLOCKS",
        "KVLEAF_TOO_SMALL", "KVLEAF_FOREIGN", "KVLEAF_STALE",       "KVLEAF_BUSY",
        "KVLEAF_NO_MEMORY", "KVLEAF_CORRUPT", "KVLEAF_DEVICE",
    };
    int at = -(int)status;
    return at >= 0 && at < (int)(sizeof names / sizeof *names) ? names[at] : "unknown status";
}

#define STRINGIFY(x)                 #x
#define VERSION(major, minor, patch) STRINGIFY(major) "." STRINGIFY(minor) "." STRINGIFY(patch)

const char *kvleaf_version(void)
{
    return VERSION(KVLEAF_VERSION_MAJOR, KVLEAF_VERSION_MINOR, KVLEAF_VERSION_PATCH);
}
