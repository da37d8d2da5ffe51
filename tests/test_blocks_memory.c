/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory: each allocation failing in turn changes nothing (inference-sim #200), everything is given back, and a
 * warm step allocates nothing. */
#include "blocks_support.h"

typedef struct ledger {
    int64_t calls, fail_at, live;
} ledger;

static void *counted_allocate(void *user, size_t size)
{
    ledger *l = user;
    if (l->calls++ == l->fail_at)
        return NULL;
    l->live++;
    return malloc(size);
}

static void counted_release(void *user, void *memory)
{
    ledger *l = user;
    l->live--;
    free(memory);
}

typedef struct snapshot {
    kvleaf_blocks_stats stats;
    kvl_block blocks[32];
    kvl_block_list list;
    kvl_sequence sequences[6];
} snapshot;

static void look(const kvleaf_blocks *blocks, snapshot *s)
{
    memset(s, 0, sizeof *s);
    s->stats = stats_of(blocks);
    memcpy(s->blocks, blocks->groups[0].blocks, sizeof s->blocks);
    s->list = blocks->groups[0].free;
    memcpy(s->sequences, blocks->sequences, sizeof s->sequences);
}

/* Calls until it is no longer refused for want of memory; a refusal must leave everything as it was. */
#define retry(call)                                                                                                    \
    do {                                                                                                               \
        snapshot before_, after_;                                                                                      \
        look(blocks, &before_);                                                                                        \
        kvleaf_status status_ = (call);                                                                                \
        if (status_ == KVLEAF_NO_MEMORY) {                                                                             \
            refused++;                                                                                                 \
            look(blocks, &after_);                                                                                     \
            assert_memory_equal(&before_, &after_, sizeof before_);                                                    \
            check_blocks(blocks, 0);                                                                                   \
            status_ = (call);                                                                                          \
        }                                                                                                              \
        if (status_ != KVLEAF_OK)                                                                                      \
            fail_msg("%s: %s", #call, kvleaf_last_error()->message);                                                   \
    } while (0)

/* Uses every call that may allocate; returns how often one was refused. */
static int32_t scenario(ledger *l)
{
    kvleaf_blocks_params params = {.struct_size = sizeof params,
                                   .num_blocks = 32,
                                   .block_size = 1,
                                   .max_sequences = 6,
                                   .allocator = {counted_allocate, counted_release, l}};
    kvleaf_blocks *blocks = NULL;
    int32_t refused = 0;
    kvleaf_status status = kvleaf_blocks_create(&params, &blocks);
    if (status == KVLEAF_NO_MEMORY) {
        refused++;
        assert_null(blocks);
        assert_int_equal(l->live, 0);
        status = kvleaf_blocks_create(&params, &blocks);
    }
    assert_ok(status);
    kvleaf_seq a = 0, b = 0, c = 0;
    retry(kvleaf_blocks_seq_create(blocks, NULL, &a));
    retry(extend(blocks, a, 10));
    compute(blocks, a);
    retry(extend(blocks, a, 8)); /* the table grows */
    retry(kvleaf_blocks_seq_fork(blocks, a, 9, &b));
    retry(extend(blocks, b, 8)); /* grows too */
    retry(kvleaf_blocks_seq_fork(blocks, b, 5, &c));
    retry(kvleaf_blocks_seq_destroy(blocks, &a));
    retry(kvleaf_blocks_seq_create(blocks, NULL, &a));
    retry(extend(blocks, a, 3));
    retry(kvleaf_blocks_seq_destroy(blocks, &b));
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
    assert_int_equal(l->live, 0);
    return refused;
}

static void test_each_allocation_fails(void **state)
{
    (void)state;
    ledger whole = {.fail_at = -1};
    assert_int_equal(scenario(&whole), 0);
    assert_in_range(whole.calls, 8, 100);
    for (int64_t k = 0; k < whole.calls; k++) {
        ledger l = {.fail_at = k};
        assert_int_equal(scenario(&l), 1);
    }
}

static void test_warm_steps_allocate_nothing(void **state)
{
    (void)state;
    ledger l = {.fail_at = -1};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 4096, .block_size = 4, .max_sequences = 64,
                                                        .allocator = {counted_allocate, counted_release, &l}),
                                   &blocks));
    int64_t warm = 0;
    for (int32_t round = 0; round < 4; round++) {
        kvleaf_seq seqs[64];
        int32_t num_q[64];
        for (int32_t i = 0; i < 64; i++)
            seqs[i] = i % 4 ? fork_seq(blocks, seqs[i - 1], 29) : make_seq(blocks, 30);
        for (int32_t step = 0; step < 150; step++) {
            for (int32_t i = 0; i < 64; i++) {
                assert_ok(extend(blocks, seqs[i], 1));
                num_q[i] = 1;
            }
            int64_t calls = l.calls;
            assert_ok(kvleaf_blocks_step_begin(blocks, seqs, num_q, 64));
            make_copies(blocks);
            assert_ok(kvleaf_blocks_step_commit(blocks, seqs, NULL, 64));
            assert_int_equal(l.calls, calls); /* in no step, warm or not */
        }
        check_blocks(blocks, 0);
        for (int32_t i = 0; i < 64; i++)
            assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
        if (round == 0)
            warm = l.calls;
    }
    assert_int_equal(l.calls, warm);
    assert_int_equal(stats_of(blocks).free, 4096);
    kvleaf_blocks_destroy(&blocks);
    assert_int_equal(l.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation_fails),
        cmocka_unit_test(test_warm_steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
