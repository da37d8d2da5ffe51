/* SPDX-License-Identifier: Apache-2.0 */
/* Protects a manager from what can't be loaded into it: it is refused before anything changes, whether there is no
 * room, the manager is another, what was saved contradicts itself, or memory is out. */
#include "ledger.h"
#include "saved_support.h"

#include "stats.h"

/* A block more or less: NO_BLOCKS is exact, and changes nothing. */
static void test_too_few_blocks(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK);
    kvleaf_seq seqs[3], loaded[3] = {0};
    seqs[0] = make_prompt(a, NULL, ids_from(100), 10, NULL);
    seqs[1] = make_prompt(a, NULL, ids_from(200), 4, NULL);
    seqs[2] = fork_seq(a, seqs[0], 9);
    for (int32_t blocks = 3; blocks <= 4; blocks++) {
        kvleaf_blocks *b = make_blocks(blocks, BLOCK);
        kvleaf_blocks_stats before = stats_of(b), after;
        kvleaf_status status = carry(a, seqs, 3, true, b, loaded);
        after = stats_of(b);
        assert_int_equal(status, blocks < 4 ? KVLEAF_NO_BLOCKS : KVLEAF_OK);
        if (status) {
            assert_true(same_stats(&before, &after));
            assert_int_equal(kvleaf_last_error()->value, 4);
            assert_int_equal(kvleaf_last_error()->limit, blocks);
        }
        kvleaf_blocks_destroy(&b);
    }
    kvleaf_blocks_destroy(&a);
}

static void test_other_shapes(void **state)
{
    (void)state;
    const kvleaf_block_group two[] = {{.num_blocks = 10}, {.num_blocks = 10}}, window = {.num_blocks = 10, .window = 9};
    const struct {
        kvleaf_blocks_params params;
        kvleaf_status status;
        const char *field;
    } rows[] = {
        {{.num_blocks = 10, .block_size = 8}, KVLEAF_FOREIGN, "block_size"},
        {{.groups = two, .num_groups = 2, .block_size = BLOCK}, KVLEAF_FOREIGN, "num_groups"},
        {{.groups = &window, .num_groups = 1, .block_size = BLOCK}, KVLEAF_FOREIGN, "window"},
        {{.num_blocks = 10, .block_size = BLOCK, .max_sequences = 1}, KVLEAF_TOO_SMALL, "max_sequences"},
        {{.num_blocks = 10, .block_size = BLOCK, .max_blocks_per_seq = 2}, KVLEAF_TOO_SMALL, "max_blocks_per_seq"},
        {{.num_blocks = 10, .block_size = BLOCK, .max_sequences = 2, .max_blocks_per_seq = 3}, KVLEAF_OK, NULL},
    };
    kvleaf_blocks *a = make_blocks(40, BLOCK);
    kvleaf_seq seqs[2], loaded[2] = {0};
    seqs[0] = make_prompt(a, NULL, ids_from(100), 10, NULL);
    seqs[1] = make_prompt(a, NULL, ids_from(200), 4, NULL);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        kvleaf_blocks_params params = rows[i].params;
        kvleaf_blocks *b = NULL;
        params.struct_size = sizeof params;
        assert_ok(kvleaf_blocks_create(&params, &b));
        assert_status(carry(a, seqs, 2, true, b, loaded), rows[i].status);
        if (rows[i].field)
            assert_string_equal(kvleaf_last_error()->field, rows[i].field);
        kvleaf_blocks_destroy(&b);
    }
    kvl_save save;
    kvleaf_seq stale = seqs[1];
    assert_ok(kvleaf_blocks_seq_destroy(a, &seqs[1]));
    assert_status(kvl_save_begin(a, (kvleaf_seq[]){seqs[0], stale}, 2, true, &save), KVLEAF_STALE);
    kvleaf_blocks_destroy(&a);
}

/* A sequence in host memory can't be saved; beside it everything can, there and here. */
static void test_swapped_out(void **state)
{
    (void)state;
    kvleaf_blocks *managers[2] = {NULL};
    kvleaf_seq out[2], seq = 0, loaded = 0;
    for (int32_t i = 0; i < 2; i++) {
        const kvleaf_swap_copy *copies = NULL;
        int32_t count = 0;
        assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 8, .block_size = BLOCK, .swap_blocks = 4),
                                       &managers[i]));
        out[i] = make_prompt(managers[i], NULL, ids_from(100), 9, NULL);
        assert_ok(kvleaf_blocks_swap_out(managers[i], out[i], &copies, &count));
        assert_ok(kvleaf_blocks_swap_end(managers[i], out[i], true));
    }
    seq = make_prompt(managers[0], NULL, ids_from(100), 13, NULL);
    kvl_save save;
    assert_status(kvl_save_begin(managers[0], (kvleaf_seq[]){seq, out[0]}, 2, true, &save), KVLEAF_BUSY);
    assert_ok(carry(managers[0], &seq, 1, true, managers[1], &loaded));
    assert_int_equal(stats_of(managers[1]).used, 4);
    for (int32_t i = 0; i < 2; i++) {
        const kvleaf_swap_copy *copies = NULL;
        int32_t count = 0;
        assert_ok(kvleaf_blocks_swap_in(managers[i], out[i], &copies, &count));
        assert_ok(kvleaf_blocks_swap_end(managers[i], out[i], true));
        check_blocks(managers[i], 0);
        assert_int_equal(info_of(managers[i], out[i]).blocks_shared, 2);
        kvleaf_blocks_destroy(&managers[i]);
    }
}

/* What is saved of a small scene, to be changed into something that can't be. */
typedef struct scene {
    kvleaf_blocks *from;
    kvl_save save;
    kvl_saved saved;
    kvl_saved_seq seqs[3];
    kvl_saved_entry entries[4];
    int32_t records[4][2], ids[16], table[2][5];
} scene;

static void make_scene(scene *s)
{
    kvleaf_seq seqs[3];
    s->from = make_blocks(40, BLOCK);
    seqs[0] = make_prompt(s->from, NULL, ids_from(100), 17, NULL);
    seqs[1] = fork_seq(s->from, seqs[0], 14);
    seqs[2] = make_prompt(s->from, NULL, ids_from(300), 3, NULL);
    assert_ok(kvl_save_begin(s->from, seqs, 3, true, &s->save));
    s->saved = s->save.saved;
    assert_int_equal(s->saved.num_entries, 4);
    memcpy(s->seqs, s->saved.seqs, sizeof s->seqs);
    memcpy(s->entries, s->saved.entries, sizeof s->entries);
    s->saved.seqs = s->seqs;
    s->saved.entries = s->entries;
    for (int32_t i = 0; i < 4; i++) {
        s->records[i][0] = s->entries[i].records[0];
        s->entries[i].records = s->records[i];
    }
    memcpy(s->ids, s->seqs[1].ids, 14 * sizeof *s->ids);
    s->seqs[1].ids = s->ids;
    for (int32_t i = 0; i < 2; i++) {
        memcpy(s->table[i], s->seqs[i].records, (size_t)(5 - i) * sizeof *s->table[i]);
        s->seqs[i].records = s->table[i];
    }
}

static void lie_nothing(scene *s)
{
    (void)s;
}
static void lie_one_record_in_two_columns(scene *s)
{
    s->table[0][1] = s->table[0][0];
}
static void lie_other_ids(scene *s)
{
    s->ids[13]++;
}
static void lie_unknown_id(scene *s)
{
    s->ids[3] = KVL_UNKNOWN;
}
static void lie_other_ids_before(scene *s)
{
    s->table[1][0] = s->seqs[2].records[0];
    s->ids[0] = 300;
    s->ids[1] = 301;
    s->ids[2] = 302;
}
static void lie_other_salt(scene *s)
{
    s->seqs[1].salt++;
}
static void lie_other_content(scene *s)
{
    static kvl_content content[4];
    content[2].digest[1] = 1;
    s->seqs[1].content = content;
}
static void lie_priority(scene *s)
{
    s->seqs[2].priority = KVLEAF_PRIORITY_HIGH + 1;
}
static void lie_no_prefix(scene *s)
{
    s->seqs[2].no_prefix = 2;
}
static void lie_entry_priority(scene *s)
{
    s->entries[3].priority = KVLEAF_PRIORITY_LOW - 1;
}
static void lie_entry_without_block(scene *s)
{
    s->records[3][0] = KVLEAF_NO_BLOCK;
}
static void lie_entry_of_another_record(scene *s)
{
    s->records[3][0] = s->records[2][0];
}
static void lie_entry_twice(scene *s)
{
    s->entries[3] = s->entries[2];
}
static void lie_entry_of_another_salt(scene *s)
{
    s->entries[3].salt++;
}
static void lie_entry_at_another_depth(scene *s)
{
    s->entries[3].parent = 1;
}
static void lie_entry_with_other_ids(scene *s)
{
    s->entries[1].ids = ids_from(900);
}
static void lie_entry_with_unknown_ids(scene *s)
{
    static int32_t ids[BLOCK];
    memcpy(ids, s->entries[3].ids, sizeof ids);
    ids[2] = KVL_UNKNOWN;
    s->seqs[0].known = 12;
    s->entries[3].ids = ids;
}

static void test_contradictions(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        void (*tell)(scene *);
        kvleaf_status status;
    } lies[] = {
        {"nothing", lie_nothing, KVLEAF_OK},
        {"one record in two columns", lie_one_record_in_two_columns, KVLEAF_CORRUPT},
        {"other ids in a shared block", lie_other_ids, KVLEAF_CORRUPT},
        {"an unknown id among known ones", lie_unknown_id, KVLEAF_CORRUPT},
        {"other ids before a shared block", lie_other_ids_before, KVLEAF_CORRUPT},
        {"another salt", lie_other_salt, KVLEAF_CORRUPT},
        {"another content", lie_other_content, KVLEAF_CORRUPT},
        {"priority 4", lie_priority, KVLEAF_CORRUPT},
        {"no_prefix 2", lie_no_prefix, KVLEAF_CORRUPT},
        {"an entry's priority -5", lie_entry_priority, KVLEAF_CORRUPT},
        {"an entry without block", lie_entry_without_block, KVLEAF_CORRUPT},
        {"two entries of one block", lie_entry_of_another_record, KVLEAF_CORRUPT},
        {"an entry twice", lie_entry_twice, KVLEAF_CORRUPT},
        {"an entry with another salt than its parent", lie_entry_of_another_salt, KVLEAF_CORRUPT},
        {"an entry at another depth than its block", lie_entry_at_another_depth, KVLEAF_CORRUPT},
        {"an entry with other ids than its block", lie_entry_with_other_ids, KVLEAF_CORRUPT},
        {"an entry with unknown ids", lie_entry_with_unknown_ids, KVLEAF_CORRUPT},
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        scene s = {0};
        kvleaf_blocks *b = make_blocks(20, BLOCK);
        kvleaf_seq loaded[3] = {0};
        kvl_load load;
        make_scene(&s);
        lies[i].tell(&s);
        kvleaf_blocks_stats before = stats_of(b), after;
        kvleaf_status status = kvl_load_begin(b, &s.saved, loaded, &load);
        if (status != lies[i].status)
            fail_msg("%s: %s", lies[i].what, kvleaf_status_name(status));
        if (!status)
            kvl_load_end(b, &s.saved, &load, loaded, true);
        after = stats_of(b);
        assert_int_equal(same_stats(&before, &after), status != KVLEAF_OK);
        check_blocks(b, 0);
        kvl_save_free(s.from, &s.save);
        kvleaf_blocks_destroy(&s.from);
        kvleaf_blocks_destroy(&b);
    }
}

static kvleaf_blocks *make_counted(ledger *l)
{
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.num_blocks = 40, .block_size = BLOCK, .max_sequences = 8,
                             .allocator = {.allocate = counted_allocate, .release = counted_release, .user = l}),
        &blocks));
    return blocks;
}

static void test_no_memory(void **state)
{
    (void)state;
    ledger l = {0};
    kvleaf_blocks *a = make_counted(&l);
    kvleaf_seq seqs[2], loaded[2] = {0};
    kvl_save save;
    kvl_load load;
    seqs[0] = make_prompt(a, NULL, ids_from(100), 17, NULL);
    seqs[1] = fork_seq(a, seqs[0], 14);
    int64_t live = l.live, refused = 0;
    for (l.fail_at = 1;; l.fail_at++, refused++) {
        l.calls = 0;
        kvleaf_status status = kvl_save_begin(a, seqs, 2, true, &save);
        if (!status)
            break;
        assert_int_equal(status, KVLEAF_NO_MEMORY);
        assert_int_equal(l.live, live);
    }
    assert_int_equal(refused, 9);
    l.fail_at = 0;
    kvleaf_blocks *b = make_counted(&l);
    kvleaf_blocks_stats before = stats_of(b), after;
    live = l.live;
    refused = 0;
    for (l.fail_at = 1;; l.fail_at++, refused++) {
        l.calls = 0;
        kvleaf_status status = kvl_load_begin(b, &save.saved, loaded, &load);
        if (!status)
            break;
        assert_int_equal(status, KVLEAF_NO_MEMORY);
        after = stats_of(b);
        assert_true(same_stats(&before, &after));
        check_blocks(b, 0);
    }
    assert_in_range(refused, 4, 5); /* a table stays with its place */
    l.calls = 1000;                 /* the end takes none */
    l.fail_at = 1001;
    kvl_load_end(b, &save.saved, &load, loaded, true);
    assert_int_equal(l.calls, 1000);
    l.fail_at = 0;
    check_blocks(b, 0);
    kvl_save_free(a, &save);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
    assert_int_equal(l.live, 0);
}

/* A load that is given up leaves what was there before, but for what had to be evicted. */
static void test_given_up(void **state)
{
    (void)state;
    kvleaf_blocks *a = make_blocks(40, BLOCK), *b = make_blocks(8, BLOCK);
    kvleaf_seq seq = make_prompt(a, NULL, ids_from(100), 20, NULL), loaded = 0, there = 0, gone = 0;
    kvl_save save;
    kvl_load load;
    there = make_prompt(b, NULL, ids_from(100), 8, NULL);
    gone = make_prompt(b, NULL, ids_from(500), 4, NULL);
    assert_ok(kvleaf_blocks_seq_destroy(b, &gone));
    assert_ok(kvl_save_begin(a, &seq, 1, true, &save));
    for (int32_t crowded = 0; crowded < 2; crowded++) {
        if (crowded)
            assert_ok(extend(b, there, 3 * BLOCK));
        kvleaf_blocks_stats before = stats_of(b), after;
        assert_ok(kvl_load_begin(b, &save.saved, &loaded, &load));
        assert_true(loaded != 0);
        int32_t filled = 0;
        for (int32_t i = 0; i < 5; i++)
            filled += load.records[0][i].fill;
        assert_int_equal(filled, 3);
        kvl_load_end(b, &save.saved, &load, &loaded, false);
        assert_int_equal(loaded, 0);
        after = stats_of(b);
        assert_int_equal(after.cached, crowded ? 0 : 1);
        assert_int_equal(after.used, before.used);
        assert_int_equal(after.sequences, 1);
        check_blocks(b, 0);
    }
    kvl_save_free(a, &save);
    kvleaf_blocks_destroy(&a);
    kvleaf_blocks_destroy(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_too_few_blocks), cmocka_unit_test(test_other_shapes), cmocka_unit_test(test_swapped_out),
        cmocka_unit_test(test_contradictions), cmocka_unit_test(test_no_memory),    cmocka_unit_test(test_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
