/* SPDX-License-Identifier: Apache-2.0 */
#include "compute.h"

#include <clblast_c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_source.h"

static bool build_program(compute *c, bool cpu, failure *error)
{
    const char *text = model_source;
    char options[64], log[512] = "";
    cl_int status;

    c->group = cpu ? 1 : 64;
    snprintf(options, sizeof options, "-DGROUP=%d", (int)c->group);
    c->program = clCreateProgramWithSource(c->context, 1, &text, NULL, &status);
    if (status != CL_SUCCESS)
        return fail_opencl(error, "clCreateProgramWithSource", status);
    status = clBuildProgram(c->program, 1, &c->id, options, NULL, NULL);
    if (status == CL_SUCCESS)
        return true;
    clGetProgramBuildInfo(c->program, c->id, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
    return fail(error, "KVLEAF_DEVICE", "model.cl does not build (OpenCL error %d): %s", (int)status, log);
}

static bool make_kernels(compute *c, failure *error)
{
    const struct {
        const char *name;
        cl_kernel *kernel;
    } rows[] = {{"load_weight", &c->load_weight}, {"embed", &c->embed},
                {"rms_norm", &c->rms_norm},       {"rope", &c->rope},
                {"silu_mul", &c->silu_mul},       {"best_token", &c->best_token}};
    cl_int status;

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        *rows[i].kernel = clCreateKernel(c->program, rows[i].name, &status);
        if (status != CL_SUCCESS)
            return fail_opencl(error, "clCreateKernel", status);
    }
    return true;
}

bool compute_create(compute *c, kvleaf_device *device, const char *clblast_params, failure *error)
{
    kvleaf_caps caps = {.struct_size = sizeof caps};

    memset(c, 0, sizeof *c);
    c->device = device;
    c->context = kvleaf_device_context(device);
    c->id = kvleaf_device_id(device);
    if (kvleaf_device_query(device, &caps) != KVLEAF_OK)
        return fail_kvleaf(error, "kvleaf_device_query");
    if (kvleaf_device_queue_create(device, &c->queue) != KVLEAF_OK)
        return fail_kvleaf(error, "kvleaf_device_queue_create");
    bool cpu = (caps.type & CL_DEVICE_TYPE_CPU) != 0;
    bool pocl = strstr(caps.platform_name, "Portable Computing Language") != NULL;
    return build_program(c, cpu, error) && make_kernels(c, error) &&
           clblast_configure(c->id, cpu && pocl, clblast_params, error);
}

void compute_destroy(compute *c)
{
    cl_kernel kernels[] = {c->load_weight, c->embed, c->rms_norm, c->rope, c->silu_mul, c->best_token};

    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (kernels[i] != NULL)
            clReleaseKernel(kernels[i]);
    if (c->program != NULL)
        clReleaseProgram(c->program);
    if (c->scratch != NULL)
        clReleaseMemObject(c->scratch);
    if (c->queue != NULL) {
        clFinish(c->queue);
        clReleaseCommandQueue(c->queue);
    }
    memset(c, 0, sizeof *c);
}

/* Zeroed, so that rows that only pad a product hold numbers. */
bool compute_buffer(compute *c, size_t bytes, cl_mem *out, failure *error)
{
    const float zero = 0.0f;
    cl_ulong limit = 0;
    cl_int status;

    bytes = (bytes + sizeof zero - 1) / sizeof zero * sizeof zero;
    clGetDeviceInfo(c->id, CL_DEVICE_MAX_MEM_ALLOC_SIZE, sizeof limit, &limit, NULL);
    if (bytes > limit)
        return fail(error, "KVLEAF_UNSUPPORTED", "a buffer of %zu bytes is over the device's limit of %llu", bytes,
                    (unsigned long long)limit);
    *out = clCreateBuffer(c->context, CL_MEM_READ_WRITE, bytes, NULL, &status);
    if (status != CL_SUCCESS)
        return fail(error, "KVLEAF_NO_MEMORY", "a device buffer of %zu bytes can't be made (OpenCL error %d)", bytes,
                    (int)status);
    status = clEnqueueFillBuffer(c->queue, *out, &zero, sizeof zero, 0, bytes, 0, NULL, NULL);
    return status == CL_SUCCESS || fail_opencl(error, "clEnqueueFillBuffer", status);
}

bool compute_run(compute *c, cl_kernel kernel, const char *name, const kernel_arg *args, cl_uint count,
                 const size_t global[2], const size_t *local, failure *error)
{
    cl_int status = CL_SUCCESS;

    for (cl_uint i = 0; i < count && status == CL_SUCCESS; i++)
        status = clSetKernelArg(kernel, i, args[i].size, args[i].value);
    if (status == CL_SUCCESS)
        status = clEnqueueNDRangeKernel(c->queue, kernel, local ? 1 : 2, NULL, global, local, 0, NULL, NULL);
    return status == CL_SUCCESS || fail_opencl(error, name, status);
}

/* What CLBlast puts between its kernels of one product. Left to itself it makes a buffer for that in every call. */
static bool grow_scratch(compute *c, size_t rows, size_t outputs, size_t inputs, failure *error)
{
    size_t bytes = 0;
    cl_command_queue queue = c->queue;
    CLBlastStatusCode status =
        CLBlastSGemmTempBufferSize(CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeNo, rows, outputs, inputs,
                                   0, inputs, 0, outputs, 0, outputs, &queue, &bytes);

    if (status != CLBlastSuccess)
        return fail(error, "KVLEAF_DEVICE", "CLBlast can't say what a product of %zu x %zu x %zu needs (status %d)",
                    rows, outputs, inputs, (int)status);
    if (c->scratch != NULL)
        clReleaseMemObject(c->scratch); /* commands that use it keep it */
    c->scratch = NULL;
    return compute_buffer(c, bytes > 0 ? bytes : 1, &c->scratch, error);
}

bool compute_product(compute *c, const product *p, failure *error)
{
    size_t rows = (size_t)(p->rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD;
    size_t inputs = (size_t)p->inputs, outputs = (size_t)p->outputs;
    cl_command_queue queue = c->queue;

    /* The weights lie as CLBlast's kernel wants its second matrix: only activations are transposed on the way. */
    CLBlastStatusCode status = CLBlastInsufficientMemoryTemp;
    for (int tried = 0; status == CLBlastInsufficientMemoryTemp && tried < 2; tried++) {
        if ((c->scratch == NULL || tried > 0) && !grow_scratch(c, rows, outputs, inputs, error))
            return false;
        status = CLBlastSgemmWithTempBuffer(CLBlastLayoutRowMajor, CLBlastTransposeNo, CLBlastTransposeNo, rows,
                                            outputs, inputs, 1.0f, p->in, 0, inputs, p->weight, 0, outputs,
                                            p->accumulate ? 1.0f : 0.0f, p->out, 0, outputs, &queue, NULL, c->scratch);
    }
    return status == CLBlastSuccess ||
           fail(error, "KVLEAF_DEVICE", "CLBlastSgemm of %zu x %zu x %zu failed with status %d", rows, outputs, inputs,
                (int)status);
}
