/* SPDX-License-Identifier: Apache-2.0 */
/* Order across queues: what a call enqueues runs after the call before it, on one queue, on several, on out-of-order
 * ones, however slow the producer is; wait lists and events; staging slots in flight; failures that show later;
 * threads. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

static cl_event make_gate(const rig *r)
{
    cl_int error = 0;
    cl_event gate = clCreateUserEvent(kvleaf_device_context(r->device), &error);
    assert_int_equal(error, CL_SUCCESS);
    return gate;
}

static void open_gate(cl_event gate)
{
    assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
    clReleaseEvent(gate);
}

static rig_params one_layer(void)
{
    rig_params p = rig_defaults();
    p.num_layers = 1;
    return p;
}

static kvleaf_status build_behind(rig *r, const rig_step *step, cl_uint num_wait, const cl_event *wait_list,
                                  cl_event *event_out)
{
    kvleaf_batch_entry batch[16] = {{0}};
    for (int32_t i = 0; i < step->n; i++)
        batch[i] = (kvleaf_batch_entry){.seq = step->seqs[i]->seq, .num_q = step->num_q[i]};
    kvleaf_exec exec = rig_exec(r, step);
    exec.num_wait = num_wait;
    exec.wait_list = wait_list;
    exec.event_out = event_out;
    return kvleaf_plan_build(r->plan, r->cache, batch, step->n, &exec);
}

/* Whether nothing has been written to `out` yet. */
static bool untouched(const rig *r, cl_command_queue queue)
{
    uint8_t first[4] = {0};
    assert_int_equal(clEnqueueReadBuffer(queue, r->out, CL_TRUE, 3 * rig_row_bytes(r, 0), 4, first, 0, NULL, NULL), 0);
    return first[0] == 0x5a && first[1] == 0x5a && first[2] == 0x5a && first[3] == 0x5a;
}

/* build, append and attend of one step on three queues of `kinds`, behind a gate; meanwhile the sequence before gives
 * its blocks to the one after, whose step is built behind. vllm #45704. */
static void run_gated(const cl_command_queue_properties kinds[3])
{
    rig r;
    rig_params p = one_layer();
    p.num_blocks = 5;
    rig_open(&r, &p);
    cl_command_queue queues[3] = {NULL}, look = rig_queue(&r, 0);
    for (int i = 0; i < 3; i++)
        queues[i] = kinds[i] == (cl_command_queue_properties)-1 ? queues[0] : rig_queue(&r, kinds[i]);
    for (int32_t round = 0; round < 3; round++) {
        rig_seq *seq = rig_seq_new(&r), *next;
        cl_event gate = make_gate(&r), done = NULL;
        rig_extend(&r, seq, 17);
        rig_step step = {.seqs = {seq}, .num_q = {17}, .n = 1, .queue = queues[0]};
        rig_load(&r, &step, 0);
        ASSERT_OK(build_behind(&r, &step, 1, &gate, NULL));
        step.queue = queues[1];
        ASSERT_OK(rig_append(&r, &step, 0));
        step.queue = queues[2];
        ASSERT_OK(rig_attend(&r, &step, 0));
        for (int i = 0; i < 3; i++)
            clFlush(queues[i]);
        rig_pause();
        assert_true(untouched(&r, look));
        rig_seq former = *seq; /* as it is before the step counts */
        rig_commit(&r, &step, NULL);
        /* The blocks go to another while all that is still waiting; its own writes wait too. */
        rig_step after = step;
        rig_seq_end(&r, seq);
        next = rig_seq_new(&r);
        rig_extend(&r, next, 20);
        after.seqs[0] = next;
        after.num_q[0] = 20;
        after.queue = queues[round];
        ASSERT_OK(build_behind(&r, &after, 0, NULL, &done));
        clFlush(after.queue);
        rig_pause();
        cl_int state = CL_COMPLETE;
        assert_int_equal(clGetEventInfo(done, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL), 0);
        assert_int_not_equal(state, CL_COMPLETE);
        open_gate(gate);
        assert_int_equal(clWaitForEvents(1, &done), CL_SUCCESS);
        clReleaseEvent(done);
        rig_check(&r, &(rig_step){.seqs = {&former}, .num_q = {17}, .n = 1, .queue = look}, 0, "behind a gate");
        rig_layers(&r, &after, "the next owner of the blocks");
        rig_commit(&r, &after, NULL);
        rig_check_stored(&r, next, "the next owner of the blocks");
        rig_seq_end(&r, next);
    }
    for (int i = 0; i < 3; i++)
        if (i == 0 || queues[i] != queues[0])
            clReleaseCommandQueue(queues[i]);
    clReleaseCommandQueue(look);
    rig_close(&r);
}

static void test_gated(void **state)
{
    (void)state;
    const cl_command_queue_properties free_order = CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE;
    const cl_command_queue_properties same = (cl_command_queue_properties)-1;
    const cl_command_queue_properties kinds[][3] = {
        {0, same, same},          {0, 0, 0},          {0, 0, same},
        {free_order, same, same}, {0, free_order, 0}, {free_order, free_order, free_order},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        run_gated(kinds[i]);
}

/* Ordinary steps, every call on another queue. */
static void test_alternating(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    cl_command_queue queues[3] = {r.queue, rig_queue(&r, 0), rig_queue(&r, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE)};
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 6);
    rig_run_one(&r, a, 6, KVLEAF_FAMILY_AUTO, "prompt");
    for (int32_t i = 0; i < 12; i++) {
        rig_seq *b = rig_seq_fork(&r, a, a->committed - 1);
        rig_extend(&r, a, 1);
        rig_extend(&r, b, 2);
        rig_run(&r, &(rig_step){.seqs = {b, a}, .num_q = {2, 1}, .n = 2, .queue = queues[i * 7 % 3]}, "alternating");
        rig_check_stored(&r, a, "alternating");
        rig_check_stored(&r, b, "alternating");
        rig_seq_end(&r, b);
    }
    clReleaseCommandQueue(queues[1]);
    clReleaseCommandQueue(queues[2]);
    rig_close(&r);
}

/* Caller's wait lists of every length, with and without a tail to wait for as well. */
static void test_wait_lists(void **state)
{
    (void)state;
    static const cl_uint lengths[] = {1, 2, 15, 16, 17, 40};
    rig r;
    rig_params p = one_layer();
    rig_open(&r, &p);
    cl_command_queue second = rig_queue(&r, 0);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 64);
    for (size_t i = 0; i < 2 * sizeof lengths / sizeof *lengths; i++) {
        cl_uint count = lengths[i / 2];
        cl_event gates[40], done = NULL;
        for (cl_uint j = 0; j < count; j++)
            gates[j] = make_gate(&r);
        rig_step step = {.seqs = {seq}, .num_q = {3}, .n = 1, .queue = i < 2 ? NULL : i % 2 ? second : r.queue};
        ASSERT_OK(build_behind(&r, &step, count, gates, &done));
        clFlush(step.queue ? step.queue : r.queue);
        cl_int status = CL_COMPLETE;
        rig_pause();
        for (cl_uint j = count; j-- > 0;) {
            clGetEventInfo(done, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL);
            assert_int_not_equal(status, CL_COMPLETE);
            open_gate(gates[j]);
        }
        assert_int_equal(clWaitForEvents(1, &done), CL_SUCCESS);
        clReleaseEvent(done);
        rig_layers(&r, &step, "behind a wait list");
        rig_commit(&r, &step, NULL);
    }
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    const kvleaf_batch_entry entry = {.seq = seq->seq, .num_q = 1};
    exec.num_wait = 1;
    ASSERT_FAILS(KVLEAF_INVALID, "wait_list", kvleaf_plan_build(r.plan, r.cache, &entry, 1, &exec));
    clReleaseCommandQueue(second);
    rig_close(&r);
}

/* One in-order queue: no marker, no flush, nothing waited for; events are those of the uploads and those asked for. */
static void test_one_queue_makes_no_events(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.steps_in_flight = 2;
    shim_reset();
    p.opencl = shim_table();
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    for (int32_t i = 0; i < 10; i++) {
        rig_extend(&r, seq, 1);
        rig_run_one(&r, seq, 1, KVLEAF_FAMILY_AUTO, "step");
        assert_true(shim.events <= 2);
    }
    assert_int_equal(shim.calls_of[SHIM_EnqueueMarkerWithWaitList], 0);
    assert_int_equal(shim.calls_of[SHIM_Flush], 0);
    assert_int_equal(shim.calls_of[SHIM_Finish], 0);
    assert_int_equal(shim.calls_of[SHIM_WaitForEvents], 0);
    int64_t before = shim.events;
    cl_event events[4] = {NULL};
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    rig_extend(&r, seq, 2);
    const rig_step step = {.seqs = {seq}, .num_q = {2}, .n = 1};
    ASSERT_OK(build_behind(&r, &step, 0, NULL, &events[0]));
    rig_load(&r, &step, 0);
    const kvleaf_tensor k = {.handle = r.k, .dtype = KVLEAF_F32}, q = {.handle = r.q, .dtype = KVLEAF_F32};
    const kvleaf_tensor v = {.handle = r.v, .dtype = KVLEAF_F32}, out = {.handle = r.out, .dtype = KVLEAF_F32};
    exec.event_out = &events[1];
    ASSERT_OK(kvleaf_append(r.plan, 0, &k, &v, &exec));
    exec.event_out = &events[2];
    ASSERT_OK(kvleaf_attend(r.plan, 0, &q, &out, NULL, &exec));
    exec.event_out = &events[3];
    cl_mem room = support_buffer(r.device, r.queue, 65536, 0);
    const kvleaf_tensor to = {.handle = room, .dtype = KVLEAF_F32},
                        to_v = {.handle = room, .dtype = KVLEAF_F32, .offset = 32768};
    ASSERT_OK(kvleaf_gather(r.plan, 0, &to, &to_v, &exec));
    assert_int_equal(clWaitForEvents(4, events), CL_SUCCESS);
    for (int i = 0; i < 4; i++)
        shim_table()->ReleaseEvent(events[i]);
    assert_true(shim.events <= before + 1);
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    clReleaseMemObject(room);
    rig_close(&r);
    assert_int_equal(shim_balance(), 0);
}

/* The queue of the call before is retained, and a buffer that holds all of a call's tensors is one: where a layer is
 * attended, the driver is not asked again. Another's queue is still found out. */
static void test_asked_once(void **state)
{
    (void)state;
    rig r, foreign;
    rig_params p = rig_defaults();
    shim_reset();
    p.opencl = shim_table();
    rig_open(&r, &p);
    p.opencl = NULL;
    rig_open(&foreign, &p);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 1);
    const rig_step step = {.seqs = {seq}, .num_q = {1}, .n = 1};
    ASSERT_OK(rig_build(&r, &step));
    kvleaf_exec exec = rig_exec(&r, &step);
    cl_mem room = support_buffer(r.device, r.queue, 4096, 0);
    for (int32_t layer = 0; layer < 2; layer++) {
        const bool shared = layer == 1;
        const kvleaf_tensor q = {.handle = room, .dtype = KVLEAF_F32};
        const kvleaf_tensor k = {.handle = shared ? room : r.k, .offset = 1024, .dtype = KVLEAF_F32};
        const kvleaf_tensor v = {.handle = shared ? room : r.v, .offset = 2048, .dtype = KVLEAF_F32};
        const kvleaf_tensor out = {.handle = shared ? room : r.out, .offset = 3072, .dtype = KVLEAF_F32};
        int64_t queues = shim.calls_of[SHIM_GetCommandQueueInfo], buffers = shim.calls_of[SHIM_GetMemObjectInfo];
        ASSERT_OK(kvleaf_append_attend(r.plan, layer, &k, &v, &q, &out, NULL, &exec));
        assert_int_equal(shim.calls_of[SHIM_GetCommandQueueInfo], queues);
        assert_int_equal(shim.calls_of[SHIM_GetMemObjectInfo] - buffers, shared ? 2 : 8); /* context, size */
    }
    const kvleaf_tensor q = {.handle = room, .dtype = KVLEAF_F32};
    const kvleaf_tensor beyond = {.handle = room, .offset = 4092, .dtype = KVLEAF_F32};
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "out", kvleaf_attend(r.plan, 0, &q, &beyond, NULL, &exec));
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    ASSERT_OK(rig_build(&r, &step));
    exec.queue = foreign.queue;
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_attend(r.plan, 0, &q, &q, NULL, &exec));
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    clReleaseMemObject(room);
    rig_close(&foreign);
    rig_close(&r);
    assert_int_equal(shim_balance(), 0);
}

/* All staging slots in flight: BUSY, nothing changed, and over when the device has caught up. */
static void test_busy(void **state)
{
    (void)state;
    rig r;
    rig_params p = one_layer();
    p.steps_in_flight = 2;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r), *child;
    rig_extend(&r, seq, 6);
    rig_run_one(&r, seq, 6, KVLEAF_FAMILY_AUTO, "prompt");
    child = rig_seq_fork(&r, seq, 6);
    rig_extend(&r, seq, 3);
    cl_event gate = make_gate(&r);
    const rig_step step = {.seqs = {seq}, .num_q = {1}, .n = 1};
    for (int32_t i = 0; i < 2; i++) {
        ASSERT_OK(build_behind(&r, &step, i == 0, i == 0 ? &gate : NULL, NULL));
        ASSERT_OK(kvleaf_plan_rollback(r.plan));
    }
    rig_extend(&r, child, 1); /* its copy is pending */
    kvleaf_blocks_stats before = rig_stats(&r);
    const rig_step more = {.seqs = {seq, child}, .num_q = {1, 1}, .n = 2};
    for (int32_t i = 0; i < 3; i++) {
        ASSERT_FAILS(KVLEAF_BUSY, "steps_in_flight", rig_build(&r, &more));
        rig_check_lengths(&r, seq, 6);
        rig_check_lengths(&r, child, 6);
        kvleaf_blocks_stats after = rig_stats(&r);
        assert_true(same_stats(&before, &after));
    }
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_rollback(r.plan)); /* no step was opened */
    open_gate(gate);
    clFinish(r.queue);
    rig_run(&r, &more, "after BUSY");
    rig_close(&r);
}

/* A command that fails on the device after it was enqueued: DEVICE from the next build on, with OpenCL's code. */
static void run_device_failure(bool many)
{
    rig r;
    rig_params p = one_layer();
    shim_reset();
    p.opencl = shim_table();
    rig_open(&r, &p);
    cl_command_queue second = rig_queue(&r, 0);
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 6);
    rig_run_one(&r, seq, 6, KVLEAF_FAMILY_AUTO, "prompt");
    rig_extend(&r, seq, 3);
    cl_event gate = make_gate(&r), done = NULL;
    rig_step step = {.seqs = {seq}, .num_q = {1}, .n = 1, .queue = many ? second : NULL};
    ASSERT_OK(build_behind(&r, &step, 1, &gate, &done));
    clFlush(many ? second : r.queue);
    assert_int_equal(clSetUserEventStatus(gate, -1234), CL_SUCCESS);
    clWaitForEvents(1, &done);
    if (many)
        ASSERT_STATUS(KVLEAF_DEVICE, rig_append(&r, &step, 0));
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    for (int32_t i = 0; i < 3; i++) {
        ASSERT_STATUS(KVLEAF_DEVICE, rig_build(&r, &step));
        assert_true(kvleaf_last_error()->cl_error < 0);
        ASSERT_STATUS(KVLEAF_DEVICE, rig_try_extend(&r, seq, 1));
    }
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r.plan, NULL));
    rig_check_lengths(&r, seq, 6);
    rig_check_stored(&r, seq, "readable still");
    ASSERT_OK(kvleaf_seq_truncate(r.cache, seq->seq, 3));
    rig_seq_end(&r, seq);
    assert_int_equal(rig_stats(&r).used, 0);
    clReleaseEvent(gate);
    shim.events--; /* `done` was made behind the shim's table and is released past it */
    clReleaseEvent(done);
    clReleaseCommandQueue(second);
    rig_close(&r);
    assert_int_equal(shim_balance(), 0);
}

static void test_device_failure(void **state)
{
    (void)state;
    run_device_failure(false);
    run_device_failure(true);
}

typedef struct worker {
    rig *r;
    rig_step step;
    cl_command_queue queue;
    kvleaf_status status;
    int32_t rounds;
} worker;

static void *run_worker(void *data)
{
    worker *w = data;
    for (int32_t i = 0; i < w->rounds && !w->status; i++) {
        w->status = rig_append(w->r, &w->step, 0);
        if (!w->status)
            w->status = rig_attend(w->r, &w->step, 0);
    }
    return NULL;
}

/* Append and attend of an open plan beside every other call on its cache, on another queue. */
static void test_threads(void **state)
{
    (void)state;
    rig r;
    rig_params p = one_layer();
    rig_open(&r, &p);
    kvleaf_plan *other = NULL;
    ASSERT_OK(rig_make_plan(&r, &other));
    cl_command_queue queue = rig_queue(&r, 0);
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
    rig_extend(&r, a, 12);
    rig_extend(&r, b, 6);
    rig_run_one(&r, b, 6, KVLEAF_FAMILY_AUTO, "prompt");
    worker w = {.r = &r, .step = {.seqs = {a}, .num_q = {12}, .n = 1, .plan = other, .queue = queue}, .rounds = 200};
    ASSERT_OK(rig_build(&r, &w.step));
    rig_load(&r, &w.step, 0);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_worker, &w), 0);
    for (int32_t i = 0; i < 60; i++) {
        rig_seq *child = rig_seq_fork(&r, b, 6);
        rig_extend(&r, child, 1 + i % 5);
        const rig_step step = {.seqs = {child}, .num_q = {1}, .n = 1};
        kvleaf_status status = rig_build(&r, &step);
        assert_true(status == KVLEAF_OK || status == KVLEAF_BUSY);
        if (status == KVLEAF_OK)
            ASSERT_OK(kvleaf_plan_rollback(r.plan));
        rig_stats(&r);
        rig_seq_end(&r, child);
    }
    pthread_join(thread, NULL);
    assert_int_equal(w.status, KVLEAF_OK);
    clFinish(queue);
    rig_check(&r, &w.step, 0, "beside other calls");
    rig_commit(&r, &w.step, NULL);
    rig_check_stored(&r, a, "beside other calls");
    rig_check_stored(&r, b, "beside other calls");
    kvleaf_plan_destroy(&other);
    clReleaseCommandQueue(queue);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gated),      cmocka_unit_test(test_alternating),
        cmocka_unit_test(test_wait_lists), cmocka_unit_test(test_one_queue_makes_no_events),
        cmocka_unit_test(test_busy),       cmocka_unit_test(test_device_failure),
        cmocka_unit_test(test_threads),    cmocka_unit_test(test_asked_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
