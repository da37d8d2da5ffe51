/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of the block manager: the three lengths, acceptance, rollback, and that a bad list changes nothing. */
#include "blocks_support.h"

static void test_lengths(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(8, 4);
    kvleaf_seq seq = make_seq(blocks, 0);
    int32_t num_q = 5;
    assert_ok(extend(blocks, seq, 11));
    assert_lengths(blocks, seq, 0, 0, 11);
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_lengths(blocks, seq, 0, 5, 11);
    assert_ok(kvleaf_blocks_step_commit(blocks, &seq, NULL, 1)); /* a chunk: what is behind it stays */
    assert_lengths(blocks, seq, 5, 5, 11);
    num_q = 6;
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_ok(kvleaf_blocks_step_rollback(blocks, &seq, 1));
    assert_lengths(blocks, seq, 5, 5, 11);
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_ok(kvleaf_blocks_step_commit(blocks, &seq, &num_q, 1));
    assert_lengths(blocks, seq, 11, 11, 11);
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

static void test_partial_acceptance(void **state)
{
    (void)state;
    for (int32_t accepted = 0; accepted <= 6; accepted++) {
        kvleaf_blocks *blocks = make_blocks(8, 4);
        kvleaf_seq seq = make_seq(blocks, 3);
        int32_t num_q = 6;
        assert_ok(extend(blocks, seq, 10));
        assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
        assert_ok(kvleaf_blocks_step_commit(blocks, &seq, &accepted, 1));
        int64_t length = accepted < 6 ? 3 + accepted : 13; /* all accepted: what was extended behind them stays */
        assert_lengths(blocks, seq, 3 + accepted, 3 + accepted, length);
        assert_int_equal(stats_of(blocks).free, 8 - (length + 3) / 4);
        check_blocks(blocks, 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

static void test_begin_refuses(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(16, 4);
    kvleaf_seq a = make_seq(blocks, 5), b = make_seq(blocks, 2), busy = make_seq(blocks, 0), gone = make_seq(blocks, 1);
    kvleaf_seq stale = gone;
    int32_t one = 1;
    assert_ok(extend(blocks, a, 3));
    assert_ok(extend(blocks, b, 2));
    assert_ok(extend(blocks, busy, 2));
    assert_ok(kvleaf_blocks_step_begin(blocks, &busy, &one, 1));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &gone));
    const struct {
        kvleaf_seq seqs[3];
        int32_t num_q[3];
        kvleaf_status status;
        const char *field;
    } cases[] = {
        {{a, b, a}, {1, 1, 1}, KVLEAF_INVALID, "seqs"},      {{a, b, 0}, {1, 1, 1}, KVLEAF_INVALID, "seq"},
        {{a, b, stale}, {1, 1, 1}, KVLEAF_STALE, "seq"},     {{a, b, busy}, {1, 1, 1}, KVLEAF_BUSY, "seqs"},
        {{a, b, busy}, {4, 1, 1}, KVLEAF_INVALID, "num_q"},  {{b, a, busy}, {2, 0, 1}, KVLEAF_INVALID, "num_q"},
        {{b, a, busy}, {2, -1, 1}, KVLEAF_INVALID, "num_q"}, {{b, a, busy}, {3, 1, 1}, KVLEAF_INVALID, "num_q"},
        {{a, a, b}, {1, 1, 1}, KVLEAF_INVALID, "seqs"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_status(kvleaf_blocks_step_begin(blocks, cases[i].seqs, cases[i].num_q, 3), cases[i].status);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_lengths(blocks, a, 5, 5, 8);
        assert_lengths(blocks, b, 2, 2, 4);
        assert_lengths(blocks, busy, 0, 1, 2);
        check_blocks(blocks, 0);
    }
    assert_ok(kvleaf_blocks_step_begin(blocks, NULL, NULL, 0));
    assert_ok(kvleaf_blocks_step_begin(blocks, (kvleaf_seq[]){a, b}, (int32_t[]){3, 1}, 2)); /* beside the open one */
    assert_lengths(blocks, a, 5, 8, 8);
    kvleaf_blocks_destroy(&blocks);
}

static void test_close_refuses(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(16, 4);
    kvleaf_seq a = make_seq(blocks, 5), b = make_seq(blocks, 2), idle = make_seq(blocks, 3);
    assert_ok(extend(blocks, a, 3));
    assert_ok(extend(blocks, b, 2));
    assert_ok(extend(blocks, idle, 2));
    assert_ok(kvleaf_blocks_step_begin(blocks, (kvleaf_seq[]){a, b}, (int32_t[]){3, 1}, 2));
    const struct {
        kvleaf_seq seqs[3];
        int32_t accepted[3], n;
        const char *field;
    } cases[] = {
        {{a, b, idle}, {1, 1, 1}, 3, "seqs"}, {{a, b, a}, {1, 1, 1}, 3, "seqs"},       {{a, b}, {4, 1}, 2, "accepted"},
        {{a, b}, {1, -1}, 2, "accepted"},     {{b, a}, {1, INT32_MIN}, 2, "accepted"}, {{a, b}, {3, 2}, 2, "accepted"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_status(kvleaf_blocks_step_commit(blocks, cases[i].seqs, cases[i].accepted, cases[i].n), KVLEAF_INVALID);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        if (cases[i].n == 3)
            assert_status(kvleaf_blocks_step_rollback(blocks, cases[i].seqs, 3), KVLEAF_INVALID);
        assert_lengths(blocks, a, 5, 8, 8);
        assert_lengths(blocks, b, 2, 3, 4);
        assert_lengths(blocks, idle, 3, 3, 5);
        check_blocks(blocks, 0);
    }
    assert_ok(kvleaf_blocks_step_commit(blocks, (kvleaf_seq[]){b, a}, (int32_t[]){1, 2}, 2)); /* in any order */
    assert_lengths(blocks, a, 7, 7, 7);
    assert_lengths(blocks, b, 3, 3, 4);
    assert_status(kvleaf_blocks_step_commit(blocks, &a, NULL, 1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_step_rollback(blocks, &a, 1), KVLEAF_INVALID);
    kvleaf_blocks_destroy(&blocks);
}

static void test_busy_in_a_step(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(16, 4);
    kvleaf_seq seq = make_seq(blocks, 5), handle = seq, child;
    int32_t num_q = 2;
    assert_ok(extend(blocks, seq, 2));
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    assert_status(extend(blocks, seq, 1), KVLEAF_BUSY);
    assert_status(kvleaf_blocks_seq_truncate(blocks, seq, 5), KVLEAF_BUSY);
    assert_status(kvleaf_blocks_seq_destroy(blocks, &handle), KVLEAF_BUSY);
    assert_int_equal(handle, seq);
    assert_lengths(blocks, seq, 5, 7, 7);
    assert_status(kvleaf_blocks_seq_fork(blocks, seq, 6, &child), KVLEAF_INVALID);
    child = fork_seq(blocks, seq, 5);
    assert_lengths(blocks, child, 5, 5, 5);
    assert_ok(kvleaf_blocks_step_rollback(blocks, &seq, 1));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* Tokens can't count while the committed ones before them in their block are still to be copied there. */
static void test_commit_needs_its_copy(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(16, 4);
    kvleaf_seq parent = make_seq(blocks, 5), child = fork_seq(blocks, parent, 5);
    int32_t num_q = 2, none = 0;
    assert_ok(extend(blocks, child, 2));
    assert_ok(kvleaf_blocks_step_begin(blocks, &child, &num_q, 1));
    assert_status(kvleaf_blocks_step_commit(blocks, &child, NULL, 1), KVLEAF_INVALID);
    assert_lengths(blocks, child, 5, 7, 7);
    make_copies(blocks);
    assert_ok(kvleaf_blocks_step_commit(blocks, &child, NULL, 1));
    kvleaf_seq second = fork_seq(blocks, child, 7);
    assert_ok(extend(blocks, second, 1));
    num_q = 1;
    assert_ok(kvleaf_blocks_step_begin(blocks, &second, &num_q, 1));
    assert_ok(kvleaf_blocks_step_commit(blocks, &second, &none, 1));
    assert_lengths(blocks, second, 7, 7, 7);
    assert_int_equal(pending(blocks, NULL), 1); /* the block stays, and with it the copy */
    check_blocks(blocks, 0);
    kvleaf_blocks_destroy(&blocks);
}

/* What the device's copy of a table must be told: the entries from the first that changed. */
static void test_changed_entries(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(16, 4);
    kvleaf_seq seq = make_seq(blocks, 9), child;
    kvl_sequence *sequence, *forked;
    assert_ok(kvl_sequence_find(blocks, seq, &sequence));
    assert_int_equal(sequence->first_changed[0], 0);
    kvl_sequence_uploaded(sequence, 0, 3);
    assert_ok(extend(blocks, seq, 3));
    assert_int_equal(sequence->first_changed[0], 3);
    assert_ok(extend(blocks, seq, 5));
    assert_int_equal(sequence->first_changed[0], 3);
    kvl_sequence_uploaded(sequence, 0, 5);
    assert_ok(kvleaf_blocks_seq_truncate(blocks, seq, 6));
    assert_ok(extend(blocks, seq, 3));
    assert_int_equal(sequence->first_changed[0], 2);
    compute(blocks, seq);
    kvl_sequence_uploaded(sequence, 0, 3);
    child = fork_seq(blocks, seq, 6);
    assert_ok(kvl_sequence_find(blocks, child, &forked));
    assert_int_equal(forked->first_changed[0], 0);
    kvl_sequence_uploaded(forked, 0, 2);
    assert_ok(extend(blocks, child, 1)); /* moves to a copy */
    assert_int_equal(forked->first_changed[0], 1);
    assert_int_equal(sequence->first_changed[0], 3);
    assert_int_not_equal(kvl_sequence_slot(blocks, sequence), kvl_sequence_slot(blocks, forked));
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &child));
    child = make_seq(blocks, 1);
    assert_ok(kvl_sequence_find(blocks, child, &forked)); /* the same slot, nothing of it uploaded */
    assert_int_equal(forked->first_changed[0], 0);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),         cmocka_unit_test(test_partial_acceptance),
        cmocka_unit_test(test_begin_refuses),   cmocka_unit_test(test_close_refuses),
        cmocka_unit_test(test_busy_in_a_step),  cmocka_unit_test(test_commit_needs_its_copy),
        cmocka_unit_test(test_changed_entries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
