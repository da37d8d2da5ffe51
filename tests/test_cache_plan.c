/* SPDX-License-Identifier: Apache-2.0 */
/* The states of a plan: what may follow what, every refusal by name, and that a refusal changes nothing. */
#include <stdlib.h>
#include <string.h>

#include "cache/cache.h"
#include "rig.h"
#include "stats.h"

static void test_batch_refused(void **state)
{
    (void)state;
    rig r, foreign;
    rig_params p = rig_defaults();
    p.max_tokens = 12;
    p.max_entries = 2;
    rig_open(&r, &p);
    rig_open(&foreign, &p);
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r), *far = rig_seq_new(&foreign), *gone = rig_seq_new(&r);
    kvleaf_seq stale = gone->seq;
    rig_seq_end(&r, gone);
    rig_extend(&r, a, 9);
    rig_extend(&r, b, 9);
    rig_extend(&foreign, far, 3);
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
#define ENTRY(seq_, num_q_, ...)                                                                                       \
    {                                                                                                                  \
        {.seq = a->seq, .num_q = 1},                                                                                   \
        {                                                                                                              \
            .seq = seq_, .num_q = num_q_, __VA_ARGS__                                                                  \
        }                                                                                                              \
    }
    const struct {
        kvleaf_batch_entry batch[3];
        int32_t n;
        kvleaf_status status;
        const char *field;
    } cases[] = {
        {ENTRY(b->seq, 1, .family = (kvleaf_family)3), 2, KVLEAF_INVALID, "family"},
        {ENTRY(b->seq, 1, .family = (kvleaf_family)-1), 2, KVLEAF_INVALID, "family"},
        {ENTRY(b->seq, 1, .mask = (kvleaf_mask)2), 2, KVLEAF_INVALID, "mask"},
        {ENTRY(b->seq, 1, .flags = 1), 2, KVLEAF_INVALID, "flags"},
        {ENTRY(b->seq, 1, .kv_seq = a->seq), 2, KVLEAF_UNSUPPORTED, "kv_seq"},
        {ENTRY(b->seq, 0, .flags = 0), 2, KVLEAF_INVALID, "num_q"},
        {ENTRY(b->seq, -4, .flags = 0), 2, KVLEAF_INVALID, "num_q"},
        {ENTRY(b->seq, 10, .flags = 0), 2, KVLEAF_INVALID, "num_q"},
        {ENTRY(b->seq, 12, .flags = 0), 2, KVLEAF_TOO_SMALL, "max_tokens"},
        {ENTRY(b->seq, INT32_MAX, .flags = 0), 2, KVLEAF_TOO_SMALL, "max_tokens"},
        {ENTRY(0, 1, .flags = 0), 2, KVLEAF_INVALID, "seq"},
        {ENTRY(stale, 1, .flags = 0), 2, KVLEAF_STALE, "seq"},
        {ENTRY(far->seq, 1, .flags = 0), 2, KVLEAF_FOREIGN, "seq"},
        {ENTRY(a->seq, 1, .flags = 0), 2, KVLEAF_INVALID, "seqs"},
        {ENTRY(b->seq, 1, .flags = 0), 3, KVLEAF_TOO_SMALL, "max_entries"},
        {ENTRY(b->seq, 1, .flags = 0), -1, KVLEAF_INVALID, "n"},
    };
    kvleaf_blocks_stats before = rig_stats(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ASSERT_FAILS(cases[i].status, cases[i].field,
                     kvleaf_plan_build(r.plan, r.cache, cases[i].batch, cases[i].n, &exec));
        rig_check_lengths(&r, a, 0);
        rig_check_lengths(&r, b, 0);
    }
    const kvleaf_batch_entry good = {.seq = a->seq, .num_q = 1};
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_build(NULL, r.cache, &good, 1, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_plan_build(r.plan, NULL, &good, 1, &exec));
    ASSERT_FAILS(KVLEAF_FOREIGN, "cache", kvleaf_plan_build(r.plan, foreign.cache, &good, 1, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "batch", kvleaf_plan_build(r.plan, r.cache, NULL, 1, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_plan_build(r.plan, r.cache, &good, 1, NULL));
    exec.queue = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "queue", kvleaf_plan_build(r.plan, r.cache, &good, 1, &exec));
    exec.queue = foreign.queue;
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_plan_build(r.plan, r.cache, &good, 1, &exec));
    kvleaf_blocks_stats after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    rig_run_one(&r, a, 9, KVLEAF_FAMILY_AUTO, "after refusals");
    rig_close(&foreign);
    rig_close(&r);
}

static void test_states(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.kv_layer[1] = 1;
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 9);
    rig_step step = {.seqs = {a}, .num_q = {5}, .n = 1};
    kvleaf_exec exec = rig_exec(&r, &step);
    const kvleaf_tensor any = {.handle = r.k, .dtype = KVLEAF_F32};
    /* No open step. */
    ASSERT_FAILS(KVLEAF_INVALID, "plan", rig_append(&r, &step, 0));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", rig_attend(&r, &step, 0));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_gather(r.plan, 0, &any, &any, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r.plan, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_rollback(r.plan));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(NULL, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_rollback(NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_append(NULL, 0, &any, &any, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_attend(NULL, 0, &any, &any, NULL, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_gather(NULL, 0, &any, &any, &exec));
    /* An open one. */
    ASSERT_OK(rig_build(&r, &step));
    ASSERT_FAILS(KVLEAF_BUSY, "plan", rig_build(&r, &step));
    ASSERT_STATUS(KVLEAF_BUSY, rig_try_extend(&r, a, 1));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_truncate(r.cache, a->seq, 0));
    kvleaf_seq handle = a->seq;
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_destroy(r.cache, &handle));
    int32_t too_many = 6, negative = -1;
    ASSERT_FAILS(KVLEAF_INVALID, "accepted", kvleaf_plan_commit(r.plan, &too_many));
    ASSERT_FAILS(KVLEAF_INVALID, "accepted", kvleaf_plan_commit(r.plan, &negative));
    ASSERT_FAILS(KVLEAF_INVALID, "layer", kvleaf_gather(r.plan, 2, &any, &any, &exec));
    rig_check_lengths(&r, a, 5);
    rig_layers(&r, &step, "nothing of this stopped the step");
    rig_commit(&r, &step, NULL);
    rig_close(&r);
}

/* After an append or attend that failed, whatever the reason, the step can only be rolled back. */
static void test_failed_steps(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.num_layers = 3;
    p.kv_layer[1] = 1;
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 6);
    rig_run_one(&r, a, 6, KVLEAF_FAMILY_AUTO, "before");
    rig_extend(&r, a, 3);
    cl_mem small = support_buffer(r.device, r.queue, 64, 0);
    const rig_step step = {.seqs = {a}, .num_q = {3}, .n = 1};
    const struct {
        const char *call, *field;
        int32_t layer;
        cl_mem first, second; /* k, v or q, out */
        kvleaf_dtype dtype;
        kvleaf_status status;
    } cases[] = {
        {"append", "layer", -1, r.k, r.v, KVLEAF_F32, KVLEAF_INVALID},
        {"append", "layer", 3, r.k, r.v, KVLEAF_F32, KVLEAF_INVALID},
        {"append", "layer", 1, r.k, r.v, KVLEAF_F32, KVLEAF_INVALID}, /* reads layer 0's */
        {"append", "k", 0, NULL, r.v, KVLEAF_F32, KVLEAF_INVALID},
        {"append", "v", 0, r.k, NULL, KVLEAF_F32, KVLEAF_INVALID},
        {"append", "k", 2, small, r.v, KVLEAF_F32, KVLEAF_TOO_SMALL},
        {"attend", "layer", 3, r.q, r.out, KVLEAF_F32, KVLEAF_INVALID},
        {"attend", "q", 0, NULL, r.out, KVLEAF_F32, KVLEAF_INVALID},
        {"attend", "q", 0, r.q, r.out, KVLEAF_F16, KVLEAF_INVALID},
        {"attend", "out", 0, r.q, small, KVLEAF_F32, KVLEAF_TOO_SMALL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(clFinish(r.queue), CL_SUCCESS); /* or all staging slots may be in flight */
        ASSERT_OK(rig_build(&r, &step));
        const kvleaf_tensor first = {.handle = cases[i].first, .dtype = cases[i].dtype};
        const kvleaf_tensor second = {.handle = cases[i].second, .dtype = cases[i].dtype};
        kvleaf_exec exec = rig_exec(&r, &step);
        kvleaf_status status = strcmp(cases[i].call, "append") == 0
                                   ? kvleaf_append(r.plan, cases[i].layer, &first, &second, &exec)
                                   : kvleaf_attend(r.plan, cases[i].layer, &first, &second, NULL, &exec);
        ASSERT_FAILS(cases[i].status, cases[i].field, status);
        ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(r.plan, NULL));
        ASSERT_FAILS(KVLEAF_INVALID, "plan", rig_append(&r, &step, 0));
        ASSERT_FAILS(KVLEAF_INVALID, "plan", rig_attend(&r, &step, 0));
        ASSERT_STATUS(KVLEAF_BUSY, rig_build(&r, &step));
        rig_check_lengths(&r, a, 9);
        ASSERT_OK(kvleaf_plan_rollback(r.plan));
        rig_check_lengths(&r, a, 6);
    }
    rig_check_stored(&r, a, "after failed steps");
    rig_run(&r, &step, "after failed steps");
    clReleaseMemObject(small);
    rig_close(&r);
}

/* Computes a step's tokens without attending: for prompts whose rows are not the topic. */
static void append_only(rig *r, const rig_step *step)
{
    ASSERT_OK(rig_build(r, step));
    for (int32_t layer = 0; layer < r->p.num_layers; layer++) {
        rig_load(r, step, layer);
        ASSERT_OK(rig_append(r, step, layer));
    }
    rig_commit(r, step, NULL);
}

/* What decode may read in a step is declared; more is refused before anything happens. */
static void test_declared_capacities(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.max_decode_keys = 1;
    p.num_blocks = 1024;
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    for (int32_t i = 0; i < 8; i++) {
        rig_extend(&r, a, 250);
        append_only(&r, &(rig_step){.seqs = {a}, .num_q = {250}, .n = 1, .family = KVLEAF_FAMILY_PREFILL});
    }
    rig_extend(&r, a, 40);
    const rig_step step = {.seqs = {a}, .num_q = {40}, .n = 1, .family = KVLEAF_FAMILY_DECODE};
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "max_decode_keys", rig_build(&r, &step));
    rig_check_lengths(&r, a, 2000);
    rig_run_one(&r, a, 40, KVLEAF_FAMILY_PREFILL, "as prefill");
    rig_close(&r);
}

/* Many samples of one long prompt in a pool little larger than the prompt: every row of the table is new at once. */
static void test_many_samples(void **state)
{
    (void)state;
    enum { SAMPLES = 64, PROMPT = 1000 };
    rig r;
    rig_params p = rig_defaults();
    p.num_layers = 1;
    p.num_blocks = PROMPT / 4 + SAMPLES;
    p.max_sequences = p.max_entries = SAMPLES;
    rig_open(&r, &p);
    rig_seq *prompt = rig_seq_new(&r);
    rig_extend(&r, prompt, PROMPT);
    while (prompt->committed < PROMPT) /* one chunk is all that a step of this plan takes */
        append_only(&r, &(rig_step){.seqs = {prompt}, .num_q = {PROMPT / 4}, .n = 1});
    kvleaf_batch_entry batch[SAMPLES] = {{.seq = prompt->seq, .num_q = 1}};
    const kvleaf_tokens one = {.struct_size = sizeof one, .count = 1};
    for (int32_t i = 1; i < SAMPLES; i++) {
        ASSERT_OK(kvleaf_seq_fork(r.cache, prompt->seq, PROMPT, &batch[i].seq));
        batch[i].num_q = 1;
    }
    for (int32_t i = 0; i < SAMPLES; i++)
        ASSERT_OK(kvleaf_seq_extend(r.cache, batch[i].seq, &one, NULL));
    assert_int_equal(rig_stats(&r).free, 0);
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    ASSERT_OK(kvleaf_plan_build(r.plan, r.cache, batch, SAMPLES, &exec));
    ASSERT_OK(kvleaf_plan_commit(r.plan, NULL));
    rig_close(&r);
}

/* Builds a step, letting the device finish what is in flight whenever that is asked for. */
static void build_at_last(rig *r, const rig_step *step)
{
    kvleaf_status status;
    for (int32_t tries = 0; (status = rig_build(r, step)) == KVLEAF_BUSY && tries < 10; tries++)
        assert_int_equal(clFinish(r->queue), CL_SUCCESS);
    ASSERT_OK(status);
}

/* More changed table entries than a staging slot takes go before the step; BUSY on the way keeps what has gone. */
static void test_more_changes_than_room(void **state)
{
    (void)state;
    for (int32_t slots = 1; slots < 3; slots++) {
        rig r;
        rig_params p = rig_defaults();
        p.num_layers = 1;
        p.steps_in_flight = slots;
        rig_open(&r, &p);
        r.plan->groups[0].max_updates = 3;
        rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
        rig_extend(&r, a, 38); /* with b's 12 entries: four slots full, the step's own the last */
        rig_extend(&r, b, 5);
        const rig_step step = {.seqs = {b, a}, .num_q = {5, 38}, .n = 2};
        const kvleaf_batch_entry batch[] = {{.seq = b->seq, .num_q = 5}, {.seq = a->seq, .num_q = 38}};
        cl_int error;
        cl_event gate = clCreateUserEvent(kvleaf_device_context(r.device), &error);
        assert_int_equal(error, CL_SUCCESS);
        kvleaf_exec exec = rig_exec(&r, &step);
        exec.num_wait = 1;
        exec.wait_list = &gate;
        ASSERT_STATUS(KVLEAF_BUSY, kvleaf_plan_build(r.plan, r.cache, batch, 2, &exec));
        rig_check_lengths(&r, a, 0);
        assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
        clReleaseEvent(gate);
        build_at_last(&r, &step);
        rig_layers(&r, &step, "prompts");
        rig_commit(&r, &step, NULL);
        rig_seq *child = rig_seq_fork(&r, a, 37); /* all of its entries are new to the device */
        rig_extend(&r, child, 2);
        rig_extend(&r, a, 1);
        const rig_step next = {.seqs = {child, a}, .num_q = {2, 1}, .n = 2};
        build_at_last(&r, &next);
        rig_layers(&r, &next, "a fork");
        rig_commit(&r, &next, NULL);
        rig_check_stored(&r, child, "child");
        rig_close(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch_refused), cmocka_unit_test(test_states),
        cmocka_unit_test(test_failed_steps),  cmocka_unit_test(test_declared_capacities),
        cmocka_unit_test(test_many_samples),  cmocka_unit_test(test_more_changes_than_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
