/* SPDX-License-Identifier: Apache-2.0 */
/* What sequences say of their tokens, and what the prefix index makes of it: ids that come later, content that ids do
 * not name, salts and the like. */
#include "blocks_support.h"

#define BS 4

static kvleaf_blocks *make(int32_t num_blocks)
{
    return make_blocks(num_blocks, BS);
}

/* Tokens without ids are found once they are said. */
static void test_unknown_ids(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    kvleaf_seq seq = make_seq(blocks, 0);
    int32_t ids[12], got[12] = {0};
    extend_ids(blocks, seq, line, 4);
    assert_ok(extend(blocks, seq, 4));
    extend_ids(blocks, seq, line + 8, 4);
    compute(blocks, seq);
    assert_int_equal(info_of(blocks, seq).known, 4);
    assert_int_equal(stats_of(blocks).indexed, 1);
    assert_ok(kvleaf_blocks_seq_set_ids(blocks, seq, 6, line + 6, 2));
    assert_int_equal(info_of(blocks, seq).known, 4);
    kvleaf_seq child = fork_seq(blocks, seq, 12);
    assert_status(kvleaf_blocks_seq_ids(blocks, seq, 0, got, 5), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_seq_set_ids(blocks, seq, 3, line + 3, 3)); /* a known one may be said again */
    assert_int_equal(info_of(blocks, seq).known, 12);
    assert_int_equal(info_of(blocks, child).known, 12);
    assert_int_equal(stats_of(blocks).indexed, 3);
    assert_int_equal(match_of(blocks, NULL, line, 13), 12);
    assert_ok(kvleaf_blocks_seq_ids(blocks, child, 0, got, 12));
    assert_memory_equal(got, line, sizeof got);
    memcpy(ids, line, sizeof ids);
    ids[5] = 99;
    assert_status(kvleaf_blocks_seq_set_ids(blocks, child, 0, ids, 12), KVLEAF_INVALID);
    assert_string_equal(kvleaf_last_error()->field, "ids");
    assert_int_equal(kvleaf_last_error()->value, 99);
    extend_ids(blocks, child, line + 12, 4);
    assert_ok(kvleaf_blocks_seq_set_ids(blocks, child, 13, ids + 5, 1)); /* uncommitted: may change */
    compute(blocks, child);
    assert_int_equal(match_of(blocks, NULL, (int32_t[]){1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 99, 15, 16, 0}, 17),
                     16);
    ids[3] = INT32_MIN; /* one that is not known */
    kvleaf_seq other = make_prompt(blocks, NULL, ids, 4, NULL);
    assert_int_equal(info_of(blocks, other).known, 3);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* Saying no ids does not make what is known unknown, also where the blocks of the first ids are gone. */
static void test_no_ids(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8, .block_size = 4, .window = 5), &blocks));
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 12, NULL);
    assert_int_equal(entry_of(blocks, seq, 0), KVLEAF_NO_BLOCK);
    for (int64_t start = 0; start <= 12; start++) {
        assert_ok(kvleaf_blocks_seq_set_ids(blocks, seq, start, NULL, 0));
        assert_int_equal(info_of(blocks, seq).known, 12);
    }
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_ids_refuse(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16);
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 5, NULL);
    int32_t ids[8] = {0}, one = 1;
    static const struct {
        int64_t start, count;
        const char *field;
    } cases[] = {{-1, 1, "start"}, {6, 0, "start"},  {0, 6, "count"},
                 {5, 1, "count"},  {0, -1, "count"}, {1, INT64_MAX, "count"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_status(kvleaf_blocks_seq_set_ids(blocks, seq, cases[i].start, ids, cases[i].count), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_status(kvleaf_blocks_seq_ids(blocks, seq, cases[i].start, ids, cases[i].count), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
    }
    assert_status(kvleaf_blocks_seq_set_ids(blocks, seq, 0, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_ids(blocks, seq, 0, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_set_ids(NULL, seq, 0, ids, 1), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_seq_set_ids(blocks, seq, 5, NULL, 0));
    extend_ids(blocks, seq, line + 5, 1);
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &one, 1));
    assert_status(kvleaf_blocks_seq_set_ids(blocks, seq, 5, ids, 1), KVLEAF_BUSY);
    assert_ok(kvleaf_blocks_seq_ids(blocks, seq, 0, ids, 6)); /* looking is free */
    assert_memory_equal(ids, line, 6 * sizeof *ids);
    kvleaf_blocks_destroy(&blocks);
}

static int64_t match_spans(kvleaf_blocks *blocks, const kvleaf_span *spans, int32_t num_spans, int64_t count)
{
    kvleaf_tokens tokens = {sizeof tokens, line, count, spans, num_spans};
    int64_t matched = -1;
    assert_ok(kvleaf_blocks_prefix_match(blocks, NULL, &tokens, &matched));
    return matched;
}

/* Content that ids don't name: blocks are found only by the same content in the same slots, in however many pieces it
 * was given. */
static void test_spans(void **state)
{
    (void)state;
    const kvleaf_span image = {.start = 2, .count = 7, .key = {7, 8}};
    const kvleaf_span image_part = {2, 4, {7, 8}};
    const kvleaf_span pieces[] = {{2, 3, {7, 8}}, {5, 4, {7, 8}}}, rest[] = {{0, 3, {7, 8}}};
    for (int32_t cut = 0; cut < 2; cut++) {
        kvleaf_blocks *blocks = make(32);
        kvleaf_seq seq = make_seq(blocks, 0);
        kvleaf_tokens tokens = {sizeof tokens, line, cut ? 6 : 12, cut ? &image_part : &image, 1};
        assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL));
        kvleaf_tokens more = {sizeof more, line + 6, 6, rest, 1};
        if (cut)
            assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &more, NULL));
        compute(blocks, seq);
        check_blocks(blocks, 0);
        const kvleaf_span shifted = {3, 6, {7, 8}}, other = {2, 7, {7, 9}}, shorter = {2, 6, {7, 8}};
        assert_int_equal(match_spans(blocks, &image, 1, 13), 12);
        assert_int_equal(match_spans(blocks, pieces, 2, 13), 12);
        assert_int_equal(match_spans(blocks, NULL, 0, 13), 0);
        assert_int_equal(match_spans(blocks, &other, 1, 13), 0);
        assert_int_equal(match_spans(blocks, &shifted, 1, 13), 0);
        assert_int_equal(match_spans(blocks, &shorter, 1, 13), 8); /* the third block differs */
        assert_int_equal(match_spans(blocks, &image, 1, 12), 8);   /* no partial match with content */
        kvleaf_blocks_destroy(&blocks);
    }
}

/* Before the first span of the new tokens, a block without content may be matched in part. */
static void test_partial_match_ends_at_a_span(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(32);
    destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
    for (int32_t start = 4; start < 9; start++) {
        const kvleaf_span span = {start, 1, {1, 1}};
        assert_int_equal(match_spans(blocks, &span, 1, 10), start > 7 ? 8 : start);
    }
    kvleaf_blocks_destroy(&blocks);
}

/* A block whose content was cut and written over is not taken for one that has it whole. */
static void test_cut_content(void **state)
{
    (void)state;
    const kvleaf_span image = {1, 3, {7, 8}};
    for (int32_t shared = 0; shared < 2; shared++) {
        kvleaf_blocks *blocks = make(32);
        kvleaf_seq seq = make_seq(blocks, 0), child;
        kvleaf_tokens tokens = {sizeof tokens, line, 4, &image, 1};
        assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL));
        compute(blocks, seq);
        child = seq;
        if (shared)
            child = fork_seq(blocks, seq, 4);
        assert_ok(kvleaf_blocks_seq_truncate(blocks, child, 2));
        extend_ids(blocks, child, line + 2, 2); /* the same ids, without the image */
        compute(blocks, child);
        check_blocks(blocks, 0);
        assert_int_equal(match_spans(blocks, &image, 1, 5), shared ? 4 : 0);
        assert_int_equal(match_spans(blocks, &(kvleaf_span){1, 1, {7, 8}}, 1, 5), 0);
        assert_int_equal(match_spans(blocks, NULL, 0, 5), 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

static void test_spans_refuse(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(8);
    kvleaf_seq seq = make_seq(blocks, 0);
    static const struct {
        kvleaf_span spans[2];
        int32_t num_spans;
        const char *field;
    } cases[] = {
        {{{-1, 2, {0, 0}}}, 1, "start"},
        {{{8, 1, {0, 0}}}, 1, "start"},
        {{{0, 0, {0, 0}}}, 1, "count"},
        {{{2, 7, {0, 0}}}, 1, "count"},
        {{{2, INT64_MAX, {0, 0}}}, 1, "count"},
        {{{2, 3, {0, 0}}, {4, 1, {0, 0}}}, 2, "start"},
        {{{4, 1, {0, 0}}, {2, 1, {0, 0}}}, 2, "start"},
        {{{0, 1, {0, 0}}}, -1, "num_spans"},
    };
    int64_t matched = 7;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvleaf_tokens tokens = {sizeof tokens, line, 8, cases[i].spans, cases[i].num_spans};
        assert_status(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_status(kvleaf_blocks_prefix_match(blocks, NULL, &tokens, &matched), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
    }
    kvleaf_tokens tokens = {sizeof tokens, line, 8, NULL, 1};
    assert_status(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL), KVLEAF_INVALID);
    tokens = (kvleaf_tokens){sizeof tokens, NULL, 8, NULL, 0};
    assert_status(kvleaf_blocks_prefix_match(blocks, NULL, &tokens, &matched), KVLEAF_INVALID);
    tokens.ids = line;
    assert_status(kvleaf_blocks_prefix_match(blocks, NULL, &tokens, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_prefix_match(NULL, NULL, &tokens, &matched), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_prefix_match(blocks, NULL, NULL, &matched), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_prefix_clear(NULL), KVLEAF_INVALID);
    assert_int_equal(matched, 7);
    assert_lengths(blocks, seq, 0, 0, 0);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_params(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make(16), *without = NULL;
    static const struct {
        kvleaf_seq_params params;
        const char *field;
    } bad[] = {
        {{.priority = KVLEAF_PRIORITY_LOW - 1}, "priority"},
        {{.priority = KVLEAF_PRIORITY_HIGH + 1}, "priority"},
        {{.no_prefix = 2}, "no_prefix"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvleaf_seq_params params = bad[i].params;
        kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = line, .count = 4};
        kvleaf_seq seq = 0;
        int64_t matched;
        params.struct_size = sizeof params;
        assert_status(kvleaf_blocks_seq_create(blocks, &params, &seq), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, bad[i].field);
        assert_status(kvleaf_blocks_prefix_match(blocks, &params, &tokens, &matched), KVLEAF_INVALID);
    }
    const kvleaf_seq_params apart = {.struct_size = sizeof apart, .no_prefix = 1, .salt = 3};
    int64_t cached = -1;
    destroy(blocks, make_prompt(blocks, &apart, line, 8, NULL));
    assert_int_equal(stats_of(blocks).indexed, 0);
    destroy(blocks, make_prompt(blocks, NULL, line, 8, NULL));
    kvleaf_seq seq = make_prompt(blocks, &apart, line, 9, &cached);
    assert_int_equal(cached, 0);
    assert_int_equal(match_of(blocks, &apart, line, 9), 0);
    assert_int_equal(info_of(blocks, fork_seq(blocks, seq, 4)).salt, 3);
    kvleaf_blocks_destroy(&blocks);
    assert_ok(
        kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8, .block_size = BS, .no_prefix_cache = 1), &without));
    destroy(without, make_prompt(without, NULL, line, 8, NULL));
    assert_int_equal(match_of(without, NULL, line, 9), 0);
    seq = make_prompt(without, NULL, line, 9, &cached);
    assert_int_equal(cached, 0);
    assert_int_equal(info_of(without, seq).known, 9); /* ids are kept all the same */
    assert_int_equal(stats_of(without).looked_up, 17);
    assert_ok(kvleaf_blocks_prefix_clear(without));
    check_blocks(without, 0);
    kvleaf_blocks_destroy(&without);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unknown_ids),
        cmocka_unit_test(test_no_ids),
        cmocka_unit_test(test_ids_refuse),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_partial_match_ends_at_a_span),
        cmocka_unit_test(test_cut_content),
        cmocka_unit_test(test_spans_refuse),
        cmocka_unit_test(test_params),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
