/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_MOVES_H
#define KVL_MOVES_H

/* What the tests of the pool and of the memory-moving kernels share beside support.h: one device and queue a program,
 * buffers with known bytes, launches of one kernel. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "device/program.h"
#include "pool/pool.h"
#include "support.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static kvleaf_device *device;
static cl_command_queue queue;
static support_rng rng;

static inline int open_device(void **state)
{
    (void)state;
    rng.state = support_seed(20261101);
    device = support_shared();
    queue = support_queue(device);
    return 0;
}

static inline int close_device(void **state)
{
    (void)state;
    clReleaseCommandQueue(queue);
    return 0;
}

/* 0 .. limit-1 */
static inline int32_t random_below(int32_t limit)
{
    return support_range(&rng, 0, limit - 1);
}

static inline void *allocate(size_t bytes)
{
    void *memory = calloc(bytes ? bytes : 1, 1);
    assert_non_null(memory);
    return memory;
}

static inline void *random_bytes(size_t bytes)
{
    unsigned char *memory = allocate(bytes);
    for (size_t i = 0; i < bytes; i++)
        memory[i] = (unsigned char)support_next(&rng);
    return memory;
}

static inline cl_mem make_buffer(size_t bytes, const void *data)
{
    cl_int error;
    cl_mem buffer = clCreateBuffer(kvleaf_device_context(device), CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, bytes,
                                   (void *)(uintptr_t)data, &error);
    assert_int_equal(error, CL_SUCCESS);
    return buffer;
}

static inline void *read_buffer(cl_mem buffer, size_t bytes)
{
    void *data = allocate(bytes);
    assert_int_equal(clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, bytes, data, 0, NULL, NULL), CL_SUCCESS);
    return data;
}

static inline void write_buffer(cl_mem buffer, size_t bytes, const void *data)
{
    assert_int_equal(clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, bytes, data, 0, NULL, NULL), CL_SUCCESS);
}

/* Reads the buffer, compares it byte for byte and releases it. */
static inline void check_buffer(cl_mem buffer, size_t bytes, const void *expected, const char *name)
{
    unsigned char *now = read_buffer(buffer, bytes);
    const unsigned char *right = expected;
    for (size_t i = 0; i < bytes; i++)
        if (now[i] != right[i])
            fail_msg("%s: byte %zu of %zu is %02x, expected %02x", name, i, bytes, now[i], right[i]);
    free(now);
    clReleaseMemObject(buffer);
}

/* A kernel of cl_kernels/<file>, built by the library's own loader. The caller releases it. */
static inline cl_kernel make_kernel(const char *file, const char *name, const char *options)
{
    cl_program program;
    cl_kernel kernel;
    ASSERT_OK(kvl_device_program(device, file, options, &program));
    ASSERT_OK(kvl_device_kernel(device, program, name, &kernel));
    return kernel;
}

static inline void launch(cl_kernel kernel, const kvl_arg *args, int count, size_t global0, size_t global1,
                          size_t local0)
{
    ASSERT_OK(kvl_kernel_args(device, kernel, args, count));
    size_t global[2] = {global0, global1}, local[2] = {local0, 1};
    assert_int_equal(clEnqueueNDRangeKernel(queue, kernel, 2, NULL, global, local, 0, NULL, NULL), CL_SUCCESS);
    assert_int_equal(clFinish(queue), CL_SUCCESS);
}

#endif
