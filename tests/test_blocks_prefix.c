/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix index: what is found, by whom, and what is never found. */
#include "blocks_support.h"

#define BS 4

static kvleaf_blocks *make(int32_t num_blocks)
{
    return make_blocks(num_blocks, BS);
}

/* What a second prompt finds, by lengths: whole blocks, then the match inside the next, and one token left. */
static void test_lengths(void **state)
{
    (void)state;
    for (int64_t first = 1; first <= 17; first++) {
        for (int64_t second = 1; second <= 17; second++) {
            kvleaf_blocks *blocks = make(16);
            kvleaf_seq seq = make_prompt(blocks, NULL, line, first, NULL);
            int64_t there = first / BS * BS, most = second - 1, cached = -1;
            int64_t expected = there < most ? there : most;
            assert_int_equal(match_of(blocks, NULL, line, second), expected);
            kvleaf_seq again = make_prompt(blocks, NULL, line, second, &cached);
            assert_int_equal(cached, expected);
            assert_lengths(blocks, again, second, second, second);
            assert_int_equal(info_of(blocks, again).cached, expected);
            assert_int_equal(info_of(blocks, again).known, second);
            for (int32_t i = 0; i < expected / BS; i++)
                assert_int_equal(entry_of(blocks, again, i), entry_of(blocks, seq, i));
            assert_int_equal(stats_of(blocks).copies, expected % BS ? 1 : 0);
            assert_int_equal(stats_of(blocks).hits, expected);
            assert_int_equal(stats_of(blocks).looked_up, first + second);
            destroy(blocks, seq);
            destroy(blocks, again);
            assert_int_equal(stats_of(blocks).used, 0);
            kvleaf_blocks_destroy(&blocks);
        }
    }
}

/* A partial match is a pending copy from the indexed block; until it is made the step can't be committed. */
static void test_partial_match_copies(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(8);
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 8, NULL), again = 0;
    destroy(blocks, seq);
    assert_int_equal(stats_of(blocks).cached, 2);
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &again));
    const int32_t ids[] = {1, 2, 3, 4, 5, 6, 99, 8, 9};
    assert_int_equal(extend_ids(blocks, again, ids, 9), 6);
    assert_lengths(blocks, again, 6, 6, 9);
    assert_table(blocks, again, (int32_t[]){0, 2, 3}, 3);
    const kvleaf_block_copy *copies;
    assert_int_equal(pending(blocks, &copies), 1);
    assert_int_equal(copies[0].src, 1);
    assert_int_equal(copies[0].dst, 2);
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).pinned, 1); /* the source, which no sequence refers to */
    int32_t num_q = 3;
    assert_ok(kvleaf_blocks_step_begin(blocks, &again, &num_q, 1));
    assert_status(kvleaf_blocks_step_commit(blocks, &again, NULL, 1), KVLEAF_INVALID);
    make_copies(blocks);
    check_blocks(blocks, 0);
    assert_ok(kvleaf_blocks_step_commit(blocks, &again, NULL, 1));
    assert_int_equal(match_of(blocks, NULL, ids, 9), 8);  /* its own second block */
    assert_int_equal(match_of(blocks, NULL, line, 9), 8); /* and the first one's */
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* A match given up before its copy was made gives back what it held. */
static void test_partial_match_dropped(void **state)
{
    (void)state;
    for (int32_t how = 0; how < 3; how++) {
        kvleaf_blocks *blocks = make(8);
        kvleaf_seq seq = make_prompt(blocks, NULL, line, 8, NULL), again = 0;
        destroy(blocks, seq);
        assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &again));
        assert_int_equal(extend_ids(blocks, again, line, 8), 7);
        if (how == 0)
            destroy(blocks, again);
        else
            assert_ok(kvleaf_blocks_seq_truncate(blocks, again, how == 1 ? 4 : 6));
        check_blocks(blocks, 0);
        assert_int_equal(pending(blocks, NULL), how == 2);
        assert_int_equal(stats_of(blocks).pinned, how == 2);
        assert_int_equal(stats_of(blocks).indexed, 2);
        kvleaf_blocks_destroy(&blocks);
    }
}

/* Of the continuations of a block, the 8 stored last are looked at; the longest match wins, of equal ones the latest.
 */
static void test_partial_match_chooses(void **state)
{
    (void)state;
    static const struct {
        int32_t second_tokens[4]; /* a prompt is 1 2 3 4, then these */
        int32_t found;
    } cases[] = {
        {{50, 51, 52, 59}, 4 + 3}, /* as child 2 */
        {{50, 51, 60, 61}, 4 + 2}, /* as children 1, 2 */
        {{77, 1, 1, 1}, 4},
    };
    kvleaf_blocks *blocks = make(40);
    static const int32_t children[3][4] = {{50, 60, 1, 1}, {50, 51, 61, 1}, {50, 51, 52, 53}};
    int32_t prompt[9] = {1, 2, 3, 4};
    for (int32_t i = 0; i < 3; i++) {
        memcpy(prompt + 4, children[i], sizeof children[i]);
        destroy(blocks, make_prompt(blocks, NULL, prompt, 8, NULL));
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(prompt + 4, cases[i].second_tokens, sizeof cases[i].second_tokens);
        assert_int_equal(match_of(blocks, NULL, prompt, 9), cases[i].found);
    }
    for (int32_t i = 0; i < 8; i++) { /* eight more push them out */
        memcpy(prompt + 4, (int32_t[]){100 + i, 0, 0, 0}, 16);
        destroy(blocks, make_prompt(blocks, NULL, prompt, 8, NULL));
    }
    memcpy(prompt + 4, cases[0].second_tokens, 16);
    assert_int_equal(match_of(blocks, NULL, prompt, 9), 4);
    memcpy(prompt + 4, children[2], 16); /* a whole block is found wherever it is */
    assert_int_equal(match_of(blocks, NULL, prompt, 9), 8);
    kvleaf_blocks_destroy(&blocks);
}

/* openvino.genai #3722, vllm PR #12621: with all hashes the same, everything is compared. */
static void test_collisions(void **state)
{
    (void)state;
    static const struct {
        int32_t ids[9];
        uint64_t salt;
        int64_t found;
    } cases[] = {
        {{1, 2, 3, 4, 5, 6, 7, 8, 9}, 0, 8},  {{1, 2, 3, 4, 11, 12, 13, 14, 9}, 0, 8},
        {{1, 2, 3, 4, 5, 6, 7, 9, 9}, 0, 7},  {{5, 6, 7, 8, 1, 2, 3, 4, 9}, 0, 0},
        {{1, 2, 3, 4, 5, 6, 7, 8, 9}, 5, 0},  {{21, 2, 3, 4, 5, 6, 7, 8, 9}, 5, 8},
        {{21, 2, 3, 4, 5, 6, 7, 8, 9}, 0, 0},
    };
    for (int32_t one_hash = 0; one_hash < 2; one_hash++) {
        kvleaf_blocks *blocks = make(16);
        blocks->index.one_hash = one_hash;
        const int32_t second[] = {1, 2, 3, 4, 11, 12, 13, 14}, other[] = {21, 2, 3, 4, 5, 6, 7, 8};
        const kvleaf_seq_params salted = {.struct_size = sizeof salted, .salt = 5};
        destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
        destroy(blocks, make_prompt(blocks, NULL, second, 8, NULL));
        destroy(blocks, make_prompt(blocks, &salted, other, 8, NULL));
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const kvleaf_seq_params params = {.struct_size = sizeof params, .salt = cases[i].salt};
            assert_int_equal(match_of(blocks, &params, cases[i].ids, 9), cases[i].found);
        }
        kvleaf_blocks_destroy(&blocks);
    }
}

/* vllm PR #7822: uncommitted tokens are not found, and leave nothing when they are given up. */
static void test_uncommitted_are_not_found(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    kvleaf_seq first = 0, second = 0;
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &first));
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &second));
    assert_int_equal(extend_ids(blocks, first, line, 9), 0);
    int32_t num_q = 9;
    assert_ok(kvleaf_blocks_step_begin(blocks, &first, &num_q, 1));
    assert_int_equal(extend_ids(blocks, second, line, 9), 0);
    assert_ok(kvleaf_blocks_step_rollback(blocks, &first, 1));
    destroy(blocks, first);
    assert_int_equal(stats_of(blocks).indexed, 0);
    assert_int_equal(match_of(blocks, NULL, line, 9), 0);
    num_q = 6; /* of a part, what is full */
    assert_ok(kvleaf_blocks_step_begin(blocks, &second, &num_q, 1));
    assert_ok(kvleaf_blocks_step_commit(blocks, &second, NULL, 1));
    assert_int_equal(match_of(blocks, NULL, line, 9), 4);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* Two prompts alike, computed side by side: the first committed is the one that is found, and stays when it goes. */
static void test_identical_blocks(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    kvleaf_seq seqs[2];
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
        assert_int_equal(extend_ids(blocks, seqs[i], line, 8), 0);
    }
    compute(blocks, seqs[1]);
    compute(blocks, seqs[0]);
    assert_int_equal(stats_of(blocks).indexed, 2);
    kvleaf_seq third = make_prompt(blocks, NULL, line, 9, NULL);
    assert_int_equal(entry_of(blocks, third, 0), entry_of(blocks, seqs[1], 0));
    destroy(blocks, third);
    assert_int_equal(extend_ids(blocks, seqs[0], line + 8, 4), 0); /* goes on behind blocks that are not its own */
    compute(blocks, seqs[0]);
    assert_int_equal(match_of(blocks, NULL, line, 13), 12);
    destroy(blocks, seqs[1]);
    assert_int_equal(match_of(blocks, NULL, line, 13), 12);
    assert_int_equal(stats_of(blocks).cached, 2);
    destroy(blocks, seqs[0]);
    assert_int_equal(stats_of(blocks).cached, 3);
    kvleaf_blocks_destroy(&blocks);
}

/* A sequence goes on behind identical blocks that are evicted: its own take their place. */
static void test_chain_begun_anew(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(6);
    kvleaf_seq seqs[2], filler;
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
        extend_ids(blocks, seqs[i], line, 8);
    }
    compute(blocks, seqs[0]);
    compute(blocks, seqs[1]);
    destroy(blocks, seqs[0]);
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &filler));
    assert_ok(extend(blocks, filler, 16)); /* evicts both */
    assert_int_equal(stats_of(blocks).evictions, 2);
    assert_int_equal(match_of(blocks, NULL, line, 13), 0);
    destroy(blocks, filler);
    extend_ids(blocks, seqs[1], line + 8, 4);
    compute(blocks, seqs[1]);
    assert_int_equal(match_of(blocks, NULL, line, 13), 12);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* A prompt in pieces: hits go on from piece to piece, at the edges of blocks. */
static void test_pieces(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(32);
    destroy(blocks, make_prompt(blocks, NULL, line, 32, NULL));
    kvleaf_seq seq = 0;
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    assert_int_equal(extend_ids(blocks, seq, line, 8), 7);
    assert_int_equal(extend_ids(blocks, seq, line + 8, 8), 0); /* the token before is to be computed */
    compute(blocks, seq);
    assert_int_equal(extend_ids(blocks, seq, line + 16, 9), 8);
    compute(blocks, seq);
    assert_int_equal(extend_ids(blocks, seq, line + 25, 3), 0); /* inside a block */
    compute(blocks, seq);
    assert_int_equal(extend_ids(blocks, seq, line + 28, 2), 1);
    compute(blocks, seq);
    assert_lengths(blocks, seq, 30, 30, 30);
    assert_int_equal(info_of(blocks, seq).cached, 16);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* A write into a full block that is found takes it and what is behind it out first; the rest of the chain stays. */
static void test_rewritten_block(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 16, NULL);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, seq, 6));
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).cached, 2);
    assert_int_equal(match_of(blocks, NULL, line, 17), 16); /* cut, but not written yet */
    const int32_t other[] = {70, 71};
    assert_int_equal(extend_ids(blocks, seq, other, 2), 0);
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).cached, 0);
    assert_int_equal(match_of(blocks, NULL, line, 17), 4);
    compute(blocks, seq);
    assert_int_equal(match_of(blocks, NULL, (int32_t[]){1, 2, 3, 4, 5, 6, 70, 71, 9}, 9), 8);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);

    blocks = make(16); /* where another holds it, it moves and the block stays */
    seq = make_prompt(blocks, NULL, line, 16, NULL);
    kvleaf_seq child = fork_seq(blocks, seq, 16);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, seq, 6));
    extend_ids(blocks, seq, other, 2);
    compute(blocks, seq);
    assert_int_equal(match_of(blocks, NULL, line, 17), 16);
    assert_int_equal(match_of(blocks, NULL, (int32_t[]){1, 2, 3, 4, 5, 6, 70, 71, 9}, 9), 8);
    check_blocks(blocks, 0);
    (void)child;
    kvleaf_blocks_destroy(&blocks);
}

static void test_clear(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
    kvleaf_seq before = make_prompt(blocks, NULL, line, 9, NULL), open = make_seq(blocks, 0),
               fresh = make_seq(blocks, 0);
    int32_t num_q = 4;
    extend_ids(blocks, open, line + 20, 4);
    assert_ok(kvleaf_blocks_step_begin(blocks, &open, &num_q, 1));
    extend_ids(blocks, fresh, line + 30, 4);
    assert_ok(kvleaf_blocks_prefix_clear(blocks));
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).indexed, 0);
    assert_int_equal(stats_of(blocks).cached, 0);
    assert_ok(kvleaf_blocks_step_commit(blocks, &open, NULL, 1));
    extend_ids(blocks, before, line + 9, 7);
    compute(blocks, before);
    assert_int_equal(stats_of(blocks).indexed, 0); /* what was computed before is not found again */
    compute(blocks, fresh);
    assert_int_equal(match_of(blocks, NULL, line + 30, 5), 4);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, before, 0));
    extend_ids(blocks, before, line, 8);
    compute(blocks, before);
    assert_int_equal(match_of(blocks, NULL, line, 9), 8);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* vllm PR #11565, #18957: a hit that finds no room for the rest is given back whole; the same with room counts anew. */
static void test_hits_without_room(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 5, .block_size = BS, .max_blocks_per_seq = 6),
                                   &blocks));
    destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
    kvleaf_seq seq = make_seq(blocks, 0);
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = line, .count = 24};
    assert_status(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL), KVLEAF_NO_BLOCKS);
    assert_int_equal(kvleaf_last_error()->value, 6);
    assert_int_equal(kvleaf_last_error()->limit, 5);
    check_blocks(blocks, 0);
    assert_int_equal(stats_of(blocks).free + stats_of(blocks).cached, 5);
    assert_int_equal(stats_of(blocks).looked_up, 8);
    assert_int_equal(match_of(blocks, NULL, line, 9), 8);
    tokens.count = 20; /* all five, the two of the hit among them */
    int64_t cached = 0;
    assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, &cached));
    assert_int_equal(cached, 8);
    assert_table(blocks, seq, (int32_t[]){0, 1, 2, 3, 4}, 5);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* The source of a partial match must stay; where its block is needed, the match is left out. */
static void test_partial_match_without_room(void **state)
{
    (void)state;
    for (int32_t spare = 0; spare < 2; spare++) {
        kvleaf_blocks *blocks = make(3 + spare);
        destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
        kvleaf_seq seq = make_seq(blocks, 0);
        const int32_t ids[] = {1, 2, 3, 4, 5, 6, 70, 71, 72};
        assert_int_equal(extend_ids(blocks, seq, ids, 9), spare ? 6 : 4);
        assert_int_equal(info_of(blocks, seq).num_blocks, 3);
        check_blocks(blocks, 0);
        compute(blocks, seq);
        check_blocks(blocks, 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

typedef struct event_log {
    kvleaf_event events[64];
    int32_t ids[64][BS];
    int32_t count;
} event_log;

static void note(void *user, const kvleaf_event *event)
{
    event_log *log = user;
    assert_in_range(log->count, 0, 63);
    assert_int_equal(event->type == KVLEAF_EVENT_STORED, event->ids != NULL);
    if (event->ids)
        memcpy(log->ids[log->count], event->ids, sizeof log->ids[0]);
    log->events[log->count++] = *event;
}

static void test_events(void **state)
{
    (void)state;
    event_log log = {.count = 0};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 4, .block_size = BS, .event = note, .event_user = &log), &blocks));
    const kvleaf_seq_params salted = {.struct_size = sizeof salted, .salt = 9};
    destroy(blocks, make_prompt(blocks, &salted, line, 12, NULL));
    assert_int_equal(log.count, 3);
    for (int32_t i = 0; i < 3; i++) {
        const kvleaf_event *event = &log.events[i], zero = {.count = 0};
        assert_int_equal(event->type, KVLEAF_EVENT_STORED);
        assert_int_equal(event->block, i);
        assert_int_equal(event->salt, 9);
        assert_int_equal(event->count, BS);
        assert_memory_equal(log.ids[i], line + BS * i, sizeof log.ids[i]);
        assert_memory_equal(event->parent, i ? event[-1].hash : zero.hash, sizeof event->parent);
    }
    kvleaf_seq seq = make_seq(blocks, 0); /* the hit tells nothing; then two evictions, the deepest first */
    assert_int_equal(extend_ids(blocks, seq, line, 4), 0);
    assert_ok(extend(blocks, seq, 12));
    assert_int_equal(log.count, 6);
    for (int32_t i = 3; i < 6; i++) {
        assert_int_equal(log.events[i].type, KVLEAF_EVENT_REMOVED);
        assert_int_equal(log.events[i].block, 5 - i);
        assert_memory_equal(log.events[i].hash, log.events[5 - i].hash, sizeof log.events[i].hash);
        assert_memory_equal(log.events[i].parent, log.events[5 - i].parent, sizeof log.events[i].parent);
    }
    assert_ok(kvleaf_blocks_prefix_clear(blocks));
    assert_int_equal(log.count, 7);
    assert_int_equal(log.events[6].type, KVLEAF_EVENT_CLEARED);
    kvleaf_blocks_destroy(&blocks);
    assert_int_equal(log.count, 7);
}

/* Hashes are a function of tokens, salt and content alone: two managers agree, and they differ where any of it does. */
static void test_hashes(void **state)
{
    (void)state;
    uint64_t seen[8][2];
    int32_t count = 0;
    for (int32_t i = 0; i < 4; i++) {
        event_log log = {.count = 0};
        kvleaf_blocks *blocks = NULL;
        assert_ok(kvleaf_blocks_create(
            kvleaf_blocks_params(.num_blocks = 4 + i, .block_size = BS, .event = note, .event_user = &log), &blocks));
        const kvleaf_seq_params params = {.struct_size = sizeof params, .salt = i == 1};
        const kvleaf_span span = {0, 4, {1, 2}};
        kvleaf_tokens tokens = {sizeof tokens, line, 8, &span, i == 2};
        kvleaf_seq seq = 0;
        assert_ok(kvleaf_blocks_seq_create(blocks, &params, &seq));
        assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL));
        compute(blocks, seq);
        for (int32_t j = 0; j < 2; j++)
            memcpy(seen[count++], log.events[j].hash, sizeof seen[0]);
        kvleaf_blocks_destroy(&blocks);
    }
    for (int32_t i = 0; i < 6; i++)
        for (int32_t j = 0; j < i; j++)
            assert_memory_not_equal(seen[i], seen[j], sizeof seen[0]);
    assert_memory_equal(seen[0], seen[6], 2 * sizeof seen[0]); /* the last has nothing of its own */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_partial_match_copies),
        cmocka_unit_test(test_partial_match_dropped),
        cmocka_unit_test(test_partial_match_chooses),
        cmocka_unit_test(test_collisions),
        cmocka_unit_test(test_uncommitted_are_not_found),
        cmocka_unit_test(test_identical_blocks),
        cmocka_unit_test(test_chain_begun_anew),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_rewritten_block),
        cmocka_unit_test(test_clear),
        cmocka_unit_test(test_hits_without_room),
        cmocka_unit_test(test_partial_match_without_room),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
