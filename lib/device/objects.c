/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels, buffers and the checks of a call, as the layers above use them. */
#include "device/device.h"

#include <string.h>

kvleaf_status kvl_device_kernel(kvleaf_device *device, cl_program program, const char *name, cl_kernel *out)
{
    cl_int error = CL_SUCCESS;
    cl_kernel kernel = device->cl->CreateKernel(program, name, &error);
    if (!kernel)
        return kvl_fail_opencl("clCreateKernel", error);
    *out = kernel;
    return KVLEAF_OK;
}

kvleaf_status kvl_device_buffer(kvleaf_device *device, const char *what, uint64_t size, cl_mem *out)
{
    enum { MIN_BYTES = 4 };
    if (size < MIN_BYTES)
        size = MIN_BYTES;
    if (size > device->caps.max_alloc_bytes || size > SIZE_MAX)
        return kvl_fail(KVLEAF_UNSUPPORTED, what, (int64_t)size, (int64_t)device->caps.max_alloc_bytes,
                        "%s takes %llu bytes, the device's largest buffer is %llu", what, (unsigned long long)size,
                        (unsigned long long)device->caps.max_alloc_bytes);
    cl_int error = CL_SUCCESS;
    cl_mem buffer = device->cl->CreateBuffer(device->context, CL_MEM_READ_WRITE, (size_t)size, NULL, &error);
    if (!buffer)
        return kvl_fail_opencl("clCreateBuffer", error);
    *out = buffer;
    return KVLEAF_OK;
}

kvleaf_status kvl_check_queue(const kvleaf_device *device, cl_command_queue queue)
{
    cl_context context = NULL;
    cl_device_id id = NULL;
    cl_int error = device->cl->GetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL);
    if (error == CL_SUCCESS)
        error = device->cl->GetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof id, &id, NULL);
    if (error == CL_INVALID_COMMAND_QUEUE)
        return kvl_fail(KVLEAF_INVALID, "queue", 0, 0, "queue is no valid command queue");
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetCommandQueueInfo", error);
    if (context != device->context)
        return kvl_fail(KVLEAF_FOREIGN, "queue", 0, 0, "queue belongs to another context than the device object");
    if (id != device->id)
        return kvl_fail(KVLEAF_FOREIGN, "queue", 0, 0, "queue belongs to another device of the context");
    return KVLEAF_OK;
}

kvleaf_status kvl_check_exec_fields(const kvleaf_exec *exec)
{
    kvleaf_status status = kvl_check_struct(exec, exec ? exec->struct_size : 0, sizeof *exec, "exec");
    if (status != KVLEAF_OK)
        return status;
    if (!exec->queue)
        return kvl_fail_null("queue");
    if (exec->num_wait > 0 && !exec->wait_list)
        return kvl_fail(KVLEAF_INVALID, "wait_list", exec->num_wait, 0, "wait_list is null, num_wait is %u",
                        exec->num_wait);
    if (exec->num_wait == 0 && exec->wait_list)
        return kvl_fail(KVLEAF_INVALID, "num_wait", 0, 1, "num_wait is 0, but a wait_list is given");
    return KVLEAF_OK;
}

kvleaf_status kvl_check_exec(const kvleaf_device *device, const kvleaf_exec *exec)
{
    kvleaf_status status = kvl_check_exec_fields(exec);
    return status ? status : kvl_check_queue(device, exec->queue);
}

static kvleaf_status set_arg(const kvleaf_device *device, cl_kernel kernel, int index, const kvl_arg *arg)
{
    cl_int error = device->cl->SetKernelArg(kernel, (cl_uint)index, arg->size, arg->value);
    return error ? kvl_fail_opencl("clSetKernelArg", error) : KVLEAF_OK;
}

kvleaf_status kvl_kernel_args(kvleaf_device *device, cl_kernel kernel, const kvl_arg *args, int count)
{
    kvleaf_status status = KVLEAF_OK;
    for (int i = 0; !status && i < count; i++)
        status = set_arg(device, kernel, i, &args[i]);
    return status;
}

/* clSetKernelArg: the value "is the value used by all API calls that enqueue kernel until the argument value is changed
 * by a call to clSetKernelArg". But a kernel holds no reference to a buffer, so the handle of an application's buffer
 * may by now be that of another one: it is set each time. */
kvleaf_status kvl_kernel_update(kvleaf_device *device, kvl_kernel *kernel, const kvl_arg *args, int count)
{
    for (int i = 0; i < count; i++) {
        size_t *known = &kernel->known[i].size;
        if (args[i].kept && *known == args[i].size && !memcmp(kernel->known[i].bytes, args[i].value, *known))
            continue;
        kvleaf_status status = set_arg(device, kernel->handle, i, &args[i]);
        if (status) {
            memset(kernel->known, 0, sizeof kernel->known);
            return status;
        }
        *known = args[i].kept ? args[i].size : 0;
        memcpy(kernel->known[i].bytes, args[i].value, *known);
    }
    return KVLEAF_OK;
}
