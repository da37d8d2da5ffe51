/* SPDX-License-Identifier: Apache-2.0 */
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include "shim.h"

#include <string.h>

shim_state shim;

#define SHIM_NAME(name) #name,
static const char *const names[] = {SHIM_ENTRIES(SHIM_NAME)};

void shim_reset(void)
{
    memset(&shim, 0, sizeof shim);
    shim.fail_only = -1;
    shim.failed_entry = -1;
    shim.error = CL_OUT_OF_RESOURCES;
}

const char *shim_entry_name(int entry)
{
    return entry >= 0 && entry < SHIM_COUNT ? names[entry] : "none";
}

int64_t shim_balance(void)
{
    return shim.contexts + shim.queues + shim.buffers + shim.programs + shim.kernels + shim.events;
}

/* Counts a call; true where it is the one to fail. */
static bool fails(shim_entry entry)
{
    shim.calls_of[entry]++;
    if (shim.fail_only >= 0 && shim.fail_only != (int)entry)
        return false;
    if (++shim.calls != shim.fail_at)
        return false;
    shim.failed_entry = (int)entry;
    return true;
}

/* Calls that answer a cl_int. */
#define PASS(name, parameters, arguments)                                                                              \
    static cl_int CL_API_CALL name parameters                                                                          \
    {                                                                                                                  \
        return fails(SHIM_##name) ? shim.error : cl##name arguments;                                                   \
    }

/* Retains: +1 where it worked. Releases: never made to fail. */
#define RETAIN(name, type, count)                                                                                      \
    static cl_int CL_API_CALL name(type object)                                                                        \
    {                                                                                                                  \
        cl_int error = fails(SHIM_##name) ? shim.error : cl##name(object);                                             \
        shim.count += error == CL_SUCCESS;                                                                             \
        return error;                                                                                                  \
    }
#define RELEASE(name, type, count)                                                                                     \
    static cl_int CL_API_CALL name(type object)                                                                        \
    {                                                                                                                  \
        shim.calls_of[SHIM_##name]++;                                                                                  \
        shim.count--;                                                                                                  \
        return cl##name(object);                                                                                       \
    }

/* Calls that make an object: NULL and the error on failure. */
#define CREATE(name, type, count, parameters, arguments)                                                               \
    static type CL_API_CALL name parameters                                                                            \
    {                                                                                                                  \
        if (fails(SHIM_##name)) {                                                                                      \
            if (error)                                                                                                 \
                *error = shim.error;                                                                                   \
            return NULL;                                                                                               \
        }                                                                                                              \
        type object = cl##name arguments;                                                                              \
        shim.count += object != NULL;                                                                                  \
        return object;                                                                                                 \
    }

/* Commands, which may make an event. */
#define COMMAND(name, parameters, arguments)                                                                           \
    static cl_int CL_API_CALL name parameters                                                                          \
    {                                                                                                                  \
        cl_int error = fails(SHIM_##name) ? shim.error : cl##name arguments;                                           \
        shim.events += error == CL_SUCCESS && event != NULL;                                                           \
        return error;                                                                                                  \
    }

/* Gives a fixed value in place of the device's. */
static cl_int give(const void *value, size_t size, size_t room, void *out, size_t *out_size)
{
    if (out_size)
        *out_size = size;
    if (out && room < size)
        return CL_INVALID_VALUE;
    if (out)
        memcpy(out, value, size);
    return CL_SUCCESS;
}

/* A handle that no driver gave out. */
static char broken;
#define BROKEN_PLATFORM ((cl_platform_id)(void *)&broken)

static cl_int CL_API_CALL GetPlatformIDs(cl_uint room, cl_platform_id *out, cl_uint *count)
{
    cl_uint found = 0, front = shim.broken_platform ? 1 : 0;
    if (fails(SHIM_GetPlatformIDs))
        return shim.error;
    if (shim.no_platform)
        return -1001;
    cl_int error = clGetPlatformIDs(room > front ? room - front : 0, room > front ? out + front : NULL, &found);
    if (error == CL_SUCCESS && front && room > 0)
        out[0] = BROKEN_PLATFORM;
    if (error == CL_SUCCESS && count)
        *count = found + front;
    return error;
}

static cl_int CL_API_CALL GetPlatformInfo(cl_platform_id platform, cl_platform_info what, size_t room, void *out,
                                          size_t *size)
{
    if (fails(SHIM_GetPlatformInfo))
        return shim.error;
    if (shim.platform_name && platform != BROKEN_PLATFORM && what == CL_PLATFORM_NAME)
        return give(shim.platform_name, strlen(shim.platform_name) + 1, room, out, size);
    return platform == BROKEN_PLATFORM ? CL_INVALID_PLATFORM : clGetPlatformInfo(platform, what, room, out, size);
}

static cl_int CL_API_CALL GetDeviceIDs(cl_platform_id platform, cl_device_type type, cl_uint room, cl_device_id *out,
                                       cl_uint *count)
{
    cl_uint found = 0;
    if (fails(SHIM_GetDeviceIDs))
        return shim.error;
    if (platform == BROKEN_PLATFORM)
        return CL_INVALID_PLATFORM;
    cl_int error = clGetDeviceIDs(platform, type, room, out, &found);
    if (error == CL_SUCCESS && shim.twin_device && out && room > found)
        out[found++] = out[0];
    if (count)
        *count = found;
    return error;
}

static cl_int CL_API_CALL GetDeviceInfo(cl_device_id device, cl_device_info what, size_t room, void *out, size_t *size)
{
    if (fails(SHIM_GetDeviceInfo))
        return shim.error;
    if (what == CL_DRIVER_VERSION && shim.driver_version)
        return give(shim.driver_version, strlen(shim.driver_version) + 1, room, out, size);
    if (what == CL_DEVICE_EXTENSIONS && shim.extensions)
        return give(shim.extensions, strlen(shim.extensions) + 1, room, out, size);
    if (what == CL_DEVICE_MAX_MEM_ALLOC_SIZE && shim.max_alloc)
        return give(&shim.max_alloc, sizeof shim.max_alloc, room, out, size);
    if (what == CL_DEVICE_LOCAL_MEM_SIZE && shim.local_size)
        return give(&shim.local_size, sizeof shim.local_size, room, out, size);
    if (what == CL_DEVICE_MAX_WORK_GROUP_SIZE && shim.max_work_group)
        return give(&shim.max_work_group, sizeof shim.max_work_group, room, out, size);
    return clGetDeviceInfo(device, what, room, out, size);
}

static cl_int CL_API_CALL GetKernelWorkGroupInfo(cl_kernel kernel, cl_device_id device, cl_kernel_work_group_info what,
                                                 size_t room, void *out, size_t *size)
{
    if (fails(SHIM_GetKernelWorkGroupInfo))
        return shim.error;
    if (what == CL_KERNEL_WORK_GROUP_SIZE && shim.kernel_work_group)
        return give(&shim.kernel_work_group, sizeof shim.kernel_work_group, room, out, size);
    return clGetKernelWorkGroupInfo(kernel, device, what, room, out, size);
}

CREATE(CreateContext, cl_context, contexts,
       (const cl_context_properties *properties, cl_uint count, const cl_device_id *devices,
        void(CL_CALLBACK *notify)(const char *, const void *, size_t, void *), void *user, cl_int *error),
       (properties, count, devices, notify, user, error))
RETAIN(RetainContext, cl_context, contexts)
RELEASE(ReleaseContext, cl_context, contexts)
PASS(GetContextInfo, (cl_context context, cl_context_info what, size_t room, void *out, size_t *size),
     (context, what, room, out, size))
CREATE(CreateCommandQueue, cl_command_queue, queues,
       (cl_context context, cl_device_id device, cl_command_queue_properties properties, cl_int *error),
       (context, device, properties, error))
RETAIN(RetainCommandQueue, cl_command_queue, queues)
RELEASE(ReleaseCommandQueue, cl_command_queue, queues)
PASS(GetCommandQueueInfo, (cl_command_queue queue, cl_command_queue_info what, size_t room, void *out, size_t *size),
     (queue, what, room, out, size))
CREATE(CreateBuffer, cl_mem, buffers, (cl_context context, cl_mem_flags flags, size_t size, void *host, cl_int *error),
       (context, flags, size, host, error))
RETAIN(RetainMemObject, cl_mem, buffers)
RELEASE(ReleaseMemObject, cl_mem, buffers)
PASS(GetMemObjectInfo, (cl_mem memory, cl_mem_info what, size_t room, void *out, size_t *size),
     (memory, what, room, out, size))
CREATE(CreateProgramWithSource, cl_program, programs,
       (cl_context context, cl_uint count, const char **texts, const size_t *sizes, cl_int *error),
       (context, count, texts, sizes, error))
CREATE(CreateProgramWithBinary, cl_program, programs,
       (cl_context context, cl_uint count, const cl_device_id *devices, const size_t *sizes,
        const unsigned char **binaries, cl_int *status, cl_int *error),
       (context, count, devices, sizes, binaries, status, error))
static cl_int CL_API_CALL BuildProgram(cl_program program, cl_uint count, const cl_device_id *devices,
                                       const char *options, void(CL_CALLBACK *notify)(cl_program, void *), void *user)
{
    if (fails(SHIM_BuildProgram))
        return shim.error;
    return shim.binary ? CL_SUCCESS : clBuildProgram(program, count, devices, options, notify, user);
}

static cl_int CL_API_CALL GetProgramInfo(cl_program program, cl_program_info what, size_t room, void *out, size_t *size)
{
    if (fails(SHIM_GetProgramInfo))
        return shim.error;
    if (shim.binary && what == CL_PROGRAM_BINARY_SIZES)
        return give(&shim.binary_size, sizeof shim.binary_size, room, out, size);
    if (shim.binary && what == CL_PROGRAM_BINARIES) {
        memcpy(*(void **)out, shim.binary, shim.binary_size);
        return CL_SUCCESS;
    }
    return clGetProgramInfo(program, what, room, out, size);
}

PASS(GetProgramBuildInfo,
     (cl_program program, cl_device_id device, cl_program_build_info what, size_t room, void *out, size_t *size),
     (program, device, what, room, out, size))
RELEASE(ReleaseProgram, cl_program, programs)
CREATE(CreateKernel, cl_kernel, kernels, (cl_program program, const char *name, cl_int *error), (program, name, error))
RELEASE(ReleaseKernel, cl_kernel, kernels)
PASS(SetKernelArg, (cl_kernel kernel, cl_uint at, size_t size, const void *value), (kernel, at, size, value))
COMMAND(EnqueueNDRangeKernel,
        (cl_command_queue queue, cl_kernel kernel, cl_uint dimensions, const size_t *offset, const size_t *global,
         const size_t *local, cl_uint num_wait, const cl_event *wait_list, cl_event *event),
        (queue, kernel, dimensions, offset, global, local, num_wait, wait_list, event))
COMMAND(EnqueueReadBuffer,
        (cl_command_queue queue, cl_mem memory, cl_bool blocking, size_t offset, size_t size, void *out,
         cl_uint num_wait, const cl_event *wait_list, cl_event *event),
        (queue, memory, blocking, offset, size, out, num_wait, wait_list, event))
COMMAND(EnqueueWriteBuffer,
        (cl_command_queue queue, cl_mem memory, cl_bool blocking, size_t offset, size_t size, const void *in,
         cl_uint num_wait, const cl_event *wait_list, cl_event *event),
        (queue, memory, blocking, offset, size, in, num_wait, wait_list, event))
COMMAND(EnqueueFillBuffer,
        (cl_command_queue queue, cl_mem memory, const void *pattern, size_t pattern_size, size_t offset, size_t size,
         cl_uint num_wait, const cl_event *wait_list, cl_event *event),
        (queue, memory, pattern, pattern_size, offset, size, num_wait, wait_list, event))
COMMAND(EnqueueMarkerWithWaitList,
        (cl_command_queue queue, cl_uint num_wait, const cl_event *wait_list, cl_event *event),
        (queue, num_wait, wait_list, event))
RETAIN(RetainEvent, cl_event, events)
RELEASE(ReleaseEvent, cl_event, events)
PASS(GetEventInfo, (cl_event event, cl_event_info what, size_t room, void *out, size_t *size),
     (event, what, room, out, size))
PASS(WaitForEvents, (cl_uint count, const cl_event *events), (count, events))
PASS(Flush, (cl_command_queue queue), (queue))
PASS(Finish, (cl_command_queue queue), (queue))

#define SHIM_MEMBER(name) .name = name,

const kvleaf_opencl *shim_table(void)
{
    static const kvleaf_opencl table = {SHIM_ENTRIES(SHIM_MEMBER)};
    return &table;
}
