/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SHIM_H
#define KVL_SHIM_H

/* An OpenCL table over the ICD loader's that counts calls, keeps the balance of created and released objects, makes the
 * k-th call fail, and tells lies about the device. Its state is one global; the counts may be read while threads run.
 */

#include <stdatomic.h>

#include <kvleaf/device.h>

/* Every entry of kvleaf_opencl, in its order. */
/* clang-format off */
#define SHIM_ENTRIES(X)                                                                                                \
    X(GetPlatformIDs) X(GetPlatformInfo) X(GetDeviceIDs) X(GetDeviceInfo) X(CreateContext) X(RetainContext)            \
    X(ReleaseContext) X(GetContextInfo) X(CreateCommandQueue) X(RetainCommandQueue) X(ReleaseCommandQueue)             \
    X(GetCommandQueueInfo) X(CreateBuffer) X(RetainMemObject) X(ReleaseMemObject) X(GetMemObjectInfo)                  \
    X(CreateProgramWithSource) X(CreateProgramWithBinary) X(BuildProgram) X(GetProgramInfo) X(GetProgramBuildInfo)     \
    X(ReleaseProgram) X(CreateKernel) X(ReleaseKernel) X(SetKernelArg) X(GetKernelWorkGroupInfo)                       \
    X(EnqueueNDRangeKernel) X(EnqueueReadBuffer) X(EnqueueWriteBuffer) X(EnqueueFillBuffer)                            \
    X(EnqueueMarkerWithWaitList) X(RetainEvent) X(ReleaseEvent) X(GetEventInfo) X(WaitForEvents) X(Flush) X(Finish)
/* clang-format on */

#define SHIM_ENUM(name) SHIM_##name,
typedef enum shim_entry { SHIM_ENTRIES(SHIM_ENUM) SHIM_COUNT } shim_entry;

typedef struct shim_state {
    /* Set by the test. */
    int64_t fail_at;            /* the call, from 1, that fails; 0 = none. Releases are never made to fail */
    int fail_only;              /* only calls of this entry count towards fail_at; -1 = all */
    cl_int error;               /* what it fails with */
    bool no_platform;           /* the loader finds none: -1001 */
    bool broken_platform;       /* a platform in front of the others answers every question with an error */
    bool twin_device;           /* the first device is listed twice */
    const char *platform_name;  /* told instead of the platform's; NULL = the platform's */
    const char *driver_version; /* told instead of the device's; NULL = the device's */
    const char *extensions;     /* likewise */
    const char *binary; /* building does nothing, and this is every program's binary; NULL = as the driver does */
    size_t binary_size;
    cl_ulong max_alloc, local_size;
    size_t max_work_group, kernel_work_group;
    /* Kept by the shim. */
    _Atomic int64_t calls; /* that could fail */
    _Atomic int64_t calls_of[SHIM_COUNT];
    _Atomic int64_t contexts, queues, buffers, programs, kernels, events; /* created and retained less released */
    _Atomic int failed_entry;                                             /* which one was made to fail, -1 = none */
} shim_state;

extern shim_state shim;

/* A platform's name for which the library keeps program binaries, as it does not for PoCL; tests select by its start.
 */
#define SHIM_OTHER_THAN_POCL "Portable Computing Language or another"

/* Clears the state (fail_only and failed_entry -1, error CL_OUT_OF_RESOURCES). */
void shim_reset(void);
const kvleaf_opencl *shim_table(void);
const char *shim_entry_name(int entry);
/* The sum of what is alive: 0 once everything is released. */
int64_t shim_balance(void);

#endif
