/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the way of sequences and prefix index out of a manager and into another: nothing is lost, sharing stays
 * sharing, what the other has already is shared with it, and what contradicts itself is refused before anything
 * changes.
 */
#include "saved_support.h"

static kvleaf_seq_params with_salt(uint64_t salt)
{
    return (kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .salt = salt};
}

static void assert_same_seq(const kvleaf_blocks *a, kvleaf_seq x, const kvleaf_blocks *b, kvleaf_seq y)
{
    int32_t ids[2][256], table[2][64], count[2];
    kvleaf_seq_info was = info_of(a, x), is = info_of(b, y);
    assert_int_equal(is.committed, was.committed);
    assert_int_equal(is.extended, was.committed);
    assert_true(is.user == was.user && is.salt == was.salt);
    assert_true(is.known == (was.known < was.committed ? was.known : was.committed));
    for (int32_t group = 0; group < a->num_groups; group++) {
        assert_ok(kvleaf_blocks_seq_table(a, x, group, table[0], 64, &count[0]));
        assert_ok(kvleaf_blocks_seq_table(b, y, group, table[1], 64, &count[1]));
        assert_int_equal(count[1], (was.committed + a->block_size - 1) / a->block_size);
        for (int32_t i = 0; i < count[1]; i++)
            assert_int_equal(table[0][i] == KVLEAF_NO_BLOCK, table[1][i] == KVLEAF_NO_BLOCK);
    }
    if (a->groups[a->primary].window)
        return;
    assert_ok(kvleaf_blocks_seq_ids(a, x, 0, ids[0], is.known));
    assert_ok(kvleaf_blocks_seq_ids(b, y, 0, ids[1], is.known));
    assert_memory_equal(ids[0], ids[1], (size_t)is.known * sizeof(int32_t));
}

/* Two entries of tables are one block there where they are one here. */
static void assert_same_sharing(const kvleaf_blocks *a, const kvleaf_seq *x, const kvleaf_blocks *b,
                                const kvleaf_seq *y, int32_t n, int32_t group)
{
    int32_t tables[2][MAX_SEQS][64], counts[2][MAX_SEQS];
    for (int32_t i = 0; i < n; i++) {
        assert_ok(kvleaf_blocks_seq_table(a, x[i], group, tables[0][i], 64, &counts[0][i]));
        assert_ok(kvleaf_blocks_seq_table(b, y[i], group, tables[1][i], 64, &counts[1][i]));
    }
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < i; j++)
            for (int32_t k = 0; k < counts[1][i] && k < counts[1][j]; k++)
                if ((tables[0][i][k] == tables[0][j][k]) != (tables[1][i][k] == tables[1][j][k]))
                    fail_msg("sequences %d and %d, entry %d", i, j, k);
}

static void test_sharing_stays(void **state)
{
    (void)state;
    for (int32_t no_index = 0; no_index < 2; no_index++) {
        kvleaf_blocks *a = NULL, *b = NULL;
        assert_ok(kvleaf_blocks_create(
            kvleaf_blocks_params(.num_blocks = 40, .block_size = BLOCK, .no_prefix_cache = no_index), &a));
        assert_ok(kvleaf_blocks_create(
            kvleaf_blocks_params(.num_blocks = 12, .block_size = BLOCK, .no_prefix_cache = no_index), &b));
        kvleaf_seq seqs[5], loaded[5] = {0};
        seqs[0] = make_prompt(a, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .user = 7, .salt = 3},
                              ids_from(100), 22, NULL);
        seqs[1] = fork_seq(a, seqs[0], 22); /* a partial last block, shared */
        seqs[2] = fork_seq(a, seqs[0], 18); /* and shorter in it */
        seqs[3] = fork_seq(a, seqs[0], 9);
        extend_ids(a, seqs[3], ids_from(500), 6);
        compute(a, seqs[3]);
        seqs[4] = make_seq(a, 7);          /* without ids */
        assert_ok(extend(a, seqs[4], 11)); /* what is not committed stays behind */
        assert_ok(carry(a, seqs, 5, false, b, loaded));
        for (int32_t i = 0; i < 5; i++)
            assert_same_seq(a, seqs[i], b, loaded[i]);
        assert_same_sharing(a, seqs, b, loaded, 5, 0);
        assert_int_equal(stats_of(b).used, 6 + 2 + 2);
        assert_int_equal(stats_of(b).tokens, 22 + 22 + 18 + 15 + 7);
        assert_int_equal(
            match_of(b, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .salt = 3}, ids_from(100), 22),
            no_index ? 0 : 20);
        for (int32_t i = 0; i < 5; i++)
            assert_ok(kvleaf_blocks_seq_destroy(b, &loaded[i]));
        check_blocks(b, 0);
        assert_int_equal(stats_of(b).used, 0);
        kvleaf_blocks_destroy(&a);
        kvleaf_blocks_destroy(&b);
    }
}

static void test_index_alone(void **state)
{
    (void)state;
    const kvleaf_seq_params salted = with_salt(5);
    const kvleaf_span span = {.start = 5, .count = 2, .key = {11, 12}};
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(20, BLOCK);
    kvleaf_seq live = make_prompt(a, NULL, ids_from(100), 13, NULL);
    kvleaf_seq seq = fork_seq(a, live, 8);
    extend_ids(a, seq, ids_from(300), 9);
    compute(a, seq);
    assert_ok(kvleaf_blocks_seq_destroy(a, &seq));
    seq = make_prompt(a, &salted, ids_from(100), 9, NULL);
    assert_ok(kvleaf_blocks_seq_destroy(a, &seq));
    assert_ok(kvleaf_blocks_seq_create(a, NULL, &seq));
    const kvleaf_tokens image = {
        .struct_size = sizeof image, .ids = ids_from(700), .count = 8, .spans = &span, .num_spans = 1};
    assert_ok(kvleaf_blocks_seq_extend(a, seq, &image, NULL));
    compute(a, seq);
    assert_ok(kvleaf_blocks_seq_destroy(a, &seq));
    assert_int_equal(stats_of(a).indexed, 3 + 2 + 2 + 2);
    for (int32_t again = 0; again < 2; again++) {
        assert_ok(carry(a, NULL, 0, true, b, NULL));
        assert_int_equal(stats_of(b).used, 0);
        assert_int_equal(stats_of(b).cached, 9); /* and not once more where they are there */
        assert_int_equal(match_of(b, NULL, ids_from(100), 40), 12);
        assert_int_equal(match_of(b, &salted, ids_from(100), 40), 8);
        int32_t branch[20];
        memcpy(branch, ids_from(100), 8 * sizeof *branch);
        memcpy(branch + 8, ids_from(300), 12 * sizeof *branch);
        assert_int_equal(match_of(b, NULL, branch, 20), 16);
        assert_int_equal(match_of(b, NULL, ids_from(700), 20), 4); /* up to the image, which ids do not name */
        kvleaf_tokens more = image;
        more.ids = ids_from(700);
        more.count = 20;
        int64_t matched = 0;
        assert_ok(kvleaf_blocks_prefix_match(b, NULL, &more, &matched));
        assert_int_equal(matched, 8);
    }
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* The order of siblings decides which child a partial match looks at; eviction takes the deepest first. */
static void test_order_stays(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(14, BLOCK);
    for (int32_t i = 0; i < 10; i++) {
        int32_t ids[8] = {1, 2, 3, 4, 50 + i, 6, 7, 8};
        kvleaf_seq seq = make_prompt(a, NULL, ids, 8, NULL);
        assert_ok(kvleaf_blocks_seq_destroy(a, &seq));
    }
    assert_ok(carry(a, NULL, 0, true, b, NULL));
    for (int32_t i = 0; i < 10; i++) {
        const int32_t ids[8] = {1, 2, 3, 4, 50 + i, 6, 9, 9};
        assert_int_equal(match_of(b, NULL, ids, 8), match_of(a, NULL, ids, 8)); /* the 8 latest */
    }
    make_seq(b, 13 * BLOCK);
    const int32_t first[5] = {1, 2, 3, 4, 5};
    assert_int_equal(match_of(b, NULL, first, 5), 4); /* the root goes last */
    check_blocks(b, 0);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* What the other has is shared with it: a live sequence's blocks and cached ones. */
static void test_shared_with_what_is_there(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(7, BLOCK);
    kvleaf_seq seqs[2], loaded[2] = {0};
    seqs[0] = make_prompt(a, NULL, ids_from(100), 14, NULL);
    seqs[1] = make_prompt(a, NULL, ids_from(200), 10, NULL);
    kvleaf_seq there = make_prompt(b, NULL, ids_from(100), 9, NULL);
    kvleaf_seq gone = make_prompt(b, NULL, ids_from(200), 9, NULL);
    assert_ok(kvleaf_blocks_seq_destroy(b, &gone));
    assert_int_equal(stats_of(b).cached, 2);
    assert_int_equal(stats_of(b).free, 7 - 3 - 2);
    /* 2 + 1 blocks are needed beside those that are there; the 2 cached ones, which are wanted, can't be had for them.
     */
    assert_status(carry(a, seqs, 2, false, b, loaded), KVLEAF_NO_BLOCKS);
    assert_int_equal(stats_of(b).cached, 2);
    assert_int_equal(stats_of(b).sequences, 1);
    assert_ok(kvleaf_blocks_seq_truncate(b, there, 8));
    assert_ok(carry(a, seqs, 2, false, b, loaded));
    for (int32_t i = 0; i < 2; i++) {
        assert_same_seq(a, seqs[i], b, loaded[i]);
        assert_int_equal(stats_of(b).free, 0);
    }
    assert_int_equal(entry_of(b, loaded[0], 0), entry_of(b, there, 0));
    assert_int_equal(entry_of(b, loaded[0], 1), entry_of(b, there, 1));
    assert_int_equal(info_of(b, there).blocks_shared, 2);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* Two sequences that computed one prompt beside each other have blocks of their own; where the prompt is cached they
 * get the cached blocks, which count once. */
static void test_same_prompt_twice(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(4, BLOCK);
    kvleaf_seq seqs[2], loaded[2] = {0};
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(kvleaf_blocks_seq_create(a, NULL, &seqs[i]));
        extend_ids(a, seqs[i], ids_from(100), 9);
    }
    compute(a, seqs[0]);
    compute(a, seqs[1]);
    assert_int_equal(stats_of(a).used, 6);
    kvleaf_seq gone = make_prompt(b, NULL, ids_from(100), 9, NULL);
    assert_ok(kvleaf_blocks_seq_destroy(b, &gone));
    assert_int_equal(stats_of(b).cached, 2);
    assert_ok(carry(a, seqs, 2, false, b, loaded));
    assert_int_equal(stats_of(b).used, 4);
    assert_int_equal(entry_of(b, loaded[0], 1), entry_of(b, loaded[1], 1));
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* Cached blocks that are wanted are not evicted for those that are taken beside them. */
static void test_wanted_blocks_are_not_evicted(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(6, BLOCK);
    kvleaf_seq seq = make_prompt(a, NULL, ids_from(100), 20, NULL), loaded = 0;
    kvleaf_seq first = make_prompt(b, NULL, ids_from(100), 8, NULL), other = 0;
    assert_ok(kvleaf_blocks_seq_destroy(b, &first));
    other = make_prompt(b, NULL, ids_from(900), 16, NULL);
    assert_ok(kvleaf_blocks_seq_destroy(b, &other));
    assert_int_equal(stats_of(b).cached, 6); /* the least recently used are those that are wanted */
    assert_ok(carry(a, &seq, 1, false, b, &loaded));
    assert_same_seq(a, seq, b, loaded);
    assert_int_equal(stats_of(b).cached, 1);
    assert_int_equal(match_of(b, NULL, ids_from(900), 16), 4);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

static void test_windows(void **state)
{
    (void)state;
    const kvleaf_block_group groups[] = {{.num_blocks = 40}, {.num_blocks = 40, .window = 6}};
    const kvleaf_block_group small[] = {{.num_blocks = 14}, {.num_blocks = 7, .window = 6}};
    kvleaf_blocks *a = NULL, *b = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BLOCK, .groups = groups, .num_groups = 2), &a));
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BLOCK, .groups = small, .num_groups = 2), &b));
    kvleaf_seq seqs[2], loaded[2] = {0};
    seqs[0] = make_prompt(a, NULL, ids_from(100), 23, NULL);
    seqs[1] = fork_seq(a, seqs[0], 22);
    extend_ids(a, seqs[1], ids_from(400), 5);
    compute(a, seqs[1]);
    assert_ok(carry(a, seqs, 2, false, b, loaded));
    for (int32_t i = 0; i < 2; i++)
        assert_same_seq(a, seqs[i], b, loaded[i]);
    assert_same_sharing(a, seqs, b, loaded, 2, 0);
    assert_same_sharing(a, seqs, b, loaded, 2, 1);
    /* They go on as the ones that were saved. */
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(extend_ids(a, seqs[i], ids_from(600), 6), 0);
        compute(a, seqs[i]);
        assert_int_equal(extend_ids(b, loaded[i], ids_from(600), 6), 0);
        compute(b, loaded[i]);
        assert_same_seq(a, seqs[i], b, loaded[i]);
        check_blocks(b, 0);
    }
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* All groups with windows: ids went with their blocks, and what follows is found no more. */
static void test_windows_alone(void **state)
{
    (void)state;
    const kvleaf_block_group group = {.num_blocks = 40, .window = 5};
    kvleaf_blocks *a = NULL, *b = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BLOCK, .groups = &group, .num_groups = 1), &a));
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BLOCK, .groups = &group, .num_groups = 1), &b));
    kvleaf_seq seqs[2], loaded[2] = {0};
    seqs[0] = make_prompt(a, NULL, ids_from(100), 23, NULL);
    seqs[1] = make_prompt(a, NULL, ids_from(100), 3, NULL);
    assert_ok(carry(a, seqs, 2, true, b, loaded));
    for (int32_t i = 0; i < 2; i++)
        assert_same_seq(a, seqs[i], b, loaded[i]);
    extend_ids(b, loaded[0], ids_from(600), 20);
    compute(b, loaded[0]);
    check_blocks(b, 0);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

/* Until a pending copy is made, its tokens are to be read from its source; slots without tokens are not read. */
static void test_where_records_lie(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(10, BLOCK);
    kvleaf_seq seqs[2];
    kvl_save save;
    seqs[0] = make_prompt(a, NULL, ids_from(100), 7, NULL);
    seqs[1] = fork_seq(a, seqs[0], 6);
    extend_ids(a, seqs[1], ids_from(900), 3);
    assert_int_equal(pending(a, NULL), 1);
    assert_ok(kvl_save_begin(a, seqs, 2, false, &save));
    assert_int_equal(save.saved.num_records[0], 3);
    const int32_t blocks[] = {0, 1, 1}, tokens[] = {4, 3, 2};
    assert_memory_equal(save.blocks[0], blocks, sizeof blocks);
    assert_memory_equal(save.tokens[0], tokens, sizeof tokens);
    kvl_save_free(a, &save);
    kvleaf_blocks_destroy(&a);
}

static void test_terms_stay(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(10, BLOCK), *b = make_blocks(10, BLOCK);
    kvleaf_seq_params params = {.struct_size = sizeof params, .priority = KVLEAF_PRIORITY_LOW, .ttl_ms = 3600000};
    kvleaf_seq cached = make_prompt(a, &params, ids_from(100), 5, NULL), live = 0, loaded = 0;
    assert_ok(kvleaf_blocks_seq_destroy(a, &cached));
    params.priority = KVLEAF_PRIORITY_HIGH;
    params.ttl_ms = 0;
    live = make_prompt(a, &params, ids_from(200), 5, NULL);
    assert_ok(carry(a, &live, 1, true, b, &loaded));
    assert_ok(kvleaf_blocks_seq_destroy(b, &loaded));
    const kvl_group *group = &b->groups[0];
    assert_int_equal(group->cached[0].count, 1);
    assert_true(group->blocks[group->cached[0].first].expires > kvl_blocks_now(b) + 3000000);
    assert_int_equal(group->cached[KVL_PRIORITIES - 1].count, 1);
    assert_true(group->blocks[group->cached[KVL_PRIORITIES - 1].first].expires == 0);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

static uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = (*state ^ (*state >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int32_t pick(uint64_t *random, int32_t count)
{
    return (int32_t)(next_random(random) >> 33) % count;
}

/* One random call on one of the sequences; ids repeat, so that prefixes are found. */
static void stir(kvleaf_blocks *blocks, kvleaf_seq *seqs, uint64_t *random)
{
    int32_t at = pick(random, MAX_SEQS), count = 1 + pick(random, 11), ids[16];
    const kvleaf_seq_params params = {.struct_size = sizeof params, .salt = (uint64_t)pick(random, 2)};
    if (!seqs[at]) {
        assert_ok(kvleaf_blocks_seq_create(blocks, &params, &seqs[at]));
    } else if (pick(random, 6) == 0) {
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[at]));
        return;
    }
    kvleaf_seq_info info = info_of(blocks, seqs[at]);
    int32_t other = pick(random, MAX_SEQS);
    if (!seqs[other] && info.committed > 0 && pick(random, 2)) {
        int64_t back = pick(random, 3);
        int64_t pos = info.committed > back ? info.committed - back : info.committed;
        if (kvleaf_blocks_seq_fork(blocks, seqs[at], pos, &seqs[other]) != KVLEAF_OK)
            seqs[other] = 0; /* its blocks left the window */
        return;
    }
    for (int32_t i = 0; i < count; i++)
        ids[i] = pick(random, 8) ? (int32_t)((info.extended + i) % 5) : pick(random, 3);
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = pick(random, 12) ? ids : NULL, .count = count};
    if (kvleaf_blocks_seq_extend(blocks, seqs[at], &tokens, NULL) == KVLEAF_OK && pick(random, 4))
        compute(blocks, seqs[at]);
}

static void test_random(void **state)
{
    (void)state;
    static const struct {
        int32_t num_groups, windows[2];
    } shapes[] = {{1, {0}}, {2, {0, 7}}, {2, {9, 5}}};
    const char *given = getenv("KVLEAF_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20261130;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (size_t shape = 0; shape < sizeof shapes / sizeof *shapes; shape++) {
        kvleaf_block_group groups[2] = {{.num_blocks = 60, .window = shapes[shape].windows[0]},
                                        {.num_blocks = 60, .window = shapes[shape].windows[1]}};
        const kvleaf_blocks_params params = {.struct_size = sizeof params,
                                             .block_size = BLOCK,
                                             .max_sequences = 2 * MAX_SEQS,
                                             .groups = groups,
                                             .num_groups = shapes[shape].num_groups};
        kvleaf_blocks *a = NULL, *b = NULL;
        kvleaf_seq seqs[MAX_SEQS] = {0}, saved[MAX_SEQS], loaded[MAX_SEQS];
        uint64_t random = seed + shape;
        assert_ok(kvleaf_blocks_create(&params, &a));
        assert_ok(kvleaf_blocks_create(&params, &b));
        for (int32_t round = 0; round < 150; round++) {
            int32_t count = 0;
            for (int32_t i = 0; i < 12; i++)
                stir(a, seqs, &random);
            for (int32_t i = 0; i < MAX_SEQS; i++)
                if (seqs[i] && pick(&random, 3))
                    saved[count++] = seqs[i];
            kvleaf_status status = carry(a, saved, count, pick(&random, 2), b, loaded);
            if (status) { /* what other rounds left there is in the way */
                assert_int_equal(status, KVLEAF_NO_BLOCKS);
                continue;
            }
            for (int32_t i = 0; i < count; i++)
                assert_same_seq(a, saved[i], b, loaded[i]);
            for (int32_t i = 0; i < count; i++) {
                extend(b, loaded[i], 1 + pick(&random, 6));
                if (info_of(b, loaded[i]).extended > info_of(b, loaded[i]).committed)
                    compute(b, loaded[i]);
            }
            check_blocks(b, 0);
            for (int32_t i = 0; i < count; i++)
                assert_ok(kvleaf_blocks_seq_destroy(b, &loaded[i]));
            check_blocks(b, 0);
        }
        kvleaf_blocks_destroy(&a);
        kvleaf_blocks_destroy(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sharing_stays),
        cmocka_unit_test(test_index_alone),
        cmocka_unit_test(test_order_stays),
        cmocka_unit_test(test_shared_with_what_is_there),
        cmocka_unit_test(test_same_prompt_twice),
        cmocka_unit_test(test_wanted_blocks_are_not_evicted),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_windows_alone),
        cmocka_unit_test(test_where_records_lie),
        cmocka_unit_test(test_terms_stay),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
