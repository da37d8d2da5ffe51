/* SPDX-License-Identifier: Apache-2.0 */
/* Faults that people met in block managers with a prefix cache, each with the right answer; the report is named. */
#include "blocks_support.h"

/* A sequence whose tokens are given, extended and all computed; *cached of them were found. */
static kvleaf_seq prompt(kvleaf_blocks *blocks, const kvleaf_seq_params *params, const int32_t *ids, int64_t count,
                         int64_t *cached)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    kvleaf_seq seq = 0;
    assert_ok(kvleaf_blocks_seq_create(blocks, params, &seq));
    assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, cached));
    compute(blocks, seq);
    return seq;
}

/* How many of the tokens a new sequence would find: what prefix_match says. */
static int64_t found(const kvleaf_blocks *blocks, const kvleaf_seq_params *params, const int32_t *ids, int64_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    int64_t matched = -1;
    assert_ok(kvleaf_blocks_prefix_match(blocks, params, &tokens, &matched));
    return matched;
}

static void ascending(int32_t *ids, int32_t count, int32_t first)
{
    for (int32_t i = 0; i < count; i++)
        ids[i] = first + i;
}

/* vllm PR #11565: a failed extend does not count, move or lose the hits it found on the way. */
static void test_no_blocks_leaves_hits(void **state)
{
    int32_t ids[24];
    (void)state;
    ascending(ids, 24, 100);
    kvleaf_blocks *blocks = NULL;
    assert_ok(
        kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 5, .block_size = 4, .max_blocks_per_seq = 8), &blocks));
    kvleaf_seq seq = prompt(blocks, NULL, ids, 8, NULL);
    int32_t first = entry_of(blocks, seq, 0), second = entry_of(blocks, seq, 1);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = 24};
    kvleaf_blocks_stats before = stats_of(blocks);
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    for (int32_t i = 0; i < 3; i++) {
        assert_status(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL), KVLEAF_NO_BLOCKS);
        kvleaf_blocks_stats stats = stats_of(blocks);
        assert_int_equal(stats.cached + stats.free, 5);
        assert_int_equal(stats.cached, 2);
        assert_int_equal(stats.hits, before.hits);
        assert_int_equal(stats.looked_up, before.looked_up);
        assert_int_equal(kvleaf_blocks_refcount(blocks, 0, first), 0);
        assert_int_equal(kvleaf_blocks_refcount(blocks, 0, second), 0);
        assert_int_equal(found(blocks, NULL, ids, 24), 8);
        check_blocks(blocks, 0);
    }
    kvleaf_blocks_destroy(&blocks);
}

/* vllm PR #3239, PR #11186: a prompt that is all there still leaves a token to compute, and a longer one finds it. */
static void test_a_token_is_left(void **state)
{
    static const int32_t lengths[] = {15, 16, 17, 32, 33};
    int32_t ids[80];
    (void)state;
    ascending(ids, 80, 7);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        kvleaf_blocks *blocks = make_blocks(32, 16);
        int32_t length = lengths[i], whole = length / 16 * 16;
        int64_t cached = -1;
        prompt(blocks, NULL, ids, length, &cached);
        assert_int_equal(cached, 0);
        kvleaf_seq again = prompt(blocks, NULL, ids, length, &cached);
        assert_true(cached < length);
        assert_int_equal(cached, whole < length ? whole : length - 1);
        assert_lengths(blocks, again, length, length, length);
        prompt(blocks, NULL, ids, length + 40, &cached);
        assert_int_equal(cached, whole);
        check_blocks(blocks, 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

/* vllm PR #4764: a block that lost its content to an eviction is not found by its former tokens. */
static void test_pool_of_one(void **state)
{
    int32_t a[5], b[5], c[5];
    int64_t cached = -1;
    (void)state;
    ascending(a, 5, 10);
    ascending(b, 5, 20);
    ascending(c, 5, 30);
    kvleaf_blocks *blocks = make_blocks(1, 4);
    kvleaf_seq seq = prompt(blocks, NULL, a, 4, &cached);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    assert_int_equal(found(blocks, NULL, a, 5), 4);
    seq = make_seq(blocks, 4); /* evicts it; its own ids are not known */
    assert_int_equal(found(blocks, NULL, a, 5), 0);
    assert_int_equal(found(blocks, NULL, b, 5), 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    assert_int_equal(found(blocks, NULL, a, 5), 0);
    seq = prompt(blocks, NULL, c, 4, &cached);
    assert_int_equal(cached, 0);
    assert_int_equal(found(blocks, NULL, c, 5), 4);
    assert_int_equal(stats_of(blocks).evictions, 1);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* vllm PR #7822: tokens that are not computed yet can't be found, and an aborted sequence leaves nothing behind. */
static void test_uncomputed_is_not_found(void **state)
{
    int32_t ids[12], num_q = 12;
    (void)state;
    ascending(ids, 12, 1);
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = 12};
    kvleaf_seq first = 0, second = 0;
    int64_t cached = -1;
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &first));
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &second));
    assert_ok(kvleaf_blocks_seq_extend(blocks, first, &tokens, &cached));
    assert_int_equal(cached, 0);
    assert_ok(kvleaf_blocks_step_begin(blocks, &first, &num_q, 1));
    assert_ok(kvleaf_blocks_seq_extend(blocks, second, &tokens, &cached));
    assert_int_equal(cached, 0);
    assert_ok(kvleaf_blocks_step_rollback(blocks, &first, 1));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &first));
    assert_int_equal(found(blocks, NULL, ids, 12), 0);
    kvleaf_blocks_stats stats = stats_of(blocks);
    assert_int_equal(stats.indexed, 0);
    assert_int_equal(stats.cached, 0);
    assert_int_equal(stats.free, 8 - 3);
    compute(blocks, second);
    assert_int_equal(found(blocks, NULL, ids, 12), 11);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* vllm #30931: the same tokens under other salts are other tokens, also where a salt looks like tokens. */
static void test_salts(void **state)
{
    const uint64_t salts[] = {0, 1, 2, 0x0000000200000001u, UINT64_MAX};
    enum { SALTS = sizeof salts / sizeof *salts };
    int32_t ids[9] = {1, 2, 1, 2, 1, 2, 1, 2, 1};
    (void)state;
    kvleaf_blocks *blocks = make_blocks(32, 2);
    for (int32_t i = 0; i < SALTS; i++) {
        kvleaf_seq_params params = {.struct_size = sizeof params, .salt = salts[i]};
        int64_t cached = -1;
        prompt(blocks, &params, ids, 9, &cached);
        assert_int_equal(cached, 0);
        for (int32_t j = 0; j < SALTS; j++) {
            params.salt = salts[j];
            assert_int_equal(found(blocks, &params, ids, 9), j <= i ? 8 : 0);
            assert_int_equal(found(blocks, &params, ids + 2, 7), j <= i ? 6 : 0);
        }
    }
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* vllm PR #18957: after a refusal and an eviction in between, a retry counts its hits anew. */
static void test_retry_after_eviction(void **state)
{
    int32_t ids[24], other[16];
    int64_t cached = -1;
    (void)state;
    ascending(ids, 24, 100);
    ascending(other, 16, 500);
    kvleaf_blocks *blocks = make_blocks(6, 4);
    kvleaf_seq cold = prompt(blocks, NULL, ids, 12, NULL), holder = make_seq(blocks, 4), seq = 0;
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &cold));
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = 24};
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    assert_status(kvleaf_blocks_seq_extend(blocks, seq, &tokens, &cached), KVLEAF_NO_BLOCKS);
    kvleaf_seq evictor = prompt(blocks, NULL, other, 12, &cached); /* two free blocks and the deepest of the three */
    assert_int_equal(found(blocks, NULL, ids, 24), 8);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &evictor));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &holder));
    assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, &cached));
    assert_int_equal(cached, 8);
    assert_lengths(blocks, seq, 8, 8, 24);
    assert_int_equal(stats_of(blocks).used, 6);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* TensorRT-LLM PR #12648: two prefill one prompt at once, the second's blocks are pinned and unpinned: in the end every
 * block can be taken once, and is another one. */
static void test_pinned_duplicates(void **state)
{
    enum { BLOCKS = 8 };
    int32_t ids[8], num_q[2] = {8, 8}, table[BLOCKS], count = 0;
    bool seen[BLOCKS] = {false};
    (void)state;
    ascending(ids, 8, 3);
    kvleaf_blocks *blocks = make_blocks(BLOCKS, 4);
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = 8};
    kvleaf_seq seqs[2];
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
        assert_ok(kvleaf_blocks_seq_extend(blocks, seqs[i], &tokens, NULL));
    }
    assert_ok(kvleaf_blocks_step_begin(blocks, seqs, num_q, 2));
    assert_ok(kvleaf_blocks_step_commit(blocks, seqs, NULL, 2));
    assert_int_equal(stats_of(blocks).indexed, 2);
    int32_t twins[2] = {entry_of(blocks, seqs[1], 0), entry_of(blocks, seqs[1], 1)};
    for (int32_t i = 0; i < 2; i++)
        assert_ok(kvleaf_blocks_pin(blocks, 0, twins[i]));
    for (int32_t i = 0; i < 2; i++)
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[1 - i]));
    assert_int_equal(stats_of(blocks).pinned, 2);
    for (int32_t i = 0; i < 2; i++)
        assert_ok(kvleaf_blocks_unpin(blocks, 0, twins[i]));
    check_blocks(blocks, 0);
    kvleaf_seq all = make_seq(blocks, BLOCKS * 4);
    assert_ok(kvleaf_blocks_seq_table(blocks, all, 0, table, BLOCKS, &count));
    assert_int_equal(count, BLOCKS);
    for (int32_t i = 0; i < count; i++) {
        assert_false(seen[table[i]]);
        seen[table[i]] = true;
    }
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* llm-d #704, #701, vllm PR #42656: of a chain the deepest block goes first, so that what is left is found; without its
 * root nothing of it is. */
static void test_chain_is_evicted_from_its_end(void **state)
{
    static const struct {
        int32_t taken, hits;
    } cases[] = {{0, 12}, {1, 8}, {2, 4}, {3, 0}};
    int32_t ids[13];
    (void)state;
    ascending(ids, 13, 40);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_blocks *blocks = make_blocks(3, 4);
        kvleaf_seq seq = prompt(blocks, NULL, ids, 12, NULL);
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
        make_seq(blocks, 4 * cases[i].taken);
        assert_int_equal(found(blocks, NULL, ids, 13), cases[i].hits);
        assert_int_equal(stats_of(blocks).evictions, cases[i].taken);
        check_blocks(blocks, 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

/* vllm PR #33711: a block goes when its last token has left the window of the next token, not before. */
static void test_window_over_block_edges(void **state)
{
    enum { BLOCK_SIZE = 4, TOKENS = 30 };
    (void)state;
    for (int32_t window = 1; window <= 13; window++) {
        kvleaf_blocks *blocks = NULL;
        assert_ok(kvleaf_blocks_create(
            kvleaf_blocks_params(.num_blocks = 10, .block_size = BLOCK_SIZE, .window = window), &blocks));
        kvleaf_seq seq = make_seq(blocks, 0);
        for (int32_t length = 1; length <= TOKENS; length++) {
            assert_ok(extend(blocks, seq, 1));
            compute(blocks, seq);
            for (int32_t at = 0; at < (length + BLOCK_SIZE - 1) / BLOCK_SIZE; at++) {
                int32_t last = at * BLOCK_SIZE + BLOCK_SIZE - 1; /* its last token; the next one is at `length` */
                bool seen = last > length - window;
                assert_int_equal(entry_of(blocks, seq, at) != KVLEAF_NO_BLOCK, seen);
            }
            check_blocks(blocks, 0);
        }
        kvleaf_blocks_destroy(&blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_blocks_leaves_hits),
        cmocka_unit_test(test_a_token_is_left),
        cmocka_unit_test(test_pool_of_one),
        cmocka_unit_test(test_uncomputed_is_not_found),
        cmocka_unit_test(test_salts),
        cmocka_unit_test(test_retry_after_eviction),
        cmocka_unit_test(test_pinned_duplicates),
        cmocka_unit_test(test_chain_is_evicted_from_its_end),
        cmocka_unit_test(test_window_over_block_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
