/* SPDX-License-Identifier: Apache-2.0 */
/* Sharing and copy-on-write: who copies, from where, and what a pending copy holds until it is made or dropped. */
#include "blocks_support.h"

static void assert_pending(const kvleaf_blocks *blocks, const kvleaf_block_copy *expected, int32_t count)
{
    const kvleaf_block_copy *copies;
    assert_int_equal(pending(blocks, &copies), count);
    for (int32_t i = 0; i < count; i++) {
        bool found = false;
        for (int32_t j = 0; j < count; j++)
            found = found || (copies[j].src == expected[i].src && copies[j].dst == expected[i].dst);
        assert_true(found);
    }
    check_blocks(blocks, 0);
}

#define assert_copies(blocks, ...)                                                                                     \
    assert_pending(blocks, (const kvleaf_block_copy[]){__VA_ARGS__},                                                   \
                   (int32_t)(sizeof((const kvleaf_block_copy[]){__VA_ARGS__}) / sizeof(kvleaf_block_copy)))

static void assert_no_copies(const kvleaf_blocks *blocks)
{
    assert_int_equal(pending(blocks, NULL), 0);
    check_blocks(blocks, 0);
}

/* atlas #1193: bs 4, 6 tokens, forked twice, different tokens appended. */
static void test_two_forks(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 6);
    kvleaf_seq first = fork_seq(blocks, parent, 6), second = fork_seq(blocks, parent, 6);
    assert_int_equal(stats_of(blocks).used, 2); /* no block was taken */
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 0), 3);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 1), 3);
    assert_ok(extend(blocks, first, 1));
    assert_ok(extend(blocks, second, 1));
    assert_table(blocks, parent, (int32_t[]){0, 1}, 2);
    assert_table(blocks, first, (int32_t[]){0, 2}, 2);
    assert_table(blocks, second, (int32_t[]){0, 3}, 2);
    assert_copies(blocks, {1, 2}, {1, 3});
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 0), 3);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 1), 1);
    assert_int_equal(info_of(blocks, first).blocks_unique, 1);
    assert_int_equal(info_of(blocks, first).blocks_shared, 1);
    make_copies(blocks);
    assert_no_copies(blocks);
    assert_int_equal(stats_of(blocks).copies, 2);
    assert_ok(extend(blocks, parent, 1)); /* alone again */
    assert_no_copies(blocks);
    kvleaf_blocks_destroy(&blocks);
}

static void test_fork_refuses(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 5), child = 99;
    assert_ok(extend(blocks, parent, 3));
    assert_status(kvleaf_blocks_seq_fork(blocks, parent, 6, &child), KVLEAF_INVALID); /* not computed yet */
    assert_int_equal(kvleaf_last_error()->limit, 5);
    assert_status(kvleaf_blocks_seq_fork(blocks, parent, -1, &child), KVLEAF_INVALID);
    assert_int_equal(child, 99);
    check_blocks(blocks, 0);
    child = fork_seq(blocks, parent, 0);
    assert_lengths(blocks, child, 0, 0, 0);
    assert_int_equal(info_of(blocks, child).num_blocks, 0);
    assert_ok(extend(blocks, child, 1));
    assert_no_copies(blocks);
    kvleaf_blocks_destroy(&blocks);
}

static void test_no_copy_at_a_block_edge(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 8), child = fork_seq(blocks, parent, 8);
    assert_ok(extend(blocks, child, 1));
    assert_ok(extend(blocks, parent, 1));
    assert_no_copies(blocks);
    assert_table(blocks, child, (int32_t[]){0, 1, 2}, 3);
    assert_table(blocks, parent, (int32_t[]){0, 1, 3}, 3);
    kvleaf_blocks_destroy(&blocks);
}

/* The block of a copy is reserved when the sequence is extended; without one the answer is no. */
static void test_copy_needs_a_block(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(2, 4);
    kvleaf_seq parent = make_seq(blocks, 6), child = fork_seq(blocks, parent, 5);
    bool can = true;
    assert_ok(kvleaf_blocks_can_extend(blocks, child, 1, &can));
    assert_false(can);
    assert_status(extend(blocks, child, 1), KVLEAF_NO_BLOCKS);
    assert_int_equal(kvleaf_last_error()->value, 1);
    assert_int_equal(kvleaf_last_error()->limit, 0);
    assert_lengths(blocks, child, 5, 5, 5);
    assert_no_copies(blocks);
    assert_ok(extend(blocks, child, 0)); /* nothing to write, nothing to copy */
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &parent));
    assert_ok(extend(blocks, child, 1));
    assert_no_copies(blocks);
    kvleaf_blocks_destroy(&blocks);
}

/* The parent may go on in the shared block too: whoever is first moves, the last one stays. */
static void test_parent_moves_first(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 6), child = fork_seq(blocks, parent, 6);
    assert_ok(extend(blocks, parent, 1));
    assert_copies(blocks, {1, 2});
    assert_ok(extend(blocks, child, 1)); /* behind what the copy reads */
    assert_copies(blocks, {1, 2});
    assert_table(blocks, child, (int32_t[]){0, 1}, 2);
    kvleaf_blocks_destroy(&blocks);
}

/* A sequence alone in a block that a pending copy reads, cut so that it would write what is to be copied. */
static void test_write_into_pinned_source(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 7), child = fork_seq(blocks, parent, 7);
    assert_ok(extend(blocks, child, 1));
    assert_copies(blocks, {1, 2});
    assert_ok(kvleaf_blocks_seq_truncate(blocks, parent, 5));
    assert_ok(extend(blocks, parent, 1)); /* slot 1 of block 1 is still to be copied */
    assert_copies(blocks, {1, 2}, {1, 3});
    assert_table(blocks, parent, (int32_t[]){0, 3}, 2);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 1), 0);
    assert_int_equal(stats_of(blocks).pinned, 1);
    assert_int_equal(stats_of(blocks).used, 4);
    make_copies(blocks);
    assert_no_copies(blocks);
    assert_int_equal(stats_of(blocks).used, 3);
    assert_int_equal(blocks->groups[0].free.last, 1);
    kvleaf_blocks_destroy(&blocks);

    blocks = make_blocks(8, 4); /* the same once the copy was made */
    parent = make_seq(blocks, 7);
    child = fork_seq(blocks, parent, 7);
    assert_ok(extend(blocks, child, 1));
    make_copies(blocks);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, parent, 5));
    assert_ok(extend(blocks, parent, 1));
    assert_no_copies(blocks);
    assert_table(blocks, parent, (int32_t[]){0, 1}, 2);
    kvleaf_blocks_destroy(&blocks);
}

/* Several copies read one block: what the one that needs most needs is held. */
static void test_most_of_several_copies_is_held(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 7), most = fork_seq(blocks, parent, 7), least = fork_seq(blocks, parent, 5);
    assert_ok(extend(blocks, most, 1));
    assert_ok(extend(blocks, least, 1));
    assert_ok(kvleaf_blocks_seq_truncate(blocks, parent, 6));
    assert_ok(extend(blocks, parent, 1));
    assert_copies(blocks, {1, 2}, {1, 3}, {1, 4});
    kvleaf_blocks_destroy(&blocks);
}

/* A fork of a sequence whose own copy is pending reads from the original, so that no copy waits for another. */
static void test_no_chains(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq a = make_seq(blocks, 7), b = fork_seq(blocks, a, 7), c, d;
    assert_ok(extend(blocks, b, 1));
    assert_copies(blocks, {1, 2});
    c = fork_seq(blocks, b, 6);
    d = fork_seq(blocks, c, 5);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 2), 3);
    assert_ok(extend(blocks, c, 1));
    assert_ok(extend(blocks, d, 5));
    assert_copies(blocks, {1, 2}, {1, 3}, {1, 4});
    assert_table(blocks, d, (int32_t[]){0, 4, 5}, 3);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &a)); /* the source is held by the copies alone */
    assert_int_equal(stats_of(blocks).pinned, 1);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &c)); /* its copy is dropped */
    assert_copies(blocks, {1, 2}, {1, 4});
    assert_ok(kvleaf_blocks_seq_truncate(blocks, d, 4));
    assert_copies(blocks, {1, 2});
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &b));
    assert_no_copies(blocks);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &d));
    assert_int_equal(stats_of(blocks).free, 8);
    kvleaf_blocks_destroy(&blocks);
}

/* A destination that others share outlives the sequence that asked for the copy. */
static void test_shared_destination(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq a = make_seq(blocks, 7), b = fork_seq(blocks, a, 7), c;
    assert_ok(extend(blocks, b, 1));
    c = fork_seq(blocks, b, 7);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &b));
    assert_copies(blocks, {1, 2});
    assert_ok(extend(blocks, c, 1)); /* alone in it: writes behind what the copy brings */
    assert_copies(blocks, {1, 2});
    assert_table(blocks, c, (int32_t[]){0, 2}, 2);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &c));
    assert_no_copies(blocks);
    (void)a;
    kvleaf_blocks_destroy(&blocks);
}

static void test_part_of_the_copies_done(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(12, 4);
    kvleaf_seq a = make_seq(blocks, 7), children[4];
    for (int32_t i = 0; i < 4; i++) {
        children[i] = fork_seq(blocks, a, 7);
        assert_ok(extend(blocks, children[i], 1));
    }
    assert_copies(blocks, {1, 2}, {1, 3}, {1, 4}, {1, 5});
    assert_status(kvleaf_blocks_copies_done(blocks, 0, 5), KVLEAF_INVALID);
    assert_int_equal(kvleaf_last_error()->limit, 4);
    assert_status(kvleaf_blocks_copies_done(blocks, 0, -1), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_copies_done(blocks, 0, 0));
    const kvleaf_block_copy *copies;
    pending(blocks, &copies);
    kvleaf_block_copy rest[2] = {copies[2], copies[3]};
    assert_ok(kvleaf_blocks_copies_done(blocks, 0, 2));
    assert_copies(blocks, rest[0], rest[1]);
    assert_int_equal(stats_of(blocks).copies, 2);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &a));
    assert_int_equal(stats_of(blocks).pinned, 1);
    make_copies(blocks);
    assert_int_equal(stats_of(blocks).pinned, 0);
    assert_int_equal(stats_of(blocks).copies, 4);
    assert_no_copies(blocks);
    kvleaf_blocks_destroy(&blocks);
}

/* Extended before it was forked: it writes on in place, in slots that nobody shares. The child moves. */
static void test_fork_of_one_with_uncomputed_tokens(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 5), child;
    int32_t num_q = 2;
    assert_ok(extend(blocks, parent, 2));
    child = fork_seq(blocks, parent, 5);
    assert_ok(kvleaf_blocks_step_begin(blocks, &parent, &num_q, 1));
    kvleaf_seq beside = fork_seq(blocks, parent, 5); /* in the midst of the step */
    assert_ok(extend(blocks, beside, 1));
    assert_copies(blocks, {1, 2});
    assert_ok(kvleaf_blocks_step_commit(blocks, &parent, NULL, 1)); /* the pending copy is another's */
    assert_ok(extend(blocks, child, 1));
    assert_copies(blocks, {1, 2}, {1, 3});
    assert_table(blocks, parent, (int32_t[]){0, 1}, 2);
    kvleaf_blocks_destroy(&blocks);
}

/* Only what is committed is copied: the child writes where the parent's uncomputed tokens would lie. */
static void test_uncomputed_tokens_are_not_held(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 5), child;
    assert_ok(extend(blocks, parent, 2));
    child = fork_seq(blocks, parent, 5);
    assert_ok(extend(blocks, parent, 1)); /* moves, with one committed token in the block */
    assert_copies(blocks, {1, 2});
    assert_ok(extend(blocks, child, 1)); /* slot 1, which the copy does not need */
    assert_copies(blocks, {1, 2});
    assert_table(blocks, child, (int32_t[]){0, 1}, 2);
    kvleaf_blocks_destroy(&blocks);
}

/* tvm PR #16666, PR #17045: 0 -> 1 at 5, 1 -> 2 at 7, destroyed in every order, with cuts between. */
static void test_every_order(void **state)
{
    (void)state;
    static const int32_t orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int32_t o = 0; o < 6; o++) {
        for (int32_t cut = 0; cut < 2; cut++) {
            kvleaf_blocks *blocks = make_blocks(12, 4);
            kvleaf_seq seqs[3] = {make_seq(blocks, 10)};
            seqs[1] = fork_seq(blocks, seqs[0], 5);
            assert_ok(extend(blocks, seqs[1], 4));
            compute(blocks, seqs[1]);
            seqs[2] = fork_seq(blocks, seqs[1], 7);
            assert_ok(extend(blocks, seqs[2], 3)); /* its copy stays pending */
            const int64_t lengths[3] = {10, 9, 10};
            int64_t now[3] = {10, 9, 10};
            for (int32_t i = 0; i < 3; i++) {
                int32_t gone = orders[o][i];
                kvleaf_seq former = seqs[gone];
                if (cut && i < 2) {
                    int32_t survivor = orders[o][i + 1];
                    now[survivor] = lengths[survivor] - 3 - i;
                    assert_ok(kvleaf_blocks_seq_truncate(blocks, seqs[survivor], now[survivor]));
                }
                int32_t tables[3][4], counts[3];
                for (int32_t j = i + 1; j < 3; j++)
                    assert_ok(kvleaf_blocks_seq_table(blocks, seqs[orders[o][j]], 0, tables[j], 4, &counts[j]));
                assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[gone]));
                assert_status(kvleaf_blocks_seq_destroy(blocks, &former), KVLEAF_STALE);
                for (int32_t j = i + 1; j < 3; j++) {
                    assert_table(blocks, seqs[orders[o][j]], tables[j], counts[j]);
                    assert_int_equal(info_of(blocks, seqs[orders[o][j]]).extended, now[orders[o][j]]);
                }
                check_blocks(blocks, 0);
            }
            assert_int_equal(stats_of(blocks).free, 12);
            kvleaf_blocks_destroy(&blocks);
        }
    }
}

/* TensorRT-LLM PR #12648: two sequences with one prompt, the second pinned by a copy and unpinned, both freed; then
 * each block is handed out once. */
static void test_distinct_blocks_afterwards(void **state)
{
    (void)state;
    for (int32_t made = 0; made < 2; made++) {
        kvleaf_blocks *blocks = make_blocks(9, 4);
        kvleaf_seq first = make_seq(blocks, 0), second = make_seq(blocks, 0), third;
        assert_ok(extend(blocks, first, 10));
        assert_ok(extend(blocks, second, 10));
        kvleaf_seq both[] = {first, second};
        assert_ok(kvleaf_blocks_step_begin(blocks, both, (int32_t[]){10, 10}, 2));
        assert_ok(kvleaf_blocks_step_commit(blocks, both, NULL, 2));
        third = fork_seq(blocks, second, 10);
        assert_ok(extend(blocks, third, 1));
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &second)); /* its last block is held by the copy alone */
        assert_int_equal(stats_of(blocks).pinned, 1);
        if (made)
            make_copies(blocks);
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &third));
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &first));
        assert_int_equal(stats_of(blocks).free, 9);
        kvleaf_seq all = make_seq(blocks, 36); /* check_blocks finds an id that stands twice in a table */
        check_blocks(blocks, 0);
        assert_int_equal(info_of(blocks, all).num_blocks, 9);
        assert_status(extend(blocks, all, 1), KVLEAF_TOO_SMALL);
        kvleaf_blocks_destroy(&blocks);
    }
}

/* Waste, where sequences share their last block with different lengths. */
static void test_waste_of_shared_tails(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq long_one = make_seq(blocks, 7), short_one = fork_seq(blocks, long_one, 5);
    assert_int_equal(stats_of(blocks).slots_wasted, 1);
    kvleaf_seq edge = fork_seq(blocks, long_one, 4);
    assert_int_equal(stats_of(blocks).slots_wasted, 1);
    assert_int_equal(stats_of(blocks).tokens, 16);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &long_one));
    assert_int_equal(stats_of(blocks).slots_wasted, 3);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &short_one));
    assert_int_equal(stats_of(blocks).slots_wasted, 0);
    check_blocks(blocks, 0);
    (void)edge;
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_forks),
        cmocka_unit_test(test_fork_refuses),
        cmocka_unit_test(test_no_copy_at_a_block_edge),
        cmocka_unit_test(test_copy_needs_a_block),
        cmocka_unit_test(test_parent_moves_first),
        cmocka_unit_test(test_write_into_pinned_source),
        cmocka_unit_test(test_most_of_several_copies_is_held),
        cmocka_unit_test(test_no_chains),
        cmocka_unit_test(test_shared_destination),
        cmocka_unit_test(test_part_of_the_copies_done),
        cmocka_unit_test(test_fork_of_one_with_uncomputed_tokens),
        cmocka_unit_test(test_uncomputed_tokens_are_not_held),
        cmocka_unit_test(test_every_order),
        cmocka_unit_test(test_distinct_blocks_afterwards),
        cmocka_unit_test(test_waste_of_shared_tails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
