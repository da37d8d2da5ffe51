/* SPDX-License-Identifier: Apache-2.0 */
/* Managers, handles, extending and cutting sequences: each call, each status, and that a refusal changes nothing. */
#include "blocks_support.h"

#include <limits.h>

static void *some_allocate(void *user, size_t size)
{
    (void)user;
    return malloc(size);
}

static void test_create_refuses(void **state)
{
    (void)state;
    const int32_t twice[] = {0, 1, 0}, beyond[] = {0, 4}, below[] = {-1};
    const struct {
        kvleaf_blocks_params params;
        const char *field;
        int64_t value, limit;
    } cases[] = {
        {{.struct_size = 4, .num_blocks = 4}, "struct_size", 4, sizeof(kvleaf_blocks_params)},
        {{.num_blocks = 0}, "num_blocks", 0, 1},
        {{.num_blocks = -1}, "num_blocks", -1, 1},
        {{.num_blocks = 4, .block_size = -1}, "block_size", -1, 0},
        {{.num_blocks = 4, .block_size = 257}, "block_size", 257, 256},
        {{.num_blocks = 4, .max_sequences = -1}, "max_sequences", -1, 0},
        {{.num_blocks = 4, .max_sequences = 1048577}, "max_sequences", 1048577, 1048576},
        {{.num_blocks = 4, .max_blocks_per_seq = -1}, "max_blocks_per_seq", -1, 0},
        {{.num_blocks = 4, .free_order = twice, .free_count = 5}, "free_count", 5, 4},
        {{.num_blocks = 4, .free_order = twice, .free_count = -1}, "free_count", -1, 0},
        {{.num_blocks = 4, .free_count = 2}, "free_order", 0, 0},
        {{.num_blocks = 4, .free_order = twice, .free_count = 3}, "free_order", 0, 1},
        {{.num_blocks = 4, .free_order = beyond, .free_count = 2}, "free_order", 4, 3},
        {{.num_blocks = 4, .free_order = below, .free_count = 1}, "free_order", -1, 3},
        {{.num_blocks = 4, .allocator.allocate = some_allocate}, "allocator", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_blocks_params params = cases[i].params;
        params.struct_size = params.struct_size ? params.struct_size : sizeof params;
        kvleaf_blocks *blocks = NULL;
        assert_status(kvleaf_blocks_create(&params, &blocks), KVLEAF_INVALID);
        assert_null(blocks);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_int_equal(kvleaf_last_error()->value, cases[i].value);
        assert_int_equal(kvleaf_last_error()->limit, cases[i].limit);
    }
    kvleaf_blocks *blocks = NULL;
    assert_status(kvleaf_blocks_create(NULL, &blocks), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 4), NULL), KVLEAF_INVALID);
    kvleaf_blocks_destroy(NULL);
    kvleaf_blocks_destroy(&blocks);
}

static void test_defaults(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(3, 0);
    assert_int_equal(blocks->block_size, 16);
    assert_int_equal(blocks->max_sequences, 256);
    assert_int_equal(blocks->max_blocks_per_seq, 3);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
    assert_null(blocks);
}

static void test_given_order(void **state)
{
    (void)state;
    int32_t order[] = {5, 0, 3};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 6, .block_size = 4, .free_order = order, .free_count = 3), &blocks));
    memset(order, 0, sizeof order); /* it was copied */
    check_blocks(blocks, 3);
    assert_int_equal(stats_of(blocks).used, 3);
    assert_int_equal(stats_of(blocks).slots_wasted, 0);
    kvleaf_seq seq = make_seq(blocks, 9);
    assert_table(blocks, seq, (int32_t[]){5, 0, 3}, 3);
    assert_status(extend(blocks, seq, 4), KVLEAF_NO_BLOCKS);
    check_blocks(blocks, 3);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    seq = make_seq(blocks, 12); /* deepest block first went back */
    assert_table(blocks, seq, (int32_t[]){3, 0, 5}, 3);
    kvleaf_blocks_destroy(&blocks);
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 6, .free_order = order), &blocks));
    check_blocks(blocks, 6);
    kvleaf_blocks_destroy(&blocks);
}

static void test_extend_takes_blocks_on_demand(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(10, 4);
    kvleaf_seq seq = make_seq(blocks, 0);
    for (int64_t tokens = 1; tokens <= 40; tokens++) {
        int64_t cached = -1;
        kvleaf_tokens one = {.struct_size = sizeof one, .count = 1};
        assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &one, &cached));
        assert_int_equal(cached, 0);
        assert_int_equal(info_of(blocks, seq).num_blocks, (tokens + 3) / 4);
        assert_int_equal(stats_of(blocks).slots_wasted, (4 - tokens % 4) % 4);
        assert_int_equal(entry_of(blocks, seq, (int32_t)(tokens - 1) / 4), (tokens - 1) / 4);
        check_blocks(blocks, 0);
    }
    kvleaf_blocks_destroy(&blocks);
}

static void test_extend_refuses(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL;
    assert_ok(
        kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 6, .block_size = 4, .max_blocks_per_seq = 5), &blocks));
    kvleaf_seq other = make_seq(blocks, 8), seq = make_seq(blocks, 3);
    static const struct {
        int64_t count;
        kvleaf_status status;
        int64_t value, limit;
    } cases[] = {
        {-1, KVLEAF_INVALID, -1, 0},  {18, KVLEAF_TOO_SMALL, 18, 17}, {INT64_MAX, KVLEAF_TOO_SMALL, INT64_MAX, 17},
        {14, KVLEAF_NO_BLOCKS, 4, 3}, {17, KVLEAF_NO_BLOCKS, 4, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_status(extend(blocks, seq, cases[i].count), cases[i].status);
        assert_int_equal(kvleaf_last_error()->value, cases[i].value);
        assert_int_equal(kvleaf_last_error()->limit, cases[i].limit);
        assert_string_equal(kvleaf_last_error()->field, "count");
        bool can = true;
        if (cases[i].count >= 0) {
            assert_ok(kvleaf_blocks_can_extend(blocks, seq, cases[i].count, &can));
            assert_false(can);
        }
        assert_lengths(blocks, seq, 3, 3, 3);
        check_blocks(blocks, 0);
    }
    bool can = false;
    assert_ok(kvleaf_blocks_can_extend(blocks, seq, 13, &can));
    assert_true(can);
    assert_ok(extend(blocks, seq, 13));
    assert_ok(kvleaf_blocks_can_extend(blocks, seq, 0, &can));
    assert_true(can);
    assert_ok(extend(blocks, seq, 0));
    assert_lengths(blocks, seq, 3, 3, 16);
    assert_status(extend(blocks, other, 1), KVLEAF_NO_BLOCKS);
    kvleaf_tokens short_struct = {.struct_size = 1, .count = 1};
    assert_status(kvleaf_blocks_seq_extend(blocks, seq, &short_struct, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_extend(blocks, seq, NULL, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_can_extend(blocks, seq, 1, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_can_extend(blocks, seq, -1, &can), KVLEAF_INVALID);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_pieces_and_unknown_ids(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(10, 4);
    kvleaf_seq seq = make_seq(blocks, 0);
    const int32_t ids[] = {7, 8, 9, 10, 11};
    kvleaf_tokens known = {.struct_size = sizeof known, .ids = ids, .count = 5};
    assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &known, NULL));
    assert_ok(extend(blocks, seq, 2));
    assert_lengths(blocks, seq, 0, 0, 7);
    compute(blocks, seq);
    assert_ok(extend(blocks, seq, 6));
    assert_lengths(blocks, seq, 7, 7, 13);
    assert_table(blocks, seq, (int32_t[]){0, 1, 2, 3}, 4);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_truncate(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(6, 4);
    kvleaf_seq seq = make_seq(blocks, 10);
    assert_ok(extend(blocks, seq, 10)); /* 20 tokens: blocks 0-4 */
    assert_status(kvleaf_blocks_seq_truncate(blocks, seq, 21), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_truncate(blocks, seq, -1), KVLEAF_INVALID);
    static const struct {
        int64_t length, committed;
        int32_t count;
    } cases[] = {{20, 10, 5}, {17, 10, 5}, {16, 10, 4}, {11, 10, 3}, {9, 9, 3}, {8, 8, 2}, {1, 1, 1}, {0, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(kvleaf_blocks_seq_truncate(blocks, seq, cases[i].length));
        assert_lengths(blocks, seq, cases[i].committed, cases[i].committed, cases[i].length);
        assert_int_equal(info_of(blocks, seq).num_blocks, cases[i].count);
        check_blocks(blocks, 0);
    }
    assert_ok(extend(blocks, seq, 24)); /* in the order in which they were freed */
    assert_table(blocks, seq, (int32_t[]){5, 4, 3, 2, 1, 0}, 6);
    kvleaf_blocks_destroy(&blocks);
}

static void test_freed_deepest_first(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(6, 4);
    kvleaf_seq first = make_seq(blocks, 12), second = make_seq(blocks, 12);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &first));
    assert_int_equal(first, 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &second));
    kvleaf_seq third = make_seq(blocks, 24);
    assert_table(blocks, third, (int32_t[]){2, 1, 0, 5, 4, 3}, 6);
    kvleaf_blocks_destroy(&blocks);
}

static void test_handles(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL, *others = make_blocks(8, 4);
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8, .max_sequences = 2), &blocks));
    kvleaf_seq seq = 0, gone, foreign = make_seq(others, 3), too_many = 77;
    kvleaf_seq_params params = {.struct_size = sizeof params, .user = 42};
    assert_ok(kvleaf_blocks_seq_create(blocks, &params, &seq));
    assert_int_equal(info_of(blocks, seq).user, 42);
    gone = make_seq(blocks, 5);
    assert_status(kvleaf_blocks_seq_create(blocks, NULL, &too_many), KVLEAF_TOO_SMALL);
    assert_int_equal(kvleaf_last_error()->limit, 2);
    assert_status(kvleaf_blocks_seq_fork(blocks, seq, 0, &too_many), KVLEAF_TOO_SMALL);
    assert_int_equal(too_many, 77);
    kvleaf_seq copy = gone;
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &copy));
    kvleaf_seq next = make_seq(blocks, 5); /* in the slot of the one that is gone */
    params.struct_size = 3;
    assert_status(kvleaf_blocks_seq_create(blocks, &params, &too_many), KVLEAF_INVALID);

    const struct {
        kvleaf_seq seq;
        kvleaf_status status;
    } bad[] = {{0, KVLEAF_INVALID}, {gone, KVLEAF_STALE}, {foreign, KVLEAF_FOREIGN}, {~gone, KVLEAF_FOREIGN}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvleaf_seq_info info = {.struct_size = sizeof info};
        kvleaf_seq handle = bad[i].seq, child = 0;
        int32_t count = 0, one = 1;
        bool can;
        assert_status(extend(blocks, bad[i].seq, 1), bad[i].status);
        assert_status(kvleaf_blocks_can_extend(blocks, bad[i].seq, 1, &can), bad[i].status);
        assert_status(kvleaf_blocks_seq_fork(blocks, bad[i].seq, 0, &child), bad[i].status);
        assert_status(kvleaf_blocks_seq_truncate(blocks, bad[i].seq, 0), bad[i].status);
        assert_status(kvleaf_blocks_seq_destroy(blocks, &handle), bad[i].status);
        assert_int_equal(handle, bad[i].seq);
        assert_status(kvleaf_blocks_seq_table(blocks, bad[i].seq, 0, NULL, 0, &count), bad[i].status);
        assert_status(kvleaf_blocks_seq_query(blocks, bad[i].seq, &info), bad[i].status);
        assert_status(kvleaf_blocks_step_begin(blocks, &bad[i].seq, &one, 1), bad[i].status);
        assert_status(kvleaf_blocks_step_commit(blocks, &bad[i].seq, NULL, 1), bad[i].status);
        assert_status(kvleaf_blocks_step_rollback(blocks, &bad[i].seq, 1), bad[i].status);
        check_blocks(blocks, 0);
    }
    assert_lengths(blocks, next, 5, 5, 5);
    kvleaf_blocks_destroy(&others);
    kvleaf_blocks_destroy(&blocks);
}

/* A handle outlives its manager; the next one, often at the same address, must not take it for its own. */
static void test_handle_of_a_former_manager(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 100; i++) {
        kvleaf_blocks *blocks = make_blocks(4, 4);
        kvleaf_seq former = make_seq(blocks, 1);
        kvleaf_blocks_destroy(&blocks);
        blocks = make_blocks(4, 4);
        make_seq(blocks, 1);
        kvleaf_status status = extend(blocks, former, 1);
        assert_true(status == KVLEAF_FOREIGN || status == KVLEAF_STALE);
        kvleaf_blocks_destroy(&blocks);
    }
}

static void test_generations_wrap(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 1, .max_sequences = 1), &blocks));
    blocks->sequences[0].generation = (1u << 24) - 1;
    kvleaf_seq last = make_seq(blocks, 0), copy = last;
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &copy));
    kvleaf_seq first = make_seq(blocks, 0);
    assert_status(extend(blocks, last, 1), KVLEAF_STALE);
    assert_ok(extend(blocks, first, 1));
    kvleaf_blocks_destroy(&blocks);
}

static void test_table(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq seq = make_seq(blocks, 9);
    int32_t table[5] = {-7, -7, -7, -7, -7}, count = -1;
    assert_status(kvleaf_blocks_seq_table(blocks, seq, 0, table, 2, &count), KVLEAF_TOO_SMALL);
    assert_int_equal(count, 3);
    assert_int_equal(table[0], -7);
    assert_status(kvleaf_blocks_seq_table(blocks, seq, 0, NULL, 0, &count), KVLEAF_TOO_SMALL);
    assert_status(kvleaf_blocks_seq_table(blocks, seq, 0, NULL, 4, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_table(blocks, seq, 0, table, -1, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_table(blocks, seq, 0, table, 4, NULL), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, 0, table, 4, &count));
    assert_int_equal(table[2], 2);
    assert_int_equal(table[3], -7);
    kvleaf_blocks_destroy(&blocks);
}

static void test_nulls(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq seq = make_seq(blocks, 9), out;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = 1};
    kvleaf_seq_info info = {.struct_size = sizeof info};
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    const kvleaf_block_copy *copies;
    int32_t count, one = 1;
    bool can;
    assert_status(kvleaf_blocks_seq_create(NULL, NULL, &out), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_create(blocks, NULL, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_extend(NULL, seq, &tokens, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_can_extend(NULL, seq, 1, &can), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_fork(NULL, seq, 0, &out), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_fork(blocks, seq, 0, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_truncate(NULL, seq, 0), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_destroy(NULL, &seq), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_destroy(blocks, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_table(NULL, seq, 0, NULL, 0, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_query(NULL, seq, &info), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_query(blocks, seq, NULL), KVLEAF_INVALID);
    info.struct_size = 1;
    assert_status(kvleaf_blocks_seq_query(blocks, seq, &info), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_query(NULL, &stats), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_query(blocks, NULL), KVLEAF_INVALID);
    stats.struct_size = 1;
    assert_status(kvleaf_blocks_query(blocks, &stats), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_begin(NULL, &seq, &one, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_begin(blocks, NULL, &one, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_begin(blocks, &seq, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_begin(blocks, &seq, &one, -1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_commit(NULL, &seq, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_commit(blocks, NULL, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_rollback(NULL, &seq, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_copies(NULL, 0, &copies, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_copies(blocks, 0, NULL, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_copies(blocks, 0, &copies, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_copies_done(NULL, 0, 0), KVLEAF_INVALID);
    assert_int_equal(kvleaf_blocks_refcount(NULL, 0, 0), -1);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, -1), -1);
    assert_int_equal(kvleaf_blocks_refcount(blocks, 0, 8), -1);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_given_order),
        cmocka_unit_test(test_extend_takes_blocks_on_demand),
        cmocka_unit_test(test_extend_refuses),
        cmocka_unit_test(test_pieces_and_unknown_ids),
        cmocka_unit_test(test_truncate),
        cmocka_unit_test(test_freed_deepest_first),
        cmocka_unit_test(test_handles),
        cmocka_unit_test(test_handle_of_a_former_manager),
        cmocka_unit_test(test_generations_wrap),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_nulls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
