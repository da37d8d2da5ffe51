/* SPDX-License-Identifier: Apache-2.0 */
/* Protects what kernels are launched with: the arguments of the call at hand, whatever the call before left in the
 * kernel, be it another batch, another scale, a buffer that is gone, or a call that failed halfway. */
#include "attention_rig.h"

#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/state.h"
#include "shim.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

static int64_t arguments_set(void)
{
    return shim.calls_of[SHIM_SetKernelArg];
}

/* A kernel that writes down its arguments. */
static const char echo_text[] = "__kernel void echo(__global long *out, long4 a, int b, float c, __global int *kept)\n"
                                "{\n"
                                "    out[0] = a.x;\n"
                                "    out[1] = a.w;\n"
                                "    out[2] = b;\n"
                                "    out[3] = as_int(c);\n"
                                "    out[4] = kept[0];\n"
                                "}\n";

enum { ECHO_ARGS = 5, ECHO_WORDS = 5 };

typedef struct echo {
    kvleaf_device *device;
    cl_command_queue queue;
    kvl_kernel kernel;
    cl_mem kept[2]; /* hold 100 and 101 */
} echo;

typedef struct echo_call {
    cl_mem out;
    cl_long4 a;
    cl_int b;
    cl_float c;
    cl_mem kept;
    bool owned; /* kept is one that may be kept */
} echo_call;

static void open_echo(echo *e)
{
    kvleaf_device_params params = support_params();
    cl_program program = NULL;
    char *folder = support_folder(), *file = support_path(folder, "echo.cl");
    memset(e, 0, sizeof(*e));
    support_write(file, echo_text, strlen(echo_text));
    params.kernel_dir = folder;
    params.opencl = shim_table();
    ASSERT_OK(support_create(&params, &e->device));
    ASSERT_OK(kvl_device_program(e->device, "echo.cl", "", &program));
    ASSERT_OK(kvl_device_kernel(e->device, program, "echo", &e->kernel.handle));
    e->queue = support_queue(e->device);
    for (cl_int i = 0; i < 2; i++) {
        const cl_int value = 100 + i;
        e->kept[i] = support_buffer(e->device, e->queue, sizeof(value), 0);
        assert_int_equal(clEnqueueWriteBuffer(e->queue, e->kept[i], CL_TRUE, 0, sizeof(value), &value, 0, NULL, NULL),
                         CL_SUCCESS);
    }
    free(file);
    support_folder_remove(folder);
}

static void close_echo(echo *e)
{
    shim_table()->ReleaseKernel(e->kernel.handle);
    for (int32_t i = 0; i < 2; i++)
        clReleaseMemObject(e->kept[i]);
    clReleaseCommandQueue(e->queue);
    kvleaf_device_destroy(&e->device);
}

static kvleaf_status update_echo(echo *e, const echo_call *call)
{
    const kvl_arg args[ECHO_ARGS] = {KVL_ARG(call->out),
                                     KVL_ARG_KEPT(call->a),
                                     KVL_ARG_KEPT(call->b),
                                     KVL_ARG_KEPT(call->c),
                                     {sizeof(call->kept), &call->kept, call->owned}};
    return kvl_kernel_update(e->device, &e->kernel, args, ECHO_ARGS);
}

/* Runs the kernel as it stands and compares what it was given. */
static void check_echo(echo *e, const echo_call *call)
{
    const size_t one = 1;
    cl_int bits = 0;
    memcpy(&bits, &call->c, sizeof(bits));
    const cl_long expected[ECHO_WORDS] = {call->a.s[0], call->a.s[3], call->b, bits,
                                          call->kept == e->kept[1] ? 101 : 100};
    assert_int_equal(clEnqueueNDRangeKernel(e->queue, e->kernel.handle, 1, NULL, &one, &one, 0, NULL, NULL),
                     CL_SUCCESS);
    cl_long *found = (cl_long *)(void *)support_read(e->queue, call->out, sizeof(expected));
    assert_memory_equal(found, expected, sizeof(expected));
    free(found);
}

/* One change after the other; what is set is what may differ, and a buffer of the caller's, which may be a new one of
 * the old name, at every call. */
static void test_only_what_may_differ_is_set(void **state)
{
    echo e;
    (void)state;
    open_echo(&e);
    cl_mem outs[] = {support_buffer(e.device, e.queue, sizeof(cl_long) * ECHO_WORDS, 0xff),
                     support_buffer(e.device, e.queue, sizeof(cl_long) * ECHO_WORDS, 0xff)};
    const echo_call first = {outs[0], {{1, 2, 3, 4}}, 5, 6.5f, e.kept[0], true};
    echo_call a_too = first, b_too = first, c_too = first, zero = first, minus = first, lent = first, other = first;
    a_too.a.s[3] = 40;
    b_too.b = 50;
    c_too.c = 60.5f;
    zero.c = 0.0f;
    minus.c = -0.0f;
    other.kept = e.kept[1];
    lent.owned = false;
    echo_call elsewhere = first, lent_other = lent;
    elsewhere.out = outs[1];
    lent_other.kept = e.kept[1];
    const struct {
        const echo_call *call;
        int64_t set;
    } steps[] = {{&first, ECHO_ARGS}, {&first, 1}, {&elsewhere, 1}, {&first, 1},      {&a_too, 2}, {&a_too, 1},
                 {&b_too, 3},         {&c_too, 3}, {&zero, 2},      {&minus, 2},      {&other, 3}, {&first, 2},
                 {&lent, 2},          {&lent, 2},  {&first, 2},     {&lent_other, 2}, {&first, 2}, {&first, 1}};
    for (int32_t i = 0; i < COUNT(steps); i++) {
        int64_t before = arguments_set();
        ASSERT_OK(update_echo(&e, steps[i].call));
        if (arguments_set() - before != steps[i].set)
            fail_msg("step %d: %d arguments were set, must be %d", i, (int)(arguments_set() - before),
                     (int)steps[i].set);
        check_echo(&e, steps[i].call);
    }
    clReleaseMemObject(outs[0]);
    clReleaseMemObject(outs[1]);
    close_echo(&e);
}

/* clSetKernelArg fails for one argument after the other: the next call sets them all. */
static void test_a_failed_argument_is_not_known(void **state)
{
    echo e;
    (void)state;
    open_echo(&e);
    cl_mem out = support_buffer(e.device, e.queue, sizeof(cl_long) * ECHO_WORDS, 0xff);
    for (int32_t i = 0; i < ECHO_ARGS; i++) {
        const echo_call before = {out, {{1, 2, 3, i}}, 5, 6.5f, e.kept[0], true};
        const echo_call after = {out, {{10, 20, 30, 40 + i}}, 50, 60.5f, e.kept[1], true};
        ASSERT_OK(update_echo(&e, &before));
        check_echo(&e, &before);
        shim.calls = 0;
        shim.fail_only = SHIM_SetKernelArg;
        shim.fail_at = i + 1;
        ASSERT_FAILS(KVLEAF_DEVICE, "clSetKernelArg", update_echo(&e, &after));
        shim_reset();
        ASSERT_OK(update_echo(&e, &after));
        assert_int_equal(arguments_set(), ECHO_ARGS);
        check_echo(&e, &after);
    }
    clReleaseMemObject(out);
    close_echo(&e);
}

#define GEOMETRY(...)                                                                                                  \
    {                                                                                                                  \
        .q_dtype = KVLEAF_F32, .kv_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32, .num_heads = 4, .num_kv_heads = 2,     \
        .head_dim = 16, .block_size = 16, __VA_ARGS__                                                                  \
    }
static const problem_geometry plain = GEOMETRY(.view = PROBLEM_NHD);
static const problem_geometry odd = GEOMETRY(.view = PROBLEM_HND, .odd = true);

/* Batches that differ in everything that a kernel is given: numbers and lengths of rows, strides, offsets, buffers. */
static const problem_seq few[] = {{1, 1, 40, 0, 0}, {2, 1, 333, 0, 0}};
static const problem_seq more[] = {{3, 1, 600, 0, 0}, {4, 1, 7, 0, 0}, {5, 1, 300, 0, 0}};
static const problem_seq mixed[] = {{6, 9, 70, 0, 0}, {7, 1, 300, 0, 0}, {8, 30, 44, 0, 0}};

static void make_problems(const attention_rig *r, problem made[3])
{
    const problem_options options = {.seed = 8, .placement = 3};
    attention_rig_problem(r, &plain, few, COUNT(few), &options, &made[0]);
    attention_rig_problem(r, &odd, more, COUNT(more), &options, &made[1]);
    attention_rig_problem(r, &plain, mixed, COUNT(mixed), &options, &made[2]);
}

static void destroy_problems(problem made[3])
{
    for (int32_t i = 0; i < 3; i++)
        problem_destroy(&made[i]);
}

static void assert_right(const attention_rig *r, const problem *made, const char *what)
{
    problem_report report;
    if (!problem_verify(made, &report))
        fail_msg("%s, %s: %s", r->name, what, report.text);
}

static void append_and_attend(const attention_rig *r, problem *made, kvleaf_attention *attention, const char *what)
{
    problem_report report;
    ASSERT_OK(problem_append_attend(made, attention, KVLEAF_F32, false, &report));
    if (!report.passed)
        fail_msg("%s, %s: %s", r->name, what, report.text);
}

/* By one object in turn; new problems between, so that buffers are released and others made. */
static void test_batches_in_turn(void **state)
{
    const attention_rig *rigs = *state;
    for (int32_t i = 0; i < ATTENTION_RIGS; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[i], &plain, 0);
        for (int32_t round = 0; round < 3; round++) {
            problem made[3];
            make_problems(&rigs[i], made);
            for (int32_t k = 0; k < 9; k++) {
                problem *one = &made[k * 2 % 3];
                if (k % 2) {
                    ASSERT_OK(problem_attend(one, attention));
                    assert_right(&rigs[i], one, "in turn");
                } else {
                    append_and_attend(&rigs[i], one, attention, "in turn");
                }
            }
            destroy_problems(made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

/* A problem as calls of its step take it. */
typedef struct layer {
    kvleaf_tensor q, out, lse;
    kvleaf_kv_view view;
    kvleaf_exec exec;
} layer;

static layer layer_of(const problem *made)
{
    return (layer){.q = problem_tensor(&made->q),
                   .out = problem_tensor(&made->out),
                   .lse = problem_tensor(&made->lse),
                   .view = problem_kv_view(made),
                   .exec = problem_exec(made)};
}

static void plan(kvleaf_attention *attention, problem *made)
{
    kvleaf_batch batch = problem_batch(made);
    kvleaf_exec exec = problem_exec(made);
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
}

static size_t output_bytes(const problem *made)
{
    const problem_geometry *g = &made->geometry;
    return (size_t)made->total_q * (size_t)g->num_heads * (size_t)g->head_dim * kvleaf_dtype_size(g->out_dtype);
}

static unsigned char *outputs_of(const problem *made)
{
    unsigned char *copy = malloc(output_bytes(made));
    assert_non_null(copy);
    memcpy(copy, made->out_bits, output_bytes(made));
    return copy;
}

/* The outputs are these, and no LSE was written. */
static void assert_only_outputs(const problem *made, const unsigned char *outputs)
{
    problem_report report = {.passed = true};
    assert_memory_equal(made->out_bits, outputs, output_bytes(made));
    problem_compare_bytes(made->queue, &made->lse, made->lse.host, "LSE", &report);
    if (!report.passed)
        fail_msg("%s", report.text);
}

/* Layers of one step, each with buffers, a scale and a need for LSE of its own. */
static void test_layers_in_turn(void **state)
{
    static const float scales[] = {0.25f, 0.125f};
    const attention_rig *rigs = *state;
    for (int32_t i = 0; i < ATTENTION_RIGS; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[i], &plain, 0);
        problem made[2];
        unsigned char *first[2] = {NULL, NULL};
        for (int32_t k = 0; k < 2; k++) {
            problem_geometry g = plain;
            g.softmax_scale = scales[k];
            attention_rig_problem(&rigs[i], &g, mixed, COUNT(mixed),
                                  &(problem_options){.seed = (uint64_t)k, .placement = 5}, &made[k]);
        }
        plan(attention, &made[0]);
        for (int32_t k = 0; k < 8; k++) {
            problem *one = &made[k % 2];
            const layer at = layer_of(one);
            bool without = k / 2 % 2;
            kvl_view bound;
            kvl_chain chain;
            assert_true(problem_upload_outputs(one));
            ASSERT_OK(kvl_attention_begin(attention, &at.exec, &chain));
            ASSERT_OK(kvl_engine_view(attention->engine, &at.view, &bound));
            ASSERT_OK(kvl_engine_attend(attention->engine, &at.q, &bound, &at.out, without ? NULL : &at.lse,
                                        scales[k % 2], &chain));
            ASSERT_OK(kvl_chain_end(&chain, KVLEAF_OK));
            assert_true(problem_collect(one));
            if (without)
                assert_only_outputs(one, first[k % 2]);
            else
                assert_right(&rigs[i], one, "layers in turn");
            if (k < 2)
                first[k] = outputs_of(one);
        }
        free(first[0]);
        free(first[1]);
        problem_destroy(&made[0]);
        problem_destroy(&made[1]);
        kvleaf_attention_destroy(&attention);
    }
}

/* A call whose clSetKernelArg number k fails, after one of another batch; then the same call again. False: it has
 * fewer.
 */
static bool fail_argument(const attention_rig *r, kvleaf_attention *attention, problem *before, problem *made,
                          int64_t k)
{
    const layer at = layer_of(made);
    append_and_attend(r, before, attention, "before a failure");
    plan(attention, made);
    assert_true(problem_upload_outputs(made));
    shim.calls = 0;
    shim.failed_entry = -1;
    shim.fail_only = SHIM_SetKernelArg;
    shim.fail_at = k;
    kvleaf_status status = kvleaf_attention_attend(attention, &at.q, &at.view, &at.out, &at.lse, &at.exec);
    bool hit = shim.failed_entry >= 0;
    shim_reset();
    assert_int_equal(status, hit ? KVLEAF_DEVICE : KVLEAF_OK);
    ASSERT_OK(kvleaf_attention_attend(attention, &at.q, &at.view, &at.out, &at.lse, &at.exec));
    assert_true(problem_collect(made));
    assert_right(r, made, "after a failure");
    return hit;
}

static void test_failed_calls(void **state)
{
    const attention_rig *rigs = *state;
    for (int32_t i = 0; i < ATTENTION_RIGS; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[i], &plain, 0);
        problem made[3];
        make_problems(&rigs[i], made);
        for (int32_t p = 1; p < 3; p++) {
            int64_t k = 1;
            while (fail_argument(&rigs[i], attention, &made[0], &made[p], k))
                k++;
            assert_true(k > 8);
        }
        destroy_problems(made);
        kvleaf_attention_destroy(&attention);
    }
}

/* A layer after the first of a step sets decode's values and what the application brings, nothing else: for decode q, K
 * and V, the new keys and values unless they are in q's buffer, for the fold out and LSE. */
static void test_what_a_layer_sets(void **state)
{
    const attention_rig *rigs = *state;
    kvleaf_attention *attention = attention_rig_make(&rigs[0], &plain, 0);
    problem made;
    attention_rig_problem(&rigs[0], &plain, few, COUNT(few), &(problem_options){.seed = 8}, &made);
    plan(attention, &made);
    const layer at = layer_of(&made);
    problem_array source = {0};
    assert_true(problem_array_create(&source, made.context, plain.q_dtype, made.total_q, plain.num_kv_heads,
                                     plain.head_dim, false));
    problem_array_guard(&source);
    assert_true(problem_array_upload(&source, made.queue));
    const kvleaf_tensor row = problem_tensor(&source);
    const struct {
        const kvleaf_tensor *fresh, *lse;
        int64_t arguments;
    } layers[] = {{&row, &at.lse, 8 + 7}, {&row, &at.lse, 6 + 2},   {&row, NULL, 6 + 3},
                  {&row, NULL, 6 + 1},    {&at.q, NULL, 4 + 2 + 1}, {&at.q, NULL, 4 + 1}};
    for (int32_t i = 0; i < COUNT(layers); i++) {
        int64_t before = arguments_set();
        ASSERT_OK(kvleaf_attention_append_attend(attention, layers[i].fresh, layers[i].fresh, &at.q, &at.view, &at.out,
                                                 layers[i].lse, &at.exec));
        assert_int_equal(arguments_set() - before, layers[i].arguments);
    }
    problem_array_destroy(&source);
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
}

/* The same of attend with a block table that is the application's buffer, too. */
static void test_what_a_layer_sets_with_a_table(void **state)
{
    static const int64_t expected[] = {8 + 7, 5 + 2};
    cl_int error = 0;
    const attention_rig *rigs = *state;
    kvleaf_attention *attention = attention_rig_make(&rigs[0], &plain, 1);
    problem made;
    attention_rig_problem(&rigs[0], &plain, few, COUNT(few), &(problem_options){.seed = 8}, &made);
    const layer at = layer_of(&made);
    kvleaf_batch batch = problem_batch(&made);
    batch.block_table = NULL;
    batch.device_block_table =
        clCreateBuffer(made.context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR,
                       (size_t)(COUNT(few) * made.columns) * sizeof(int32_t), made.table, &error);
    assert_int_equal(error, CL_SUCCESS);
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &at.exec));
    for (int32_t k = 0; k < COUNT(expected); k++) {
        int64_t before = arguments_set();
        ASSERT_OK(kvleaf_attention_attend(attention, &at.q, &at.view, &at.out, &at.lse, &at.exec));
        assert_int_equal(arguments_set() - before, expected[k]);
    }
    assert_int_equal(clFinish(rigs[0].queue), CL_SUCCESS);
    clReleaseMemObject(batch.device_block_table);
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_what_may_differ_is_set),
        cmocka_unit_test(test_a_failed_argument_is_not_known),
        cmocka_unit_test(test_batches_in_turn),
        cmocka_unit_test(test_layers_in_turn),
        cmocka_unit_test(test_failed_calls),
        cmocka_unit_test(test_what_a_layer_sets),
        cmocka_unit_test(test_what_a_layer_sets_with_a_table),
    };
    return cmocka_run_group_tests(tests, attention_rigs_set_up, attention_rigs_tear_down);
}
