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
    kvl_group groups[2];
    kvl_block blocks[2][40];
    kvl_entry entries[40];
    kvl_sequence sequences[6];
    int64_t tokens;
    uint64_t looked_up, hits;
} snapshot;

static void look(const kvleaf_blocks *blocks, snapshot *s)
{
    memset(s, 0, sizeof *s);
    memcpy(s->groups, blocks->groups, sizeof s->groups);
    for (int32_t i = 0; i < 2; i++)
        memcpy(s->blocks[i], blocks->groups[i].blocks, sizeof s->blocks[i]);
    memcpy(s->entries, blocks->index.entries, sizeof s->entries);
    memcpy(s->sequences, blocks->sequences, sizeof s->sequences);
    s->tokens = blocks->tokens;
    s->looked_up = blocks->looked_up;
    s->hits = blocks->hits;
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

/* A manager of two groups, one with a window, with host memory. */
static kvleaf_status create(ledger *l, kvleaf_blocks **blocks)
{
    const kvleaf_block_group groups[] = {{.num_blocks = 40, .swap_blocks = 16},
                                         {.num_blocks = 40, .window = 6, .swap_blocks = 16}};
    return kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 1, .max_sequences = 6, .max_blocks_per_seq = 32,
                                                     .groups = groups, .num_groups = 2,
                                                     .allocator = {counted_allocate, counted_release, l}),
                                blocks);
}

static kvleaf_status extend_line(kvleaf_blocks *blocks, kvleaf_seq seq, int32_t first, int32_t count)
{
    int32_t ids[32];
    for (int32_t i = 0; i < count; i++)
        ids[i] = first + i;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    return kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL);
}

/* Beams of a and b: a table for each is allocated, and work space. Whatever fails, both hold what they held. */
static int32_t rearrange(kvleaf_blocks *blocks, kvleaf_seq a, kvleaf_seq b)
{
    const kvleaf_seq seqs[] = {a, b};
    const int32_t parents[] = {1, 0};
    int32_t tables[2][32], counts[2], refused = 0;
    for (int32_t i = 0; i < 2; i++)
        assert_ok(kvleaf_blocks_seq_table(blocks, seqs[i], 0, tables[i], 32, &counts[i]));
    kvleaf_status status = kvleaf_blocks_seq_rearrange(blocks, seqs, parents, 2);
    if (status == KVLEAF_NO_MEMORY) {
        refused++;
        for (int32_t i = 0; i < 2; i++)
            assert_table(blocks, seqs[i], tables[i], counts[i]);
        check_blocks(blocks, 0);
        status = kvleaf_blocks_seq_rearrange(blocks, seqs, parents, 2);
    }
    assert_ok(status);
    for (int32_t i = 0; i < 2; i++)
        assert_table(blocks, seqs[i], tables[1 - i], counts[1 - i]);
    return refused;
}

/* Uses every call that may allocate; returns how often one was refused. */
static int32_t scenario(ledger *l)
{
    kvleaf_blocks *blocks = NULL;
    int32_t refused = 0;
    kvleaf_status status = create(l, &blocks);
    if (status == KVLEAF_NO_MEMORY) {
        refused++;
        assert_null(blocks);
        assert_int_equal(l->live, 0);
        status = create(l, &blocks);
    }
    assert_ok(status);
    kvleaf_seq a = 0, b = 0, c = 0;
    retry(kvleaf_blocks_seq_create(blocks, NULL, &a));
    retry(extend_line(blocks, a, 1, 10));
    compute(blocks, a);
    retry(extend_line(blocks, a, 11, 8)); /* the table grows */
    retry(kvleaf_blocks_seq_fork(blocks, a, 10, &b));
    retry(extend(blocks, b, 8)); /* grows too */
    retry(kvleaf_blocks_seq_create(blocks, NULL, &c));
    retry(extend_line(blocks, c, 1, 18)); /* finds ten, and needs a table for all */
    assert_int_equal(info_of(blocks, c).cached, 10);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, c, 10));
    assert_ok(kvleaf_blocks_seq_truncate(blocks, b, 10));
    refused += rearrange(blocks, b, c);
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

/* Prompts that are found, samples, steps, beams, host memory: a round of all that serving does. */
static void serve(kvleaf_blocks *blocks, const ledger *l, kvleaf_seq *seqs)
{
    int32_t num_q[64], parents[64];
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0;
    for (int32_t i = 0; i < 64; i++) {
        if (i % 4) {
            seqs[i] = fork_seq(blocks, seqs[i - 1], 29);
            continue;
        }
        assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
        assert_ok(extend_line(blocks, seqs[i], i % 16, 29));
        compute(blocks, seqs[i]);
    }
    for (int32_t step = 0; step < 150; step++) {
        for (int32_t i = 0; i < 64; i++) {
            int32_t id = step * 64 + i;
            extend_ids(blocks, seqs[i], &id, 1);
            num_q[i] = 1;
            parents[i] = i / 4 * 4 + (i + step) % 3;
        }
        int64_t calls = l->calls;
        assert_ok(kvleaf_blocks_step_begin(blocks, seqs, num_q, 64));
        make_copies(blocks);
        assert_ok(kvleaf_blocks_step_commit(blocks, seqs, NULL, 64));
        assert_int_equal(l->calls, calls); /* in no step, warm or not */
        assert_ok(kvleaf_blocks_seq_rearrange(blocks, seqs, parents, 64));
    }
    for (int32_t i = 0; i < 8; i++) {
        assert_ok(kvleaf_blocks_swap_out(blocks, seqs[i], &copies, &count));
        assert_ok(kvleaf_blocks_swap_end(blocks, seqs[i], true));
    }
    for (int32_t i = 0; i < 8; i++) {
        assert_ok(kvleaf_blocks_swap_in(blocks, seqs[i], &copies, &count));
        assert_ok(kvleaf_blocks_swap_end(blocks, seqs[i], true));
    }
    check_blocks(blocks, 0);
    for (int32_t i = 0; i < 64; i++)
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
}

static void test_warm_steps_allocate_nothing(void **state)
{
    (void)state;
    ledger l = {.fail_at = -1};
    kvleaf_blocks *blocks = NULL;
    const kvleaf_block_group groups[] = {{.num_blocks = 4096, .swap_blocks = 512},
                                         {.num_blocks = 2048, .window = 20, .swap_blocks = 512}};
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 4, .max_sequences = 64, .groups = groups,
                                                        .num_groups = 2,
                                                        .allocator = {counted_allocate, counted_release, &l}),
                                   &blocks));
    int64_t warm = 0;
    for (int32_t round = 0; round < 4; round++) {
        kvleaf_seq seqs[64];
        serve(blocks, &l, seqs);
        if (round == 1) /* by then each slot has had the longest table, and a second one */
            warm = l.calls;
    }
    assert_int_equal(l.calls, warm);
    assert_int_equal(stats_of(blocks).used, 0);
    assert_true(stats_of(blocks).hits > 0 && stats_of(blocks).evictions > 0 && stats_of(blocks).swapped_out > 0);
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
