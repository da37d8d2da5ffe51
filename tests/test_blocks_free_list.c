/* SPDX-License-Identifier: Apache-2.0 */
/* The free list: its order, taking from anywhere, and that what is freed twice is found and changes nothing. */
#include "blocks_support.h"

#define BLOCKS 6

static const kvleaf_seq_params terms;

typedef struct fixture {
    kvl_block blocks[BLOCKS];
    kvl_block_list list;
} fixture;

static void fill(fixture *f)
{
    memset(f, 0, sizeof *f);
    kvl_list_init(&f->list, f->blocks);
    for (int32_t i = 0; i < BLOCKS; i++)
        f->blocks[i].next = KVL_UNLISTED;
    for (int32_t i = 0; i < BLOCKS; i++)
        assert_true(kvl_list_give(&f->list, i));
}

static void assert_order(fixture *f, const int32_t *expected, int32_t count)
{
    bool listed[BLOCKS] = {false};
    assert_int_equal(walk_list(&f->list, BLOCKS, listed), count);
    int32_t at = f->list.first;
    for (int32_t i = 0; i < count; i++, at = f->list.blocks[at].next)
        assert_int_equal(at, expected[i]);
}

static void test_order(void **state)
{
    (void)state;
    fixture f;
    fill(&f);
    assert_int_equal(kvl_list_take(&f.list), 0);
    assert_int_equal(kvl_list_take(&f.list), 1);
    assert_true(kvl_list_give(&f.list, 1));
    assert_true(kvl_list_give(&f.list, 0));
    assert_order(&f, (int32_t[]){2, 3, 4, 5, 1, 0}, 6);
}

static void test_remove_anywhere(void **state)
{
    (void)state;
    static const struct {
        int32_t removed[3], count, rest[BLOCKS];
    } cases[] = {
        {{0}, 1, {1, 2, 3, 4, 5}}, {{5}, 1, {0, 1, 2, 3, 4}}, {{3}, 1, {0, 1, 2, 4, 5}}, {{2, 3}, 2, {0, 1, 4, 5}},
        {{3, 2}, 2, {0, 1, 4, 5}}, {{0, 5, 1}, 3, {2, 3, 4}}, {{5, 4, 3}, 3, {0, 1, 2}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        fill(&f);
        for (int32_t j = 0; j < cases[i].count; j++)
            assert_true(kvl_list_remove(&f.list, cases[i].removed[j]));
        assert_order(&f, cases[i].rest, BLOCKS - cases[i].count);
        assert_false(kvl_list_remove(&f.list, cases[i].removed[0]));
        assert_order(&f, cases[i].rest, BLOCKS - cases[i].count);
    }
}

static void test_empty(void **state)
{
    (void)state;
    fixture f;
    fill(&f);
    for (int32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(kvl_list_take(&f.list), i);
    assert_int_equal(kvl_list_take(&f.list), KVL_LIST_END);
    assert_order(&f, NULL, 0);
    assert_true(kvl_list_give(&f.list, 4));
    assert_order(&f, (int32_t[]){4}, 1);
    assert_true(kvl_list_remove(&f.list, 4));
    assert_order(&f, NULL, 0);
}

static void test_insert(void **state)
{
    (void)state;
    fixture f;
    fill(&f);
    assert_false(kvl_list_insert(&f.list, 5, 0));
    assert_true(kvl_list_remove(&f.list, 5) && kvl_list_remove(&f.list, 3) && kvl_list_remove(&f.list, 0));
    assert_true(kvl_list_insert(&f.list, 0, 1));
    assert_true(kvl_list_insert(&f.list, 5, 2));
    assert_true(kvl_list_insert(&f.list, 3, KVL_LIST_END));
    assert_order(&f, (int32_t[]){0, 1, 5, 2, 4, 3}, 6);
}

/* vllm #42571: one id twice in what is freed. */
static void test_given_twice(void **state)
{
    (void)state;
    fixture f;
    fill(&f);
    for (int32_t i = 0; i < BLOCKS; i++)
        assert_false(kvl_list_give(&f.list, i));
    assert_order(&f, (int32_t[]){0, 1, 2, 3, 4, 5}, 6);
}

/* The same through the call that drops references: all or nothing, whichever of the ids is at fault. */
static void test_released_twice(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq parent = make_seq(blocks, 12), child = fork_seq(blocks, parent, 8); /* 0 1: two references, 2: one */
    static const struct {
        int32_t ids[5], count;
    } bad[] = {
        {{0, 1, 2, 2}, 4}, {{0, 0, 0}, 3},  {{0, 1, 2, 5}, 4}, {{5}, 1},
        {{0, 1, 8}, 3},    {{2, 1, -1}, 3}, {{1, 2, 0, 2}, 4},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_status(kvl_group_check_release(&blocks->groups[0], bad[i].ids, bad[i].count), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, "block");
        check_blocks(blocks, 0);
        assert_int_equal(blocks->groups[0].free.first, 3);
    }
    /* What a sequence may drop at once: each id as often as it is held. */
    const int32_t all[] = {0, 0, 1, 1, 2};
    assert_ok(kvl_group_check_release(&blocks->groups[0], all, 5));
    kvl_group_release(blocks, 0, all, 5, &terms);
    for (int32_t i = 0; i < 8; i++)
        assert_int_equal(kvleaf_blocks_refcount(blocks, 0, i), 0);
    assert_int_equal(stats_of(blocks).free, 8);
    static const int32_t order[] = {3, 4, 5, 6, 7, 2, 1, 0};
    for (int32_t i = 0; i < 8; i++)
        assert_int_equal(kvl_list_take(&blocks->groups[0].free), order[i]);
    (void)child;
    kvleaf_blocks_destroy(&blocks);
}

/* A table whose blocks were freed behind the manager's back: the sequence can't be destroyed and nothing is lost. */
static void test_destroy_finds_double_free(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq seq = make_seq(blocks, 12), held = seq;
    kvl_group_release(blocks, 0, (int32_t[]){1}, 1, &terms);
    assert_status(kvleaf_blocks_seq_destroy(blocks, &seq), KVLEAF_INVALID);
    assert_int_equal(seq, held);
    assert_status(kvleaf_blocks_seq_truncate(blocks, seq, 4), KVLEAF_INVALID);
    assert_lengths(blocks, seq, 12, 12, 12);
    assert_int_equal(stats_of(blocks).free, 6);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_insert),
        cmocka_unit_test(test_remove_anywhere),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_given_twice),
        cmocka_unit_test(test_released_twice),
        cmocka_unit_test(test_destroy_finds_double_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
