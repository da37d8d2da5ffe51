/* SPDX-License-Identifier: Apache-2.0 */
/* Which cached block goes when none is free: least recently used, priorities, time, pins, an application's policy. */
#include "blocks_support.h"

#define BS 4

/* A prompt of its own: `blocks` blocks of tokens that begin with `name`. */
static const int32_t *prompt(int32_t name, int32_t blocks)
{
    static int32_t ids[64];
    for (int32_t i = 0; i < blocks * BS; i++)
        ids[i] = name * 1000 + i;
    return ids;
}

/* Leaves a chain in the index; returns its first block. */
static int32_t cache(kvleaf_blocks *blocks, const kvleaf_seq_params *params, int32_t name, int32_t count)
{
    kvleaf_seq seq = make_prompt(blocks, params, prompt(name, count), count * BS, NULL);
    int32_t first = entry_of(blocks, seq, 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    check_blocks(blocks, 0);
    return first;
}

/* Blocks of the chain that would be found. */
static int32_t found(const kvleaf_blocks *blocks, int32_t name, int32_t count)
{
    int32_t ids[65];
    memcpy(ids, prompt(name, count), (size_t)count * BS * sizeof *ids);
    ids[count * BS] = 0;
    return (int32_t)(match_of(blocks, NULL, ids, (int64_t)count * BS + 1) / BS);
}

/* Takes blocks that are needed for something else, and gives them back. */
static void take(kvleaf_blocks *blocks, int32_t count)
{
    kvleaf_seq seq = make_seq(blocks, 0);
    assert_ok(extend(blocks, seq, (int64_t)count * BS));
    check_blocks(blocks, 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    check_blocks(blocks, 0);
}

/* Free blocks first; then chains in the order of their last use, the deepest block of each first (llm-d #704). */
static void test_least_recently_used(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, BS);
    cache(blocks, NULL, 1, 3);
    cache(blocks, NULL, 2, 3);
    take(blocks, 2);
    assert_int_equal(stats_of(blocks).evictions, 0);
    take(blocks, 3);
    assert_int_equal(found(blocks, 1, 3), 2);
    assert_int_equal(found(blocks, 2, 3), 3);
    assert_int_equal(stats_of(blocks).evictions, 1);
    kvleaf_seq seq = make_prompt(blocks, NULL, prompt(1, 2), 2 * BS, NULL); /* used again: 2 is the older one now */
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    take(blocks, 5);
    assert_int_equal(found(blocks, 1, 3), 2);
    assert_int_equal(found(blocks, 2, 3), 1);
    take(blocks, 7);
    assert_int_equal(found(blocks, 1, 3), 1);
    assert_int_equal(found(blocks, 2, 3), 0);
    kvleaf_blocks_destroy(&blocks);
}

/* vllm PR #4764: one block; what was cached in it is not found once it was used for something else. */
static void test_one_block(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(1, BS);
    cache(blocks, NULL, 1, 1);
    assert_int_equal(found(blocks, 1, 1), 1);
    take(blocks, 1);
    assert_int_equal(found(blocks, 1, 1), 0);
    cache(blocks, NULL, 3, 1);
    assert_int_equal(found(blocks, 3, 1), 1);
    kvleaf_blocks_destroy(&blocks);
}

static void test_priorities(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, BS);
    const int32_t priorities[] = {KVLEAF_PRIORITY_HIGH, 0, KVLEAF_PRIORITY_LOW, -1};
    static const int32_t order[] = {2, 3, 1, 0};
    for (int32_t i = 0; i < 4; i++) {
        const kvleaf_seq_params params = {.struct_size = sizeof params, .priority = priorities[i]};
        cache(blocks, &params, i, 2);
    }
    for (int32_t i = 0; i < 4; i++) {
        kvleaf_seq seq = make_seq(blocks, 0);
        assert_ok(extend(blocks, seq, 2 * BS * (i + 1)));
        for (int32_t j = 0; j < 4; j++)
            assert_int_equal(found(blocks, order[j], 2), j <= i ? 0 : 2);
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    }
    /* the sequence that gave a block back last decides */
    const kvleaf_seq_params high = {.struct_size = sizeof high, .priority = 2};
    cache(blocks, &high, 5, 2);
    cache(blocks, NULL, 5, 2); /* finds the first block, and a part of the second */
    assert_int_equal(blocks->groups[0].cached[-KVLEAF_PRIORITY_LOW].count, 1);
    assert_int_equal(blocks->groups[0].cached[2 - KVLEAF_PRIORITY_LOW].count, 1);
    kvleaf_blocks_destroy(&blocks);
}

static uint64_t read_clock(void *user)
{
    return *(uint64_t *)user;
}

/* A block is found until its time is over after its last use; then it is as if it were not there. */
static void test_time_to_live(void **state)
{
    (void)state;
    uint64_t now = 1000;
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 8, .block_size = BS, .now_ms = read_clock, .now_user = &now), &blocks));
    const kvleaf_seq_params brief = {.struct_size = sizeof brief, .ttl_ms = 50, .priority = 1};
    cache(blocks, &brief, 1, 2);
    cache(blocks, NULL, 2, 2);
    now += 49;
    assert_int_equal(found(blocks, 1, 2), 2);
    kvleaf_seq seq = make_prompt(blocks, &brief, prompt(1, 2), 2 * BS, NULL);
    now += 500; /* in use */
    assert_int_equal(found(blocks, 1, 2), 1);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    now += 49;
    assert_int_equal(found(blocks, 1, 1), 1);
    now += 1;
    assert_int_equal(found(blocks, 1, 1), 0);
    assert_int_equal(found(blocks, 2, 2), 2);
    check_blocks(blocks, 0); /* it is cached still, */
    take(blocks, 5);         /* and goes before what is found, whatever its priority */
    assert_int_equal(found(blocks, 2, 2), 2);
    assert_int_equal(stats_of(blocks).evictions, 1);

    cache(blocks, &brief, 1, 2); /* another that expires: computed anew, it takes the old one's place in the index */
    now += 50;
    seq = make_prompt(blocks, &brief, prompt(1, 2), 2 * BS, NULL);
    check_blocks(blocks, 0);
    assert_int_equal(found(blocks, 1, 2), 2);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    const kvleaf_seq_params forever = {.struct_size = sizeof forever, .ttl_ms = UINT64_MAX};
    cache(blocks, &forever, 4, 1);
    now = UINT64_MAX;
    assert_int_equal(found(blocks, 4, 1), 1);
    kvleaf_blocks_destroy(&blocks);
}

/* Pins hold a block and what is before it: neither evicted nor written, until it is unpinned as often. */
static void test_pins(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(4, BS);
    int32_t first = cache(blocks, NULL, 1, 3);
    assert_ok(kvleaf_blocks_pin(blocks, 0, first + 1));
    assert_ok(kvleaf_blocks_pin(blocks, 0, first + 1));
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).pinned, 2);
    assert_int_equal(stats_of(blocks).used, 2);
    take(blocks, 2);
    assert_int_equal(found(blocks, 1, 3), 2);
    kvleaf_seq seq = make_seq(blocks, 0);
    assert_status(extend(blocks, seq, 3 * BS), KVLEAF_NO_BLOCKS);
    assert_ok(kvleaf_blocks_unpin(blocks, 0, first + 1));
    assert_status(extend(blocks, seq, 3 * BS), KVLEAF_NO_BLOCKS);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    seq = make_prompt(blocks, NULL, prompt(1, 2), 2 * BS, NULL); /* found and referred to while it is pinned */
    check_blocks(blocks, 0);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, seq, 2));
    assert_int_equal(extend_ids(blocks, seq, prompt(7, 1), 1), 0); /* moves: the pinned chain is not written */
    check_blocks(blocks, 0);
    assert_int_equal(found(blocks, 1, 2), 2);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    assert_ok(kvleaf_blocks_unpin(blocks, 0, first + 1));
    check_blocks(blocks, 0);
    take(blocks, 3);
    assert_int_equal(found(blocks, 1, 2), 1);
    kvleaf_blocks_destroy(&blocks);
}

/* TensorRT-LLM PR #12648 with pins of the application: a used block that is pinned outlives its sequence, in the index
 * or out of it, and comes back once. */
static void test_pins_of_used_blocks(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(4, BS);
    kvleaf_seq seq = make_seq(blocks, 0);
    extend_ids(blocks, seq, prompt(1, 3), 3 * BS - 1);
    for (int32_t i = 0; i < 3; i++)
        assert_ok(kvleaf_blocks_pin(blocks, 0, i));
    check_blocks(blocks, 0);
    compute(blocks, seq); /* two of them enter the index, pinned */
    check_blocks(blocks, 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).pinned, 3);
    assert_int_equal(stats_of(blocks).indexed, 2);
    assert_ok(kvleaf_blocks_prefix_clear(blocks)); /* the index is gone, the pins are not */
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).pinned, 3);
    for (int32_t i = 0; i < 3; i++)
        assert_ok(kvleaf_blocks_unpin(blocks, 0, i));
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).free, 4);
    kvleaf_blocks_destroy(&blocks);
}

/* The destination of a pending copy that is pinned: with its last sequence the copy goes, the pin stays. */
static void test_pin_of_a_copy(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(6, BS);
    kvleaf_seq seq = make_seq(blocks, 6), child = fork_seq(blocks, seq, 6);
    assert_ok(extend(blocks, child, 1));
    assert_ok(kvleaf_blocks_pin(blocks, 0, 2));
    assert_ok(kvleaf_blocks_pin(blocks, 0, 1)); /* its source */
    check_blocks(blocks, 0);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &child));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    assert_int_equal(pending(blocks, NULL), 0);
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).pinned, 2);
    assert_ok(kvleaf_blocks_unpin(blocks, 0, 1));
    assert_ok(kvleaf_blocks_unpin(blocks, 0, 2));
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_pins_refuse(void **state)
{
    (void)state;
    const int32_t order[] = {0, 1, 2};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 4, .block_size = BS, .free_order = order, .free_count = 3), &blocks));
    kvleaf_seq seq = make_seq(blocks, BS);
    static const struct {
        int32_t group, block;
        const char *field;
    } cases[] = {{0, -1, "block"}, {0, 4, "block"}, {1, 0, "group"},
                 {-1, 0, "group"}, {0, 1, "block"}, {0, 3, "block"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_status(kvleaf_blocks_pin(blocks, cases[i].group, cases[i].block), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_status(kvleaf_blocks_unpin(blocks, cases[i].group, cases[i].block), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
    }
    assert_status(kvleaf_blocks_unpin(blocks, 0, 0), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_pin(NULL, 0, 0), KVLEAF_INVALID);
    check_blocks(blocks, 1);
    (void)seq;
    kvleaf_blocks_destroy(&blocks);
}

typedef struct policy {
    bool cached[16];
    kvleaf_cached_block last;
    int32_t answer, asked;
} policy;

static void policy_added(void *user, const kvleaf_cached_block *block)
{
    policy *p = user;
    assert_false(p->cached[block->block]);
    p->cached[block->block] = true;
    p->last = *block;
}

static void policy_removed(void *user, int32_t group, int32_t block)
{
    policy *p = user;
    assert_int_equal(group, 0);
    assert_true(p->cached[block]);
    p->cached[block] = false;
}

static int32_t policy_victim(void *user, int32_t group)
{
    policy *p = user;
    assert_int_equal(group, 0);
    p->asked++;
    return p->answer;
}

/* The policy knows at all times what is cached; its choice goes, with what is behind it; a wrong one is not followed.
 */
static void test_policy(void **state)
{
    (void)state;
    policy p = {.answer = -1};
    uint64_t now = 77;
    const kvleaf_eviction eviction = {&p, policy_added, policy_removed, policy_victim};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8, .block_size = BS, .eviction = &eviction,
                                                        .now_ms = read_clock, .now_user = &now),
                                   &blocks));
    int32_t first = cache(blocks, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .priority = -2}, 1, 3);
    assert_int_equal(p.last.block, first);
    assert_int_equal(p.last.depth, 0);
    assert_int_equal(p.last.children, 1);
    assert_int_equal(p.last.priority, -2);
    assert_int_equal(p.last.last_use_ms, 77);
    assert_int_equal(p.last.expires_ms, 0);
    assert_true(p.last.hash[0] == blocks->index.entries[first].hash[0]);
    int32_t second = cache(blocks, NULL, 2, 3);
    p.answer = second + 1; /* from the midst of a chain */
    take(blocks, 3);
    assert_int_equal(found(blocks, 2, 3), 1);
    assert_int_equal(found(blocks, 1, 3), 3);
    assert_int_equal(stats_of(blocks).evictions, 1);
    assert_int_equal(p.asked, 1);
    kvleaf_seq user = make_prompt(blocks, NULL, prompt(1, 3), 3 * BS, NULL); /* the last block is copied from in part */
    static const int32_t wrong[] = {-1, 8, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cache(blocks, NULL, 3, 1);
        p.answer = i == 0 ? entry_of(blocks, user, 0) : wrong[i]; /* one that is in use */
        take(blocks, stats_of(blocks).free + 1);
        for (int32_t j = 0; j < 8; j++)
            assert_int_equal(p.cached[j], blocks->groups[0].blocks[j].next != KVL_UNLISTED &&
                                              blocks->groups[0].blocks[j].entry != KVL_NO_ENTRY);
    }
    assert_int_equal(found(blocks, 1, 2), 2);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &user));
    assert_ok(kvleaf_blocks_prefix_clear(blocks));
    for (int32_t i = 0; i < 8; i++)
        assert_false(p.cached[i]);
    kvleaf_blocks_destroy(&blocks);
}

/* A policy without functions is the usual one. */
static void test_empty_policy(void **state)
{
    (void)state;
    const kvleaf_eviction eviction = {0};
    kvleaf_blocks *blocks = NULL;
    assert_ok(
        kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 3, .block_size = BS, .eviction = &eviction), &blocks));
    cache(blocks, NULL, 1, 3);
    take(blocks, 1);
    assert_int_equal(found(blocks, 1, 3), 2);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_least_recently_used),
        cmocka_unit_test(test_one_block),
        cmocka_unit_test(test_priorities),
        cmocka_unit_test(test_time_to_live),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_pins_of_used_blocks),
        cmocka_unit_test(test_pin_of_a_copy),
        cmocka_unit_test(test_pins_refuse),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_empty_policy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
