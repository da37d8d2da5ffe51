/* SPDX-License-Identifier: Apache-2.0 */
/* Protects append and attend in one call through the managed cache: the bits of two calls, whatever is forked, copied
 * or out of a window; one launch less a layer in decode steps; and a failure leaves the step to be rolled back. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

enum { STEPS = 24 };

/* What a run of several steps gave: rows of all layers, one after the other. */
typedef struct record {
    uint8_t *bytes;
    size_t size, room;
} record;

static void note(record *to, const void *bytes, size_t size)
{
    if (to->size + size > to->room) {
        to->room = 2 * (to->size + size);
        to->bytes = realloc(to->bytes, to->room);
        assert_non_null(to->bytes);
    }
    memcpy(to->bytes + to->size, bytes, size);
    to->size += size;
}

static void run_step(rig *r, const rig_step *step, const char *what, record *to)
{
    rig_run(r, step, what);
    int32_t row = 0;
    for (int32_t i = 0; i < step->n; i++)
        for (int32_t t = 0; t < step->num_q[i]; t++, row++)
            for (int32_t layer = 0; layer < r->p.num_layers; layer++) {
                note(to, rig_out(r, layer, row), rig_row_bytes(r, layer));
                note(to, rig_lse(r, layer, row), (size_t)r->p.num_heads * sizeof(float));
            }
}

/* A prompt, forks of it in the middle of a block, which copy it in the step that first writes, further prompts beside
 * decoding, and ends. */
static record tell_story(const rig_params *p, const char *what)
{
    rig r;
    record all = {0};
    rig_open(&r, p);
    rig_seq *a = rig_seq_new(&r), *late = rig_seq_new(&r);
    rig_extend(&r, a, 38);
    run_step(&r, &(rig_step){.seqs = {a}, .num_q = {38}, .n = 1}, what, &all);
    rig_seq *b = rig_seq_fork(&r, a, 38), *c = rig_seq_fork(&r, a, 36);
    rig_extend(&r, late, 30);
    for (int32_t i = 0; i < STEPS; i++) {
        rig_step step = {.seqs = {c, a, b}, .num_q = {1, 1, 1}, .n = 3};
        for (int32_t s = 0; s < 3; s++)
            rig_extend(&r, step.seqs[s], 1);
        if (i % 8 == 3) { /* a chunk of a prompt in the same step */
            step.seqs[3] = late;
            step.num_q[step.n++] = 10;
        }
        if (i == 12) { /* and a beam that goes on from another's place */
            rig_seq_end(&r, b);
            b = rig_seq_fork(&r, a, a->committed);
            rig_extend(&r, b, 1);
            step.seqs[2] = b;
        }
        run_step(&r, &step, what, &all);
    }
    rig_check_stored(&r, a, what);
    rig_check_stored(&r, b, what);
    rig_check_stored(&r, c, what);
    rig_close(&r);
    return all;
}

static const struct {
    const char *name;
    kvleaf_dtype kv_dtype;
    kvleaf_layout layout;
    int32_t block_size, window, second_dim;
    cl_command_queue_properties queue;
} stories[] = {
    {"f32 b4", KVLEAF_F32, KVLEAF_LAYOUT_AUTO, 4, 0, 0, 0},
    {"f32 b4, any order", KVLEAF_F32, KVLEAF_LAYOUT_AUTO, 4, 0, 0, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE},
    {"f16 b16", KVLEAF_F16, KVLEAF_LAYOUT_AUTO, 16, 0, 0, 0},
    {"f16 b16 dim8", KVLEAF_F16, KVLEAF_LAYOUT_DIM8, 16, 0, 0, 0},
    {"a window", KVLEAF_F32, KVLEAF_LAYOUT_AUTO, 4, 13, 0, 0},
    {"three groups", KVLEAF_F32, KVLEAF_LAYOUT_AUTO, 4, 13, 20, 0},
};

/* The same story with layers 0, 2 by one call and 1, 3 by two, and the other way round. */
static void test_same_bits(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof stories / sizeof *stories; i++) {
        rig_params p = rig_defaults();
        p.kv_dtype = stories[i].kv_dtype;
        p.layout = stories[i].layout;
        p.block_size = stories[i].block_size;
        p.queue_properties = stories[i].queue;
        p.window[1] = stories[i].window;
        if (stories[i].second_dim) {
            p.num_layers = 4;
            p.layer_dim[2] = stories[i].second_dim;
            p.kv_layer[3] = 1;
        }
        record one = tell_story(&p, stories[i].name);
        p.fused_first = true;
        record other = tell_story(&p, stories[i].name);
        if (one.size != other.size || memcmp(one.bytes, other.bytes, one.size) != 0)
            fail_msg("%s: other bits", stories[i].name);
        free(one.bytes);
        free(other.bytes);
    }
}

static void open_shimmed(rig *r, rig_params p)
{
    shim_reset();
    p.opencl = shim_table();
    rig_open(r, &p);
}

/* Launches of a layer's call of the open step. */
static int64_t launches_of(rig *r, const rig_step *step, kvleaf_status (*call)(rig *, const rig_step *, int32_t))
{
    rig_load(r, step, 0);
    int64_t before = shim.calls_of[SHIM_EnqueueNDRangeKernel];
    ASSERT_OK(call(r, step, 0));
    return shim.calls_of[SHIM_EnqueueNDRangeKernel] - before;
}

static void test_launches(void **state)
{
    (void)state;
    rig r;
    open_shimmed(&r, rig_defaults());
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
    rig_extend(&r, a, 20);
    rig_run_one(&r, a, 20, KVLEAF_FAMILY_AUTO, "prompt");
    rig_extend(&r, a, 1);
    rig_extend(&r, b, 5);
    const rig_step decode = {.seqs = {a}, .num_q = {1}, .n = 1};
    ASSERT_OK(rig_build(&r, &decode));
    int64_t append = launches_of(&r, &decode, rig_append), attend = launches_of(&r, &decode, rig_attend);
    assert_int_equal(append, 1);
    assert_int_equal(launches_of(&r, &decode, rig_append_attend), attend);
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    const rig_step mixed = {.seqs = {a, b}, .num_q = {1, 5}, .n = 2};
    ASSERT_OK(rig_build(&r, &mixed));
    attend = launches_of(&r, &mixed, rig_attend);
    assert_int_equal(launches_of(&r, &mixed, rig_append_attend), attend + 1);
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    rig_close(&r);
}

/* A wrong argument, be it of the one half or the other: nothing is launched, the step can only be rolled back. */
static void test_wrong_arguments(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.num_layers = 3;
    p.kv_layer[1] = 1;
    open_shimmed(&r, p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 6);
    rig_run_one(&r, a, 6, KVLEAF_FAMILY_AUTO, "before");
    rig_extend(&r, a, 1);
    const rig_step step = {.seqs = {a}, .num_q = {1}, .n = 1};
    kvleaf_exec exec = rig_exec(&r, &step);
    const kvleaf_tensor right = {.handle = r.k, .dtype = KVLEAF_F32}, none = {.dtype = KVLEAF_F32};
    const kvleaf_tensor half = {.handle = r.k, .dtype = KVLEAF_F16}, out = {.handle = r.out, .dtype = KVLEAF_F32};
    const struct {
        const char *field;
        int32_t layer;
        const kvleaf_tensor *k, *v, *q, *out, *lse;
    } cases[] = {
        {"layer", -1, &right, &right, &right, &out, NULL}, {"layer", 3, &right, &right, &right, &out, NULL},
        {"layer", 1, &right, &right, &right, &out, NULL}, /* reads layer 0's */
        {"k", 0, NULL, &right, &right, &out, NULL},        {"v", 0, &right, NULL, &right, &out, NULL},
        {"q", 0, &right, &right, NULL, &out, NULL},        {"out", 0, &right, &right, &right, NULL, NULL},
        {"k", 2, &none, &right, &right, &out, NULL},       {"v", 0, &right, &none, &right, &out, NULL},
        {"q", 0, &right, &right, &half, &out, NULL},       {"out", 0, &right, &right, &right, &half, NULL},
        {"lse", 0, &right, &right, &right, &out, &half},
    };
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_append_attend(NULL, 0, &right, &right, &right, &out, NULL, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_append_attend(r.plan, 0, &right, &right, &right, &out, NULL, &exec));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(clFinish(r.queue), CL_SUCCESS);
        ASSERT_OK(rig_build(&r, &step));
        int64_t before = shim.calls_of[SHIM_EnqueueNDRangeKernel];
        ASSERT_FAILS(KVLEAF_INVALID, cases[i].field,
                     kvleaf_append_attend(r.plan, cases[i].layer, cases[i].k, cases[i].v, cases[i].q, cases[i].out,
                                          cases[i].lse, &exec));
        assert_int_equal(shim.calls_of[SHIM_EnqueueNDRangeKernel], before);
        ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r.plan, NULL));
        ASSERT_FAILS(KVLEAF_INVALID, "plan", rig_append_attend(&r, &step, 0));
        ASSERT_OK(kvleaf_plan_rollback(r.plan));
        rig_check_lengths(&r, a, 6);
    }
    rig_check_stored(&r, a, "after failed steps");
    rig_run(&r, &step, "after failed steps");
    rig_close(&r);
}

/* Each OpenCL call of the layers' calls failing in turn, in a decode step whose blocks are copies, and in a mixed one.
 */
static void run_faults(cl_command_queue_properties queue, int32_t num_q)
{
    rig r;
    rig_params p = rig_defaults();
    p.queue_properties = queue;
    open_shimmed(&r, p);
    rig_seq *parent = rig_seq_new(&r);
    rig_extend(&r, parent, 7);
    rig_run_one(&r, parent, 7, KVLEAF_FAMILY_AUTO, "prompt");
    int64_t failed = 0;
    for (int64_t k = 1; k < 500; k++) {
        rig_seq *child = rig_seq_fork(&r, parent, 6);
        rig_extend(&r, child, 1);
        rig_extend(&r, parent, num_q);
        const rig_step step = {.seqs = {child, parent}, .num_q = {1, num_q}, .n = 2};
        ASSERT_OK(rig_build(&r, &step));
        kvleaf_status status = KVLEAF_OK;
        rig_load(&r, &step, 0);
        shim.calls = 0;
        shim.failed_entry = -1;
        shim.fail_at = k;
        for (int32_t layer = 0; !status && layer < 2; layer++)
            status = rig_append_attend(&r, &step, layer);
        int hit = shim.failed_entry;
        shim.fail_at = 0;
        assert_int_equal(status, hit < 0 ? KVLEAF_OK : KVLEAF_DEVICE);
        if (hit >= 0)
            ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r.plan, NULL));
        ASSERT_OK(kvleaf_plan_rollback(r.plan));
        assert_int_equal(clFinish(r.queue), CL_SUCCESS);
        rig_check_stored(&r, parent, "after a failure");
        rig_run(&r, &step, "the same step once more");
        rig_check_stored(&r, child, "once more");
        rig_seq_end(&r, child);
        rig_truncate(&r, parent, 7);
        if (hit < 0)
            break;
        failed++;
    }
    assert_true(failed > 20);
    rig_close(&r);
    assert_int_equal(shim_balance(), 0);
}

static void test_calls_fail(void **state)
{
    (void)state;
    run_faults(0, 1);
    run_faults(0, 3);
    run_faults(CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_launches),
        cmocka_unit_test(test_wrong_arguments),
        cmocka_unit_test(test_calls_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
