/* SPDX-License-Identifier: Apache-2.0 */
/* Every call of a cache that changes something, with each of its OpenCL calls and each of its allocations failing in
 * turn: afterwards the host's state is what it was, committed tokens have their bytes, and the same call succeeds. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

enum { WINDOW = 10, SEQS = 4, PROMPT = 22, ENTRIES = 16, MOST = 1000 };

typedef struct scene {
    rig r;
    cl_command_queue second;
    support_memory memory;
    rig_seq *seqs[SEQS];
    int32_t prompt[2 * PROMPT];
    kvleaf_seq made;
    uint8_t *bytes;
    uint64_t size;
    bool out;    /* seqs[1] is in host memory */
    bool opened; /* the call got past plan_build, which has made the pending copies */
} scene;

static kvleaf_exec exec_of(const scene *s)
{
    return rig_exec(&s->r, &(rig_step){0});
}

/* A committed prompt with known ids, in seqs[0]. */
static void with_prompt(scene *s)
{
    for (int32_t i = 0; i < 2 * PROMPT; i++)
        s->prompt[i] = 1 + i;
    s->seqs[0] = rig_seq_new(&s->r);
    rig_extend_with(&s->r, s->seqs[0], s->prompt, PROMPT);
    rig_run_one(&s->r, s->seqs[0], PROMPT, KVLEAF_FAMILY_PREFILL, "prompt");
}

/* And a fork of it whose last block is to be copied before it is written. */
static void with_fork(scene *s)
{
    with_prompt(s);
    s->seqs[1] = rig_seq_fork(&s->r, s->seqs[0], PROMPT);
    rig_extend(&s->r, s->seqs[1], 3);
}

/* And one that finds a part of the prompt, the last of it by a copy. */
static void with_match(scene *s)
{
    with_fork(s);
    s->seqs[2] = rig_seq_new(&s->r);
    s->prompt[PROMPT - 1] += 100;
    rig_extend_with(&s->r, s->seqs[2], s->prompt, PROMPT + 4);
    assert_true(s->seqs[2]->committed > 0);
}

static void with_empty(scene *s)
{
    with_prompt(s);
    s->seqs[1] = rig_seq_new(&s->r);
}

/* Longer than any table that was there before, so that it has to grow. */
static kvleaf_status extend(scene *s)
{
    const kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = s->prompt, .count = PROMPT + 13};
    int64_t cached = 0;
    kvleaf_status status = kvleaf_seq_extend(s->r.cache, s->seqs[1]->seq, &tokens, &cached);
    if (status)
        return status;
    assert_true(cached >= PROMPT / 4 * 4);
    s->seqs[1]->committed = (int32_t)cached;
    s->seqs[1]->extended = PROMPT + 13;
    memcpy(s->seqs[1]->tokens, s->prompt, sizeof s->prompt);
    return KVLEAF_OK;
}

static kvleaf_status fork_it(scene *s)
{
    return kvleaf_seq_fork(s->r.cache, s->seqs[0]->seq, PROMPT, &s->made);
}

static void check_fork(scene *s)
{
    kvleaf_seq_info info = {.struct_size = sizeof info};
    ASSERT_OK(kvleaf_seq_query(s->r.cache, s->made, &info));
    assert_int_equal(info.committed, PROMPT);
    ASSERT_OK(kvleaf_seq_destroy(s->r.cache, &s->made));
}

static rig_step step_of(const scene *s)
{
    return (rig_step){.seqs = {s->seqs[2], s->seqs[1]}, .num_q = {3, 2}, .n = 2};
}

/* plan_build and all layers, on two queues. */
static kvleaf_status step(scene *s)
{
    rig_step on = step_of(s);
    kvleaf_status status = rig_build(&s->r, &on);
    s->opened = !status;
    for (int32_t layer = 0; !status && layer < s->r.p.num_layers; layer++) {
        on.queue = NULL;
        rig_load(&s->r, &on, layer);
        status = rig_append(&s->r, &on, layer);
        on.queue = s->second;
        if (!status)
            status = rig_attend(&s->r, &on, layer);
    }
    if (status && s->opened) {
        kvleaf_error error = *kvleaf_last_error();
        ASSERT_FAILS(KVLEAF_INVALID, "plan", kvleaf_plan_commit(s->r.plan, NULL));
        ASSERT_OK(kvleaf_plan_rollback(s->r.plan));
        assert_int_equal(error.status, status);
    }
    return status;
}

static void check_step(scene *s)
{
    const rig_step on = step_of(s);
    rig_commit(&s->r, &on, NULL);
}

static void with_open_step(scene *s)
{
    with_match(s);
    const rig_step on = step_of(s);
    ASSERT_OK(rig_build(&s->r, &on));
    rig_layers(&s->r, &on, "step");
}

static kvleaf_status commit(scene *s)
{
    kvleaf_status status = kvleaf_plan_commit(s->r.plan, NULL);
    for (int32_t i = 0; !status && i < 2; i++)
        s->seqs[2 - i]->committed += step_of(s).num_q[i];
    return status;
}

static void with_beams(scene *s)
{
    with_prompt(s);
    for (int32_t i = 1; i < SEQS; i++) {
        s->seqs[i] = rig_seq_fork(&s->r, s->seqs[0], PROMPT);
        rig_extend(&s->r, s->seqs[i], 1 + 4 * i); /* of different lengths, so that tables have to grow */
        rig_run_one(&s->r, s->seqs[i], 1 + 4 * i, KVLEAF_FAMILY_AUTO, "beam");
    }
}

static kvleaf_status rearrange(scene *s)
{
    static const int32_t parents[SEQS] = {3, 0, 2, 3};
    kvleaf_seq seqs[SEQS];
    rig_seq before[SEQS];
    for (int32_t i = 0; i < SEQS; i++) {
        before[i] = *s->seqs[i];
        seqs[i] = before[i].seq;
    }
    kvleaf_status status = kvleaf_seq_rearrange(s->r.cache, seqs, parents, SEQS);
    for (int32_t i = 0; !status && i < SEQS; i++) {
        *s->seqs[i] = before[parents[i]];
        s->seqs[i]->seq = seqs[i];
    }
    return status;
}

static kvleaf_status swap_out(scene *s)
{
    const kvleaf_exec exec = exec_of(s);
    kvleaf_status status = kvleaf_seq_swap_out(s->r.cache, s->seqs[1]->seq, &exec);
    s->out = !status;
    return status;
}

static kvleaf_status swap_in(scene *s)
{
    const kvleaf_exec exec = exec_of(s);
    kvleaf_status status = kvleaf_seq_swap_in(s->r.cache, s->seqs[1]->seq, &exec);
    s->out = s->out && status;
    return status;
}

/* More than one thing to copy first. */
static void with_fork_beside(scene *s)
{
    with_fork(s);
    rig_extend(&s->r, s->seqs[0], 2);
}

static void come_back(scene *s)
{
    rig_run_one(&s->r, s->seqs[0], s->seqs[0]->extended - s->seqs[0]->committed, KVLEAF_FAMILY_AUTO, "others");
    ASSERT_OK(swap_in(s));
    rig_run_one(&s->r, s->seqs[1], 3, KVLEAF_FAMILY_AUTO, "on after it came back");
}

/* Out, its blocks in other hands, and one that is there has a copy pending. */
static void with_swapped(scene *s)
{
    with_fork(s);
    ASSERT_OK(swap_out(s));
    s->seqs[2] = rig_seq_fork(&s->r, s->seqs[0], PROMPT - 1);
    rig_extend(&s->r, s->seqs[2], 7);
}

static void go_on(scene *s)
{
    rig_run(&s->r, &(rig_step){.seqs = {s->seqs[1], s->seqs[2]}, .num_q = {3, 7}, .n = 2}, "on after it came back");
}

static kvleaf_status export_some(scene *s)
{
    const kvleaf_exec exec = exec_of(s);
    s->bytes = realloc(s->bytes, (size_t)kvleaf_cache_token_bytes(s->r.cache, 9));
    return kvleaf_seq_export(s->r.cache, s->seqs[1]->seq, PROMPT - 9, 9, s->bytes,
                             kvleaf_cache_token_bytes(s->r.cache, 9), &exec);
}

static void check_export(scene *s)
{
    uint64_t size;
    uint8_t *expected = rig_rows(&s->r, s->seqs[1], PROMPT - 9, 9, &size);
    assert_memory_equal(s->bytes, expected, (size_t)size);
    free(expected);
}

static void with_rows(scene *s)
{
    with_fork(s);
    s->bytes = rig_rows(&s->r, s->seqs[1], PROMPT - 3, 6, &s->size);
}

static kvleaf_status import_some(scene *s)
{
    const kvleaf_exec exec = exec_of(s);
    kvleaf_status status = kvleaf_seq_import(s->r.cache, s->seqs[1]->seq, PROMPT - 3, 6, s->bytes, s->size, &exec);
    if (!status)
        s->seqs[1]->committed += 3;
    return status;
}

static const struct {
    const char *name;
    void (*prepare)(scene *s);
    kvleaf_status (*run)(scene *s);
    void (*check)(scene *s);    /* or NULL */
    int64_t calls, allocations; /* that can fail in it, at least */
} operations[] = {
    {"extend with hits", with_empty, extend, NULL, 0, 1}, {"fork", with_prompt, fork_it, check_fork, 0, 0},
    {"step", with_match, step, check_step, 60, 0},        {"commit", with_open_step, commit, NULL, 0, 0},
    {"rearrange", with_beams, rearrange, NULL, 0, 1},     {"swap out", with_fork_beside, swap_out, come_back, 20, 0},
    {"swap in", with_swapped, swap_in, go_on, 18, 0},     {"export", with_fork, export_some, check_export, 10, 1},
    {"import", with_rows, import_some, NULL, 10, 1},
};

/* All that can be asked about the cache and its sequences. */
typedef struct picture {
    kvleaf_blocks_stats stats, groups[2];
    kvleaf_seq_info infos[SEQS];
    int32_t tables[SEQS][2][ENTRIES], counts[SEQS][2];
} picture;

static void take_picture(const scene *s, picture *p)
{
    memset(p, 0, sizeof *p);
    p->stats = rig_stats(&s->r);
    for (int32_t g = 0; g < 2; g++) {
        p->groups[g].struct_size = sizeof p->groups[g];
        ASSERT_OK(kvleaf_blocks_query_group(kvleaf_cache_blocks(s->r.cache), g, &p->groups[g]));
    }
    for (int32_t i = 0; i < SEQS; i++) {
        if (!s->seqs[i])
            continue;
        p->infos[i].struct_size = sizeof p->infos[i];
        ASSERT_OK(kvleaf_seq_query(s->r.cache, s->seqs[i]->seq, &p->infos[i]));
        for (int32_t g = 0; g < 2 && !(s->out && i == 1); g++)
            ASSERT_OK(kvleaf_seq_table(s->r.cache, s->seqs[i]->seq, g, p->tables[i][g], ENTRIES, &p->counts[i][g]));
    }
}

static bool same_info(const kvleaf_seq_info *a, const kvleaf_seq_info *b)
{
    return a->committed == b->committed && a->planned == b->planned && a->extended == b->extended &&
           a->num_blocks == b->num_blocks && a->blocks_unique == b->blocks_unique &&
           a->blocks_shared == b->blocks_shared && a->user == b->user && a->salt == b->salt && a->cached == b->cached &&
           a->known == b->known && a->swapped == b->swapped && a->peak_blocks == b->peak_blocks;
}

static bool same_picture(const picture *a, const picture *b)
{
    for (int32_t i = 0; i < SEQS; i++)
        if (!same_info(&a->infos[i], &b->infos[i]))
            return false;
    return same_stats(&a->stats, &b->stats) && same_stats(&a->groups[0], &b->groups[0]) &&
           same_stats(&a->groups[1], &b->groups[1]) && !memcmp(a->tables, b->tables, sizeof a->tables) &&
           !memcmp(a->counts, b->counts, sizeof a->counts);
}

static void check_stored(scene *s, const char *what)
{
    assert_int_equal(clFinish(s->r.queue), CL_SUCCESS);
    assert_int_equal(clFinish(s->second), CL_SUCCESS);
    const kvleaf_block_copy *copies;
    int32_t pending;
    ASSERT_OK(kvleaf_blocks_copies(kvleaf_cache_blocks(s->r.cache), 0, &copies, &pending));
    for (int32_t i = 0; i < SEQS; i++) {
        if (!s->seqs[i] || (s->out && i == 1))
            continue;
        rig_seq seq = *s->seqs[i];
        if (pending && i > 0) /* its last block waits for a copy */
            seq.committed = seq.committed / s->r.p.block_size * s->r.p.block_size;
        rig_check_stored(&s->r, &seq, what);
    }
}

static void run_operation(scene *s, size_t at, bool allocations)
{
    const char *name = operations[at].name;
    picture before, after;
    int64_t k = 0;
    kvleaf_status status;
    operations[at].prepare(s);
    do {
        take_picture(s, &before);
        s->opened = false;
        shim.failed_entry = -1;
        shim.fail_at = allocations ? 0 : shim.calls + ++k;
        s->memory.fail_at = allocations ? s->memory.allocations + ++k : 0;
        status = operations[at].run(s);
        bool hit = allocations ? s->memory.allocations >= s->memory.fail_at : shim.failed_entry >= 0;
        shim.fail_at = s->memory.fail_at = 0;
        if (hit != (status != KVLEAF_OK) || k > MOST)
            fail_msg("%s, %s %lld: %s", name, allocations ? "allocation" : "call", (long long)k,
                     kvleaf_status_name(status));
        if (!hit)
            break;
        if (status != (allocations ? KVLEAF_NO_MEMORY : KVLEAF_DEVICE) && shim.failed_entry != SHIM_CreateBuffer)
            fail_msg("%s, %s %lld: %s", name, allocations ? "allocation" : "call", (long long)k,
                     kvleaf_status_name(status));
        take_picture(s, &after);
        if (!s->opened && !same_picture(&before, &after))
            fail_msg("%s, %s %lld (%s): the state is not what it was", name, allocations ? "allocation" : "call",
                     (long long)k, allocations ? "" : shim_entry_name(shim.failed_entry));
        check_stored(s, name);
    } while (true);
    if (operations[at].check)
        operations[at].check(s);
    check_stored(s, name);
    if (k - 1 < (allocations ? operations[at].allocations : operations[at].calls))
        fail_msg("%s: only %lld to fail", name, (long long)(k - 1));
    for (int32_t i = 0; i < SEQS; i++) {
        if (s->seqs[i])
            rig_seq_end(&s->r, s->seqs[i]);
        s->seqs[i] = NULL;
    }
    free(s->bytes);
    s->bytes = NULL;
    ASSERT_OK(kvleaf_prefix_clear(s->r.cache));
    if (rig_stats(&s->r).used)
        fail_msg("%s: %d blocks are used when all is gone, %d of them pinned", name, rig_stats(&s->r).used,
                 rig_stats(&s->r).pinned);
}

static void test_every_failure(void **state)
{
    (void)state;
    static const struct {
        cl_command_queue_properties queue;
        bool allocations;
    } ways[] = {{0, false}, {CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, false}, {0, true}};
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        scene s = {0};
        rig_params p = rig_defaults();
        p.window[1] = WINDOW;
        p.swap_blocks = 20;
        p.num_blocks = 40;
        p.steps_in_flight = 2;
        p.queue_properties = ways[way].queue;
        p.allocator = support_allocator(&s.memory);
        p.opencl = shim_table();
        shim_reset();
        rig_open(&s.r, &p);
        s.second = support_queue(s.r.device);
        for (size_t at = 0; at < sizeof operations / sizeof *operations; at++)
            run_operation(&s, at, ways[way].allocations);
        shim_table()->ReleaseCommandQueue(s.second);
        rig_close(&s.r);
        assert_int_equal(s.memory.live, 0);
        assert_int_equal(shim_balance(), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
