/* SPDX-License-Identifier: Apache-2.0 */
/* Groups with windows: which blocks are given back when, what can't be done without them, and hits that every group can
 * go on from. */
#include "blocks_support.h"

#define BS 4

static kvleaf_blocks *make(int32_t first_blocks, int32_t first_window, int32_t second_blocks, int32_t second_window)
{
    const kvleaf_block_group groups[] = {{.num_blocks = first_blocks, .window = first_window},
                                         {.num_blocks = second_blocks, .window = second_window}};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BS, .max_blocks_per_seq = 16, .groups = groups,
                                                        .num_groups = second_blocks ? 2 : 1),
                                   &blocks));
    return blocks;
}

/* vllm PR #33711: a block goes only when its last token is out of every future window, and then at once. */
static void test_given_back(void **state)
{
    (void)state;
    for (int32_t window = 1; window <= 13; window++) {
        for (int32_t chunk = 1; chunk <= 7; chunk++) {
            kvleaf_blocks *blocks = make(16, window, 0, 0);
            kvleaf_seq seq = make_seq(blocks, 0);
            int32_t table[16], count = 0;
            for (int32_t length = chunk; length <= 40; length += chunk) {
                assert_ok(extend(blocks, seq, chunk));
                compute(blocks, seq);
                check_blocks(blocks, 0);
                assert_ok(kvleaf_blocks_seq_table(blocks, seq, 0, table, 16, &count));
                assert_int_equal(count, (length + BS - 1) / BS);
                for (int32_t i = 0; i < count; i++)
                    assert_int_equal(table[i] == KVLEAF_NO_BLOCK, i * BS + BS - 1 < length - window + 1);
            }
            destroy(blocks, seq);
            assert_int_equal(stats_of(blocks).free, 16);
            kvleaf_blocks_destroy(&blocks);
        }
    }
}

/* Longer than its pool: only what the window reaches takes blocks. */
static void test_small_group(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16, 0, 3, 5);
    kvleaf_seq seq = make_seq(blocks, 0);
    for (int32_t i = 0; i < 15; i++) {
        assert_ok(extend(blocks, seq, BS));
        compute(blocks, seq);
    }
    check_blocks(blocks, 0);
    assert_int_equal(info_of(blocks, seq).extended, 60);
    assert_int_equal(info_of(blocks, seq).blocks_unique, 15 + 1);
    assert_int_equal(info_of(blocks, seq).peak_blocks, 15 + 2);
    assert_status(extend(blocks, make_seq(blocks, 0), 3 * BS), KVLEAF_NO_BLOCKS);
    kvleaf_blocks_destroy(&blocks);
}

/* What stays is what the three lengths need: uncomputed tokens, rejected ones and rollbacks give nothing back. */
static void test_steps(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16, 6, 0, 0);
    kvleaf_seq seq = make_seq(blocks, 0);
    int32_t num_q = 20, accepted = 10;
    assert_ok(extend(blocks, seq, 32));
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_int_equal(info_of(blocks, seq).blocks_unique, 8);
    assert_ok(kvleaf_blocks_step_rollback(blocks, &seq, 1));
    assert_int_equal(info_of(blocks, seq).blocks_unique, 8);
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_ok(kvleaf_blocks_step_commit(blocks, &seq, &accepted, 1)); /* 10: sees 5 .. 10, the first block is out */
    check_blocks(blocks, 0);
    assert_int_equal(info_of(blocks, seq).blocks_unique, 2);
    assert_int_equal(entry_of(blocks, seq, 0), KVLEAF_NO_BLOCK);
    kvleaf_blocks_destroy(&blocks);
}

/* Back to where a block in the window is gone there is no way; 0 is always right. */
static void test_refusals(void **state)
{
    (void)state;
    for (int32_t window = 1; window <= 9; window++) {
        for (int32_t pos = 0; pos <= 22; pos++) {
            kvleaf_blocks *blocks = make(16, 0, 16, window);
            kvleaf_seq seq = make_seq(blocks, 22), child = 0;
            int32_t gone = 23 - window > 0 ? (23 - window) / BS : 0; /* blocks */
            int32_t needed = pos + 1 - window > 0 ? (pos + 1 - window) / BS : 0;
            bool right = pos == 0 || needed >= gone || needed * BS >= pos;
            kvleaf_status expected = right ? KVLEAF_OK : KVLEAF_INVALID;
            assert_status(kvleaf_blocks_seq_fork(blocks, seq, pos, &child), expected);
            check_blocks(blocks, 0);
            if (right) {
                assert_lengths(blocks, child, pos, pos, pos);
                assert_ok(extend(blocks, child, 3));
                compute(blocks, child);
                check_blocks(blocks, 0);
            }
            assert_status(kvleaf_blocks_seq_truncate(blocks, seq, pos), expected);
            check_blocks(blocks, 0);
            if (!right)
                assert_string_equal(kvleaf_last_error()->field, "length");
            assert_lengths(blocks, seq, right ? pos : 22, right ? pos : 22, right ? pos : 22);
            assert_ok(extend(blocks, seq, 5));
            compute(blocks, seq);
            check_blocks(blocks, 0);
            kvleaf_blocks_destroy(&blocks);
        }
    }
}

/* A hit is the longest prefix whose window every group still has. */
static void test_hits(void **state)
{
    (void)state;
    static const struct {
        int32_t window, evicted; /* blocks of the windowed group taken for something else */
        int64_t found;           /* of 41 tokens, 40 of them cached */
    } cases[] = {
        {5, 0, 40}, {5, 1, 40}, {5, 8, 40}, {5, 9, 40}, {5, 10, 0}, {40, 0, 40}, {40, 1, 36}, {40, 4, 24}, {40, 10, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_blocks *blocks = make(32, 0, 11, cases[i].window);
        kvleaf_seq seq = make_seq(blocks, 0), again = 0, filler = 0;
        for (int32_t at = 0; at < 40; at += BS) {
            extend_ids(blocks, seq, line + at, BS);
            compute(blocks, seq);
        }
        destroy(blocks, seq);
        assert_int_equal(stats_of(blocks).cached, 20);
        if (cases[i].evicted) {
            /* one block of the group is free; the least recently used of the others go with it */
            assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &filler));
            assert_ok(extend(blocks, filler, (cases[i].evicted + 1) * BS));
            check_blocks(blocks, 0);
            destroy(blocks, filler);
        }
        assert_int_equal(match_of(blocks, NULL, line, 41), cases[i].found);
        int64_t cached = -1;
        again = make_prompt(blocks, NULL, line, 41, &cached);
        assert_int_equal(cached, cases[i].found);
        check_blocks(blocks, 0);
        assert_int_equal(match_of(blocks, NULL, line, 41), 40); /* made whole again by what was computed */
        destroy(blocks, again);
        kvleaf_blocks_destroy(&blocks);
    }
}

/* A hit refers to what the next token sees, no more, and leaves the windows of what was there before. */
static void test_hits_take_the_window(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(32, 0, 32, 6);
    destroy(blocks, make_prompt(blocks, NULL, line, 40, NULL));
    kvleaf_seq seq = make_seq(blocks, 0);
    assert_int_equal(extend_ids(blocks, seq, line, 9), 8);
    check_blocks(blocks, 0);
    compute(blocks, seq);
    assert_int_equal(extend_ids(blocks, seq, line + 9, 3), 0);
    compute(blocks, seq);
    assert_int_equal(extend_ids(blocks, seq, line + 12, 15), 14); /* 26: sees 21 .. */
    check_blocks(blocks, 0);
    int32_t table[16], count = 0;
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, 1, table, 16, &count));
    assert_int_equal(count, 7);
    for (int32_t i = 0; i < count; i++)
        assert_int_equal(table[i] == KVLEAF_NO_BLOCK, i < 5);
    const kvleaf_block_copy *copies;
    assert_ok(kvleaf_blocks_copies(blocks, 1, &copies, &count));
    assert_int_equal(count, 1);
    assert_int_equal(copies[0].dst, table[6]);
    compute(blocks, seq);
    check_blocks(blocks, 0);
    destroy(blocks, seq);
    kvleaf_blocks_destroy(&blocks);
}

/* Where all groups have windows, the chain is of the largest, and lasts as long as its blocks are not needed. */
static void test_all_with_windows(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(12, 5, 12, 9);
    assert_int_equal(blocks->primary, 1);
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 24, NULL);
    int32_t ids[24];
    check_blocks(blocks, 0);
    assert_int_equal(match_of(blocks, NULL, line, 25), 24);
    assert_status(kvleaf_blocks_seq_ids(blocks, seq, 0, ids, 24), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_set_ids(blocks, seq, 15, line + 15, 2), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_seq_ids(blocks, seq, 16, ids, 8));
    assert_memory_equal(ids, line + 16, 8 * sizeof *ids);
    kvleaf_seq child = make_prompt(blocks, NULL, line, 25, NULL);
    assert_int_equal(info_of(blocks, child).cached, 24);
    check_blocks(blocks, 0);
    destroy(blocks, seq);
    /* Eight blocks for something else: of the chain's blocks that left the window the deepest goes, and with it from
     * the index what is behind it. */
    seq = make_seq(blocks, 0);
    assert_ok(extend(blocks, seq, 32));
    check_blocks(blocks, 0);
    assert_true(stats_of(blocks).evictions > 0);
    assert_true(blocks->index.entries[0].serial > 0);
    extend_ids(blocks, child, line + 25, 7);
    compute(blocks, child);
    check_blocks(blocks, 0);
    destroy(blocks, seq);
    destroy(blocks, child);
    kvleaf_blocks_destroy(&blocks);
}

/* What the upper layers upload: entries from the first changed one; an entry that leaves a window is not changed. */
static void test_changed_entries(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16, 4, 0, 0);
    kvleaf_seq seq = make_seq(blocks, 8);
    kvl_sequence *sequence = NULL;
    assert_ok(kvl_sequence_find(blocks, seq, &sequence));
    kvl_sequence_uploaded(sequence, 0, 2);
    assert_ok(extend(blocks, seq, 4));
    compute(blocks, seq);
    assert_int_equal(entry_of(blocks, seq, 1), KVLEAF_NO_BLOCK);
    assert_int_equal(sequence->first_changed[0], 2);
    kvleaf_blocks_destroy(&blocks);
}

static void test_create_refuses(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL;
    assert_status(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 4, .window = -1), &blocks), KVLEAF_INVALID);
    assert_string_equal(kvleaf_last_error()->field, "window");
    assert_status(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 4, .no_prefix_cache = 2), &blocks),
                  KVLEAF_INVALID);
    assert_string_equal(kvleaf_last_error()->field, "no_prefix_cache");
    assert_null(blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given_back),
        cmocka_unit_test(test_small_group),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_hits),
        cmocka_unit_test(test_hits_take_the_window),
        cmocka_unit_test(test_all_with_windows),
        cmocka_unit_test(test_changed_entries),
        cmocka_unit_test(test_create_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
