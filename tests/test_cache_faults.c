/* SPDX-License-Identifier: Apache-2.0 */
/* Each OpenCL call and each allocation failing in turn, while a cache is made and while a step with copies, changed
 * tables and several queues is run: host state and the bytes of committed tokens stay as they were, the same step works
 * afterwards, nothing leaks. And a warm step allocates, builds and waits for nothing. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

/* Opens a rig over the shim; what lives then is the base for balances. */
static void open_shimmed(rig *r, rig_params p)
{
    shim_reset();
    p.opencl = shim_table();
    rig_open(r, &p);
}

static void fail_call(int64_t number, int entry)
{
    shim.calls = 0;
    shim.failed_entry = -1;
    shim.fail_only = entry;
    shim.fail_at = number;
}

static void test_creation_calls_fail(void **state)
{
    (void)state;
    rig r;
    open_shimmed(&r, rig_defaults());
    int64_t failed = 0;
    for (int64_t k = 1; k < 1000; k++) {
        rig made = r;
        int64_t before = shim_balance();
        made.cache = NULL;
        made.plan = NULL;
        fail_call(k, -1);
        kvleaf_status status = rig_make_cache(&made);
        if (!status)
            status = rig_make_plan(&made, &made.plan);
        int hit = shim.failed_entry;
        fail_call(0, -1);
        if (hit == SHIM_CreateBuffer)
            assert_int_equal(status, KVLEAF_DEVICE);
        else if (hit >= 0) /* a variant whose trial fails makes way for another */
            assert_true(status == KVLEAF_OK || status == KVLEAF_DEVICE || status == KVLEAF_UNSUPPORTED);
        else
            assert_int_equal(status, KVLEAF_OK);
        failed += status != KVLEAF_OK;
        kvleaf_plan_destroy(&made.plan);
        kvleaf_cache_destroy(&made.cache);
        assert_true(shim_balance() <= before + shim.programs); /* programs stay with the device */
        if (hit < 0)
            break;
    }
    assert_true(failed > 10);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 5);
    rig_run_one(&r, seq, 5, KVLEAF_FAMILY_AUTO, "after failures");
    rig_seq_end(&r, seq);
    rig_close(&r);
    assert_int_equal(shim_balance(), 0);
}

static void test_creation_allocations_fail(void **state)
{
    (void)state;
    support_memory memory = {0};
    rig_params p = rig_defaults();
    p.allocator = support_allocator(&memory);
    rig r;
    open_shimmed(&r, p);
    int64_t failed = 0;
    for (int64_t k = 1; k < 1000; k++) {
        rig made = r;
        int64_t live = memory.live, objects = shim_balance();
        made.cache = NULL;
        made.plan = NULL;
        memory.allocations = 0;
        memory.fail_at = k;
        kvleaf_status status = rig_make_cache(&made);
        if (!status)
            status = rig_make_plan(&made, &made.plan);
        bool hit = memory.allocations >= k;
        memory.fail_at = 0;
        assert_int_equal(status, hit ? KVLEAF_NO_MEMORY : KVLEAF_OK);
        failed += hit;
        kvleaf_plan_destroy(&made.plan);
        kvleaf_cache_destroy(&made.cache);
        assert_int_equal(memory.live, live);
        assert_int_equal(shim_balance(), objects);
        if (!hit)
            break;
    }
    assert_true(failed > 10);
    rig_close(&r);
    assert_int_equal(memory.live, 0);
    assert_int_equal(shim_balance(), 0);
}

/* One step of two sequences, one of which has a copy pending, its calls spread over three queues. */
typedef struct scene {
    rig r;
    cl_command_queue queues[3];
    rig_seq *parent, *child, *newcomer;
    rig_step step;
} scene;

static void set_scene(scene *s)
{
    rig *r = &s->r;
    s->child = rig_seq_fork(r, s->parent, 6);
    s->newcomer = rig_seq_new(r);
    rig_extend(r, s->child, 3);
    rig_extend(r, s->newcomer, 5);
    s->step = (rig_step){.seqs = {s->newcomer, s->child}, .num_q = {4, 2}, .n = 2};
}

static kvleaf_status build(scene *s, cl_event *event_out)
{
    kvleaf_batch_entry batch[2] = {{.seq = s->newcomer->seq, .num_q = 4}, {.seq = s->child->seq, .num_q = 2}};
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = s->queues[0], .event_out = event_out};
    return kvleaf_plan_build(s->r.plan, s->r.cache, batch, 2, &exec);
}

/* All calls of a step; *open tells whether the plan has an open step afterwards. */
static kvleaf_status try_step(scene *s, bool *open)
{
    cl_event event = NULL;
    kvleaf_status status = build(s, &event);
    *open = !status;
    if (event)
        shim_table()->ReleaseEvent(event);
    for (int32_t layer = 0; !status && layer < s->r.p.num_layers; layer++) {
        s->step.queue = s->queues[1];
        status = rig_append(&s->r, &s->step, layer);
        s->step.queue = s->queues[2];
        if (!status)
            status = rig_attend(&s->r, &s->step, layer);
    }
    s->step.queue = NULL;
    return status;
}

static void finish_all(const scene *s)
{
    for (int i = 0; i < 3; i++)
        assert_int_equal(clFinish(s->queues[i]), CL_SUCCESS);
}

static void run_step_faults(const cl_command_queue_properties kinds[3])
{
    scene s = {0};
    rig_params p = rig_defaults();
    p.steps_in_flight = 3;
    open_shimmed(&s.r, p);
    rig *r = &s.r;
    s.queues[0] = rig_queue(r, kinds[0]);
    for (int i = 1; i < 3; i++)
        s.queues[i] = kinds[i] == (cl_command_queue_properties)-1 ? s.queues[0] : rig_queue(r, kinds[i]);
    s.parent = rig_seq_new(r);
    rig_extend(r, s.parent, 7);
    rig_run(r, &(rig_step){.seqs = {s.parent}, .num_q = {7}, .n = 1, .queue = s.queues[0]}, "prompt");
    int64_t entries[SHIM_COUNT] = {0};
    for (int64_t k = 1; k < 1000; k++) {
        set_scene(&s);
        kvleaf_blocks_stats before = rig_stats(r), after;
        bool open = false;
        fail_call(k, -1);
        kvleaf_status status = try_step(&s, &open);
        int hit = shim.failed_entry;
        fail_call(0, -1);
        if (hit < 0) {
            assert_int_equal(status, KVLEAF_OK);
            ASSERT_OK(kvleaf_plan_rollback(r->plan));
            assert_true(k > 20);
            break;
        }
        entries[hit]++;
        if (status != KVLEAF_DEVICE && status != KVLEAF_NO_MEMORY)
            fail_msg("call %lld, %s: %s", (long long)k, shim_entry_name(hit), kvleaf_status_name(status));
        assert_int_equal(kvleaf_last_error()->cl_error, shim.error);
        if (open) {
            ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r->plan, NULL));
            ASSERT_OK(kvleaf_plan_rollback(r->plan));
        } else {
            after = rig_stats(r);
            assert_true(same_stats(&before, &after));
        }
        rig_check_lengths(r, s.child, 6);
        rig_check_lengths(r, s.newcomer, 0);
        finish_all(&s);
        rig_check_stored(r, s.parent, shim_entry_name(hit));
        /* The same step once more. */
        s.step.queue = s.queues[0];
        rig_run(r, &s.step, shim_entry_name(hit));
        rig_check_stored(r, s.parent, shim_entry_name(hit));
        rig_check_stored(r, s.child, shim_entry_name(hit));
        rig_check_stored(r, s.newcomer, shim_entry_name(hit));
        rig_seq_end(r, s.child);
        rig_seq_end(r, s.newcomer);
    }
    assert_true(entries[SHIM_EnqueueNDRangeKernel] > 5);
    assert_true(entries[SHIM_EnqueueWriteBuffer] == 1);
    assert_true(entries[SHIM_SetKernelArg] > 20);
    if (kinds[1] == 0)
        assert_true(entries[SHIM_Flush] > 0 && entries[SHIM_EnqueueMarkerWithWaitList] >= 0);
    for (int i = 0; i < 3; i++)
        if (i == 0 || s.queues[i] != s.queues[0])
            clReleaseCommandQueue(s.queues[i]);
    rig_close(r);
    assert_int_equal(shim_balance(), 0);
}

static void test_step_calls_fail(void **state)
{
    (void)state;
    const cl_command_queue_properties free_order = CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE;
    const cl_command_queue_properties same = (cl_command_queue_properties)-1;
    run_step_faults((cl_command_queue_properties[]){0, same, same});
    run_step_faults((cl_command_queue_properties[]){0, 0, 0});
    run_step_faults((cl_command_queue_properties[]){free_order, same, same});
    run_step_faults((cl_command_queue_properties[]){free_order, 0, free_order});
}

/* A step behind whose failing call others of the same step are still waiting to run: the next step's writes come after
 * them, or they would fall into what it wrote. */
static void test_enqueued_before_a_failure(void **state)
{
    (void)state;
    for (int32_t many = 0; many < 2; many++) {
        rig r;
        rig_params p = rig_defaults();
        p.queue_properties = many ? CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE : 0;
        open_shimmed(&r, p);
        cl_command_queue other = rig_queue(&r, 0);
        rig_seq *seq = rig_seq_new(&r);
        rig_extend(&r, seq, 6);
        rig_run_one(&r, seq, 6, KVLEAF_FAMILY_AUTO, "prompt");
        rig_seq *child = rig_seq_fork(&r, seq, 6);
        rig_extend(&r, child, 2);
        cl_int error;
        cl_event gate = clCreateUserEvent(kvleaf_device_context(r.device), &error);
        const kvleaf_batch_entry entry = {.seq = child->seq, .num_q = 2};
        const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = r.queue, .num_wait = 1, .wait_list = &gate};
        fail_call(2, SHIM_EnqueueNDRangeKernel); /* the table update is enqueued, the copy is not */
        ASSERT_STATUS(KVLEAF_DEVICE, kvleaf_plan_build(r.plan, r.cache, &entry, 1, &exec));
        fail_call(0, -1);
        const rig_step step = {.seqs = {child}, .num_q = {2}, .n = 1, .queue = other};
        ASSERT_OK(rig_build(&r, &step));
        clFlush(other);
        cl_event last = NULL;
        assert_int_equal(clEnqueueMarkerWithWaitList(other, 0, NULL, &last), CL_SUCCESS);
        clFlush(other);
        rig_pause();
        cl_int state_of = CL_COMPLETE;
        clGetEventInfo(last, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state_of, &state_of, NULL);
        assert_int_not_equal(state_of, CL_COMPLETE); /* it waits for what the failed step left behind */
        clSetUserEventStatus(gate, CL_COMPLETE);
        clReleaseEvent(gate);
        clReleaseEvent(last);
        rig_layers(&r, &step, "after the failure");
        rig_commit(&r, &step, NULL);
        rig_check_stored(&r, child, "after the failure");
        rig_check_stored(&r, seq, "after the failure");
        clReleaseCommandQueue(other);
        rig_close(&r);
    }
}

/* extend is the one call of the host side that may allocate. */
static void test_extend_allocations_fail(void **state)
{
    (void)state;
    support_memory memory = {0};
    rig_params p = rig_defaults();
    p.num_layers = 1;
    p.allocator = support_allocator(&memory);
    rig r;
    open_shimmed(&r, p);
    rig_seq *seq = rig_seq_new(&r);
    memory.allocations = 0;
    memory.fail_at = 1;
    ASSERT_STATUS(KVLEAF_NO_MEMORY, rig_try_extend(&r, seq, 5));
    rig_check_lengths(&r, seq, 0);
    memory.fail_at = 0;
    rig_extend(&r, seq, 64);
    memory.allocations = 0;
    memory.fail_at = 1;
    ASSERT_STATUS(KVLEAF_NO_MEMORY, rig_try_extend(&r, seq, 64)); /* its table has to grow */
    memory.fail_at = 0;
    rig_check_lengths(&r, seq, 0);
    rig_run_one(&r, seq, 64, KVLEAF_FAMILY_AUTO, "after failures");
    rig_seq_end(&r, seq);
    rig_close(&r);
    assert_int_equal(memory.live, 0);
}

/* 300 decode steps with forks and the end of sequences: no host memory, no buffer, program or kernel, nothing awaited.
 */
static void test_warm_steps(void **state)
{
    (void)state;
    enum { SEQS = 8, ROUNDS = 4, STEPS = 75 };
    support_memory memory = {0};
    rig_params p = rig_defaults();
    p.num_blocks = 256;
    p.allocator = support_allocator(&memory);
    rig r;
    open_shimmed(&r, p);
    static const int none[] = {SHIM_CreateBuffer,
                               SHIM_CreateProgramWithSource,
                               SHIM_CreateProgramWithBinary,
                               SHIM_BuildProgram,
                               SHIM_CreateKernel,
                               SHIM_WaitForEvents,
                               SHIM_Finish,
                               SHIM_EnqueueReadBuffer,
                               SHIM_CreateCommandQueue};
    int64_t warm = 0, counts[sizeof none / sizeof *none] = {0};
    kvleaf_seq seqs[SEQS] = {0};
    kvleaf_batch_entry batch[SEQS];
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = r.queue};
    const kvleaf_tokens prompt = {.struct_size = sizeof prompt, .count = 10},
                        one = {.struct_size = sizeof one, .count = 1};
    const kvleaf_tensor q = {.handle = r.q, .dtype = KVLEAF_F32}, k = {.handle = r.k, .dtype = KVLEAF_F32};
    const kvleaf_tensor v = {.handle = r.v, .dtype = KVLEAF_F32}, out = {.handle = r.out, .dtype = KVLEAF_F32};
    for (int32_t round = 0; round < ROUNDS; round++) {
        if (round == 1) { /* the first one warms the tables */
            warm = memory.allocations;
            for (size_t i = 0; i < sizeof none / sizeof *none; i++)
                counts[i] = shim.calls_of[none[i]];
        }
        ASSERT_OK(kvleaf_seq_create(r.cache, NULL, &seqs[0]));
        ASSERT_OK(kvleaf_seq_extend(r.cache, seqs[0], &prompt, NULL));
        batch[0] = (kvleaf_batch_entry){.seq = seqs[0], .num_q = 10};
        for (int32_t step = 0; step <= STEPS; step++) {
            int32_t n = step == 0 ? 1 : SEQS;
            for (int32_t i = 0; step > 0 && i < SEQS; i++) {
                if (step == 1 && i > 0)
                    ASSERT_OK(kvleaf_seq_fork(r.cache, seqs[0], 9, &seqs[i]));
                ASSERT_OK(kvleaf_seq_extend(r.cache, seqs[i], &one, NULL));
                batch[i] = (kvleaf_batch_entry){.seq = seqs[i], .num_q = 1};
            }
            kvleaf_status status;
            while ((status = kvleaf_plan_build(r.plan, r.cache, batch, n, &exec)) == KVLEAF_BUSY)
                clFinish(r.queue);
            ASSERT_OK(status);
            ASSERT_OK(kvleaf_append(r.plan, 0, &k, &v, &exec));
            ASSERT_OK(kvleaf_attend(r.plan, 0, &q, &out, NULL, &exec));
            ASSERT_OK(kvleaf_append_attend(r.plan, 1, &k, &v, &q, &out, NULL, &exec));
            ASSERT_OK(kvleaf_plan_commit(r.plan, NULL));
        }
        for (int32_t i = 0; i < SEQS; i++)
            ASSERT_OK(kvleaf_seq_destroy(r.cache, &seqs[i]));
    }
    assert_int_equal(memory.allocations, warm);
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        if (shim.calls_of[none[i]] != counts[i])
            fail_msg("%s was called in a warm step", shim_entry_name(none[i]));
    rig_close(&r);
    assert_int_equal(memory.live, 0);
    assert_int_equal(shim_balance(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_creation_calls_fail),     cmocka_unit_test(test_creation_allocations_fail),
        cmocka_unit_test(test_step_calls_fail),         cmocka_unit_test(test_enqueued_before_a_failure),
        cmocka_unit_test(test_extend_allocations_fail), cmocka_unit_test(test_warm_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
