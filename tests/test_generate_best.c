/* SPDX-License-Identifier: Apache-2.0 */
/* best_token of tools/generate/model.cl, as CPUs build it and as GPUs do: the largest logit's token, the lower of two
 * that are equal, and the first that is not finite. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_source.h"
#include "support.h"

enum { ROWS = 7, MOST = 5003 };

typedef struct best {
    cl_int token, broken;
    cl_float value;
} best;

static cl_kernel build(kvleaf_device *device, int group)
{
    char options[32];
    const char *source = model_source;
    cl_int error;
    cl_device_id id = kvleaf_device_id(device);
    snprintf(options, sizeof options, "-DGROUP=%d", group);
    cl_program program = clCreateProgramWithSource(kvleaf_device_context(device), 1, &source, NULL, &error);
    assert_int_equal(error, CL_SUCCESS);
    assert_int_equal(clBuildProgram(program, 1, &id, options, NULL, NULL), CL_SUCCESS);
    cl_kernel kernel = clCreateKernel(program, "best_token", &error);
    assert_int_equal(error, CL_SUCCESS);
    clReleaseProgram(program);
    return kernel;
}

static best *run(kvleaf_device *device, cl_kernel kernel, int group, const float *logits, int vocab)
{
    cl_command_queue queue = support_queue(device);
    cl_mem in = support_buffer(device, queue, sizeof(float) * ROWS * (size_t)vocab, 0);
    cl_mem out = support_buffer(device, queue, sizeof(best) * ROWS, 0xa5);
    size_t local = (size_t)group, global = ROWS * local;
    assert_int_equal(
        clEnqueueWriteBuffer(queue, in, CL_TRUE, 0, sizeof(float) * ROWS * (size_t)vocab, logits, 0, NULL, NULL),
        CL_SUCCESS);
    assert_int_equal(clSetKernelArg(kernel, 0, sizeof in, &in), CL_SUCCESS);
    assert_int_equal(clSetKernelArg(kernel, 1, sizeof vocab, &vocab), CL_SUCCESS);
    assert_int_equal(clSetKernelArg(kernel, 2, sizeof out, &out), CL_SUCCESS);
    assert_int_equal(clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &global, &local, 0, NULL, NULL), CL_SUCCESS);
    best *found = (best *)(void *)support_read(queue, out, sizeof(best) * ROWS);
    clReleaseMemObject(in);
    clReleaseMemObject(out);
    clReleaseCommandQueue(queue);
    return found;
}

static best expected(const float *x, int vocab)
{
    best out = {0, -1, 0};
    for (int i = 0; i < vocab; i++) {
        if (!isfinite(x[i]) && out.broken < 0)
            out = (best){0, i, x[i]};
        if (out.broken < 0 && x[i] > x[out.token])
            out.token = i;
    }
    if (out.broken >= 0)
        out.token = 0;
    return out;
}

static void fill(float *logits, int vocab, support_rng *rng)
{
    for (int i = 0; i < ROWS * vocab; i++)
        logits[i] = 20 * support_float(rng) - 30;
    float *row[ROWS];
    for (int i = 0; i < ROWS; i++)
        row[i] = logits + (size_t)i * (size_t)vocab;
    int last = vocab - 1;
    row[1][last] = row[1][last / 2] = 5; /* equal: the lower wins */
    row[2][0] = row[2][last] = 5;
    row[3][last / 3] = NAN;
    row[4][last] = INFINITY;
    row[4][last / 2] = -INFINITY;
    for (int i = 0; i < vocab; i++)
        row[5][i] = -3e38f;
}

static void test_best(void **state)
{
    (void)state;
    static const int groups[] = {1, 64}, vocabs[] = {1, 7, 8, 63, 512, 4096, MOST};
    kvleaf_device *device = support_shared();
    support_rng rng = {support_seed(41)};
    float *logits = malloc(sizeof *logits * ROWS * MOST);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        cl_kernel kernel = build(device, groups[g]);
        for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) {
            fill(logits, vocabs[v], &rng);
            best *found = run(device, kernel, groups[g], logits, vocabs[v]);
            for (int i = 0; i < ROWS; i++) {
                best want = expected(logits + (size_t)i * (size_t)vocabs[v], vocabs[v]);
                if (found[i].token != want.token || found[i].broken != want.broken ||
                    memcmp(&found[i].value, &want.value, sizeof(float)))
                    fail_msg("%d work-items, %d tokens, row %d: token %d, broken %d; should be %d, %d", groups[g],
                             vocabs[v], i, found[i].token, found[i].broken, want.token, want.broken);
            }
            free(found);
        }
        clReleaseKernel(kernel);
    }
    free(logits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_best)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
