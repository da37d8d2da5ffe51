/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_DEVICE_H
#define KVL_DEVICE_H

/* What the layers above use of a device object. */

#include <kvleaf/device.h>

#include "base/base.h"

typedef struct kvl_programs kvl_programs;

struct kvleaf_device {
    const kvleaf_opencl *cl;
    cl_context context;
    cl_device_id id;
    kvleaf_caps caps;
    kvleaf_allocator allocator;
    kvl_logger logger;
    char *kernel_dir, *cache_dir, *variants; /* NULL where the params had none */
    bool deny_undocumented;
    kvl_mutex *mutex; /* guards references and programs */
    int64_t references;
    kvl_programs *programs; /* built in this context, by source file and options */
};

/* Query heads a KV head that the kernels on NVIDIA's tensor cores serve at most. */
static inline int32_t kvl_tensor_core_group(int32_t head_dim)
{
    return head_dim > 128 ? 8 : 16;
}

/* Every object made from a device holds a reference. */
void kvl_device_retain(kvleaf_device *device);
void kvl_device_release(kvleaf_device *device);

/* Builds cl_kernels/<file> with the options, or finds it in memory or on disk. The device owns *out, which lives as
 * long as the device. The failed build's source with line numbers goes to the log, its log to the last error. */
kvleaf_status kvl_device_program(kvleaf_device *device, const char *file, const char *options, cl_program *out);

/* Makes a kernel of a program; the caller releases it. A cl_kernel's arguments race between threads, so it belongs to
 * one plan. */
kvleaf_status kvl_device_kernel(kvleaf_device *device, cl_program program, const char *name, cl_kernel *out);

/* Makes a device buffer of `size` bytes (at least 4). TOO_SMALL never; UNSUPPORTED over the largest buffer, named
 * `what`. */
kvleaf_status kvl_device_buffer(kvleaf_device *device, const char *what, uint64_t size, cl_mem *out);

/* Checks that exec is usable with this device: struct size, a queue of its context. FOREIGN for another's. */
kvleaf_status kvl_check_exec(const kvleaf_device *device, const kvleaf_exec *exec);
/* Its two halves: what can be told without the driver, and what the driver says of the queue. */
kvleaf_status kvl_check_exec_fields(const kvleaf_exec *exec);
kvleaf_status kvl_check_queue(const kvleaf_device *device, cl_command_queue queue);

/* Arguments 0, 1, ... of a kernel, e.g. KVL_ARG(buffer). `kept`: equal bytes stand for the same argument for as long as
 * the kernel lives, as they do for a value, for NULL, and for a buffer that is released after the kernel. */
typedef struct kvl_arg {
    size_t size;
    const void *value;
    bool kept;
} kvl_arg;

#define KVL_ARG(x)                                                                                                     \
    {                                                                                                                  \
        sizeof(x), &(x), false                                                                                         \
    }
#define KVL_ARG_KEPT(x)                                                                                                \
    {                                                                                                                  \
        sizeof(x), &(x), true                                                                                          \
    }

/* Sets them all. */
kvleaf_status kvl_kernel_args(kvleaf_device *device, cl_kernel kernel, const kvl_arg *args, int count);

enum { KVL_KERNEL_ARGS = 24, KVL_KEPT_BYTES = sizeof(cl_long4) };

/* A kernel that is launched again and again, with what its arguments are known to be. */
typedef struct kvl_kernel {
    cl_kernel handle;
    struct {
        size_t size; /* 0 = not known */
        unsigned char bytes[KVL_KEPT_BYTES];
    } known[KVL_KERNEL_ARGS];
} kvl_kernel;

/* Sets those that may differ from the call before: all but kept ones of the same bytes. */
kvleaf_status kvl_kernel_update(kvleaf_device *device, kvl_kernel *kernel, const kvl_arg *args, int count);

#endif
