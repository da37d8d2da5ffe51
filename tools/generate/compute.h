/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_COMPUTE_H
#define GENERATE_COMPUTE_H

/* The device work of the model that is not attention: buffers, the kernels of model.cl, and matrix
 * products by CLBlast. All on one in-order queue. */

#include <kvleaf/device.h>

#include "fail.h"
#include "safetensors.h"

/* Rows of activations are padded to this many, so that a product of few rows takes the same fast
 * path as one of many: the same sums in the same order, whatever else is in the step. */
enum { ROW_PAD = 8 };

typedef struct compute {
    kvleaf_device *device; /* borrowed */
    cl_context context;
    cl_device_id id;
    cl_command_queue queue;
    cl_program program;
    cl_kernel load_weight, embed, rms_norm, rope, silu_mul, best_token;
    size_t group;   /* work-items a row of rms_norm and best_token */
    cl_mem scratch; /* of products; as large as the largest so far needed */
} compute;

/* Makes queue and kernels, and gives CLBlast its parameters: those of the JSON file, or NULL for
 * the built-in ones. The caller destroys it, after a failure too. */
bool compute_create(compute *c, kvleaf_device *device, const char *clblast_params, failure *error);
void compute_destroy(compute *c);

bool compute_buffer(compute *c, size_t bytes, cl_mem *out, failure *error);

/* Sets `count` arguments of a kernel from (size, pointer) pairs and enqueues it. */
typedef struct kernel_arg {
    size_t size;
    const void *value;
} kernel_arg;
bool compute_run(compute *c, cl_kernel kernel, const char *name, const kernel_arg *args, cl_uint count,
                 const size_t global[2], const size_t *local, failure *error);

/* out[rows][outputs] = (accumulate ? out : 0) + in[rows][inputs] * weight, where weight is
 * input-major, [inputs][outputs]. `rows` is rounded up to ROW_PAD; the buffers hold as many. */
typedef struct product {
    cl_mem in, weight, out;
    int32_t rows, inputs, outputs;
    bool accumulate;
} product;
bool compute_product(compute *c, const product *p, failure *error);

/* Sets CLBlast's parameters for the device; params NULL = built in. */
bool clblast_configure(cl_device_id device, bool pocl_cpu, const char *params, failure *error);

#endif
