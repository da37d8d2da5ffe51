/* SPDX-License-Identifier: Apache-2.0 */
/* Several groups in one manager: blocks in all of them or in none, a table, copies and counts in each. */
#include "blocks_support.h"

static kvleaf_blocks *make_groups(int32_t first, int32_t second)
{
    const kvleaf_block_group groups[] = {{.num_blocks = first}, {.num_blocks = second}};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 4, .groups = groups, .num_groups = 2), &blocks));
    return blocks;
}

static void test_all_or_none(void **state)
{
    (void)state;
    for (int32_t small = 0; small < 2; small++) {
        kvleaf_blocks *blocks = small ? make_groups(8, 3) : make_groups(3, 8);
        assert_int_equal(blocks->max_blocks_per_seq, 8);
        kvleaf_seq seq = make_seq(blocks, 10), child;
        bool can = true;
        assert_ok(kvleaf_blocks_can_extend(blocks, seq, 3, &can));
        assert_false(can);
        assert_status(extend(blocks, seq, 3), KVLEAF_NO_BLOCKS);
        assert_int_equal(kvleaf_last_error()->value, 1);
        assert_int_equal(kvleaf_last_error()->limit, 0);
        assert_lengths(blocks, seq, 10, 10, 10);
        check_blocks(blocks, 0);
        child = fork_seq(blocks, seq, 9);
        assert_status(extend(blocks, child, 1), KVLEAF_NO_BLOCKS); /* a copy in one group, none in the other */
        check_blocks(blocks, 0);
        assert_ok(extend(blocks, seq, 0));
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &child));
        assert_ok(extend(blocks, seq, 2));
        assert_int_equal(info_of(blocks, seq).blocks_unique, 6);
        check_blocks(blocks, 0);
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
        assert_int_equal(stats_of(blocks).free, 11);
        kvleaf_blocks_destroy(&blocks);
    }
}

static void test_tables_and_copies_of_each(void **state)
{
    (void)state;
    static const int32_t order[] = {5, 4, 3, 2, 1};
    const kvleaf_block_group groups[] = {{.num_blocks = 8}, {.num_blocks = 6, .free_order = order, .free_count = 5}};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = 4, .groups = groups, .num_groups = 2), &blocks));
    kvleaf_seq seq = make_seq(blocks, 6), child = fork_seq(blocks, seq, 5);
    int32_t table[4], count = 0;
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, 1, table, 4, &count));
    assert_int_equal(count, 2);
    assert_int_equal(table[0], 5);
    assert_int_equal(table[1], 4);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 1), 2);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 1, 4), 2);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 1, 1), 0);
    assert_int_equal(info_of(blocks, child).blocks_shared, 4);
    assert_ok(extend(blocks, child, 2));
    const kvleaf_block_copy *copies;
    assert_ok(kvleaf_blocks_copies(blocks, 0, &copies, &count));
    assert_int_equal(count, 1);
    assert_int_equal(copies[0].src, 1);
    assert_int_equal(copies[0].dst, 2);
    assert_ok(kvleaf_blocks_copies(blocks, 1, &copies, &count));
    assert_int_equal(count, 1);
    assert_int_equal(copies[0].src, 4);
    assert_int_equal(copies[0].dst, 3);
    int32_t num_q = 2;
    assert_ok(kvleaf_blocks_step_begin(blocks, &child, &num_q, 1));
    assert_ok(kvleaf_blocks_copies_done(blocks, 0, 1));
    assert_status(kvleaf_blocks_step_commit(blocks, &child, NULL, 1), KVLEAF_INVALID); /* the other is pending */
    assert_ok(kvleaf_blocks_copies_done(blocks, 1, 1));
    assert_ok(kvleaf_blocks_step_commit(blocks, &child, NULL, 1));
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvleaf_blocks_query_group(blocks, 1, &stats));
    assert_int_equal(stats.total, 6);
    assert_int_equal(stats.used, 4); /* one of them withheld */
    assert_int_equal(stats.copies, 1);
    assert_int_equal(stats_of(blocks).total, 14);
    assert_int_equal(stats_of(blocks).copies, 2);
    kvleaf_blocks_destroy(&blocks);
}

static void test_refusals(void **state)
{
    (void)state;
    const kvleaf_block_group one = {.num_blocks = 4}, none = {.num_blocks = 0};
    const kvleaf_block_group second_bad[] = {one, none};
    const int32_t twice[] = {0, 0};
    const kvleaf_block_group doubled[] = {one, {.num_blocks = 4, .free_order = twice, .free_count = 2}};
    const struct {
        kvleaf_blocks_params params;
        const char *field;
    } cases[] = {
        {{.num_blocks = 4, .num_groups = 1}, "groups"},          {{.groups = &one, .num_groups = 0}, "num_groups"},
        {{.groups = &one, .num_groups = -1}, "num_groups"},      {{.groups = &one, .num_groups = 17}, "num_groups"},
        {{.groups = second_bad, .num_groups = 2}, "num_blocks"}, {{.groups = doubled, .num_groups = 2}, "free_order"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_blocks_params params = cases[i].params;
        params.struct_size = sizeof params;
        kvleaf_blocks *blocks = NULL;
        assert_status(kvleaf_blocks_create(&params, &blocks), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_null(blocks);
    }
    kvleaf_blocks *blocks = make_groups(4, 4);
    kvleaf_seq seq = make_seq(blocks, 3);
    for (int32_t group = -1; group < 3; group += 3) {
        int32_t count = 0, table[4];
        const kvleaf_block_copy *copies;
        kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
        assert_status(kvleaf_blocks_seq_table(blocks, seq, group, table, 4, &count), KVLEAF_INVALID);
        assert_status(kvleaf_blocks_copies(blocks, group, &copies, &count), KVLEAF_INVALID);
        assert_status(kvleaf_blocks_copies_done(blocks, group, 0), KVLEAF_INVALID);
        assert_status(kvleaf_blocks_query_group(blocks, group, &stats), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, "group");
        assert_int_equal(kvleaf_blocks_refcount(blocks, group, 0), -1);
    }
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_or_none),
        cmocka_unit_test(test_tables_and_copies_of_each),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
