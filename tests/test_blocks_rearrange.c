/* SPDX-License-Identifier: Apache-2.0 */
/* Beam search: what n live sequences hold, dealt anew by their parents. */
#include "blocks_support.h"

#define BS    4
#define BEAMS 4

/* Beams of one prompt that have gone their own ways, each with its length, table, salt and mark. */
static void make_beams(kvleaf_blocks *blocks, kvleaf_seq *seqs)
{
    static const int32_t prompt[] = {1, 2, 3, 4, 5, 6};
    seqs[0] = make_prompt(blocks, &(kvleaf_seq_params){.struct_size = sizeof(kvleaf_seq_params), .user = 100}, prompt,
                          6, NULL);
    for (int32_t i = 1; i < BEAMS; i++)
        seqs[i] = fork_seq(blocks, seqs[0], 6);
    for (int32_t i = 0; i < BEAMS; i++) {
        int32_t own[] = {10 + i, 20 + i, 30 + i, 40 + i};
        extend_ids(blocks, seqs[i], own, 1 + i);
        compute(blocks, seqs[i]);
        kvl_sequence *sequence = NULL;
        assert_ok(kvl_sequence_find(blocks, seqs[i], &sequence));
        sequence->params.user = 100 + (uint64_t)i;
        kvl_sequence_uploaded(sequence, 0, sequence->count);
    }
    check_blocks(blocks, 0);
}

/* Every way in which the parents of four beams can be chosen. */
static void test_all_parents(void **state)
{
    (void)state;
    for (int32_t code = 0; code < 256; code++) {
        const int32_t parents[BEAMS] = {code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6 & 3};
        kvleaf_blocks *blocks = make_blocks(16, BS);
        kvleaf_seq seqs[BEAMS];
        int32_t tables[BEAMS][4], counts[BEAMS], ids[BEAMS][10];
        kvleaf_seq_info before[BEAMS];
        make_beams(blocks, seqs);
        for (int32_t i = 0; i < BEAMS; i++) {
            before[i] = info_of(blocks, seqs[i]);
            assert_ok(kvleaf_blocks_seq_table(blocks, seqs[i], 0, tables[i], 4, &counts[i]));
            assert_ok(kvleaf_blocks_seq_ids(blocks, seqs[i], 0, ids[i], before[i].known));
        }
        assert_ok(kvleaf_blocks_seq_rearrange(blocks, seqs, parents, BEAMS));
        check_blocks(blocks, 0);
        assert_int_equal(pending(blocks, NULL), 0); /* reference counts only */
        for (int32_t i = 0; i < BEAMS; i++) {
            const kvleaf_seq_info *parent = &before[parents[i]];
            int32_t got[10], changed = counts[i];
            kvl_sequence *sequence = NULL;
            assert_table(blocks, seqs[i], tables[parents[i]], counts[parents[i]]);
            assert_lengths(blocks, seqs[i], parent->committed, parent->planned, parent->extended);
            assert_int_equal(info_of(blocks, seqs[i]).user, 100 + i);
            assert_ok(kvleaf_blocks_seq_ids(blocks, seqs[i], 0, got, parent->known));
            assert_memory_equal(got, ids[parents[i]], (size_t)parent->known * sizeof *got);
            for (int32_t at = counts[parents[i]] < changed ? counts[parents[i]] : changed; at > 0; at--)
                changed = tables[i][at - 1] != tables[parents[i]][at - 1] ? at - 1 : changed;
            changed = changed > counts[parents[i]] ? counts[parents[i]] : changed;
            assert_ok(kvl_sequence_find(blocks, seqs[i], &sequence));
            assert_int_equal(sequence->first_changed[0], changed);
        }
        for (int32_t i = 0; i < BEAMS; i++) { /* they go on, each on its own */
            assert_ok(extend(blocks, seqs[i], 3));
            compute(blocks, seqs[i]);
            check_blocks(blocks, 0);
        }
        for (int32_t i = 0; i < BEAMS; i++)
            assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
        assert_int_equal(stats_of(blocks).used, 0);
        kvleaf_blocks_destroy(&blocks);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    kvleaf_blocks *blocks = make_blocks(24, BS);
    kvleaf_seq seqs[BEAMS], gone = make_seq(blocks, 1), stale = gone, uncommitted = make_seq(blocks, 3),
                            open = make_seq(blocks, 3);
    int32_t one = 1;
    make_beams(blocks, seqs);
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &gone));
    assert_ok(extend(blocks, uncommitted, 1));
    assert_ok(extend(blocks, open, 1));
    assert_ok(kvleaf_blocks_step_begin(blocks, &open, &one, 1));
    const struct {
        kvleaf_seq seqs[3];
        int32_t parents[3];
        kvleaf_status status;
        const char *field;
    } cases[] = {
        {{seqs[0], seqs[1], seqs[2]}, {0, 1, 3}, KVLEAF_INVALID, "parents"},
        {{seqs[0], seqs[1], seqs[2]}, {-1, 1, 2}, KVLEAF_INVALID, "parents"},
        {{seqs[0], seqs[1], seqs[0]}, {0, 0, 0}, KVLEAF_INVALID, "seqs"},
        {{seqs[0], seqs[1], uncommitted}, {1, 0, 0}, KVLEAF_INVALID, "seqs"},
        {{seqs[0], seqs[1], stale}, {1, 0, 0}, KVLEAF_STALE, "seq"},
        {{seqs[0], seqs[1], 0}, {1, 0, 0}, KVLEAF_INVALID, "seq"},
        {{seqs[0], open, seqs[1]}, {1, 0, 0}, KVLEAF_BUSY, "seq"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t table[4], count;
        assert_ok(kvleaf_blocks_seq_table(blocks, seqs[0], 0, table, 4, &count));
        assert_status(kvleaf_blocks_seq_rearrange(blocks, cases[i].seqs, cases[i].parents, 3), cases[i].status);
        assert_string_equal(kvleaf_last_error()->field, cases[i].field);
        assert_table(blocks, seqs[0], table, count);
        check_blocks(blocks, 0);
    }
    assert_status(kvleaf_blocks_seq_rearrange(blocks, seqs, cases[0].parents, -1), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_rearrange(blocks, NULL, cases[0].parents, 2), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_rearrange(blocks, seqs, NULL, 2), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_seq_rearrange(NULL, seqs, cases[0].parents, 2), KVLEAF_INVALID);
    assert_ok(kvleaf_blocks_seq_rearrange(blocks, NULL, NULL, 0));
    kvleaf_blocks_destroy(&blocks);
}

/* With windows, and with what a beam found in the prefix cache: the chain goes on from its parent's. */
static void test_windows_and_chains(void **state)
{
    (void)state;
    const kvleaf_block_group groups[] = {{.num_blocks = 24}, {.num_blocks = 24, .window = 5}};
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = BS, .groups = groups, .num_groups = 2), &blocks));
    int32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, more[] = {70, 71, 72, 73};
    kvleaf_seq seqs[2] = {make_prompt(blocks, NULL, ids, 12, NULL), make_seq(blocks, 0)};
    assert_ok(kvleaf_blocks_seq_rearrange(blocks, seqs, (int32_t[]){0, 0}, 2));
    check_blocks(blocks, 0);
    extend_ids(blocks, seqs[1], more, 4);
    compute(blocks, seqs[1]);
    check_blocks(blocks, 0);
    int32_t whole[17];
    memcpy(whole, ids, 12 * sizeof *ids);
    memcpy(whole + 12, more, sizeof more);
    assert_int_equal(match_of(blocks, NULL, whole, 17), 16);
    assert_ok(kvleaf_blocks_seq_rearrange(blocks, seqs, (int32_t[]){1, 0}, 2)); /* each takes the other's place */
    check_blocks(blocks, 0);
    assert_lengths(blocks, seqs[0], 16, 16, 16);
    assert_lengths(blocks, seqs[1], 12, 12, 12);
    kvleaf_blocks_destroy(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_parents),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_windows_and_chains),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
