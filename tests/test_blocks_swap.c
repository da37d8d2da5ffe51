/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences in host memory: what is copied out and back, what is shared, and that a swap given up changes nothing. */
#include "blocks_support.h"

#define BS     4
#define BLOCKS 12
#define HOSTS  6

/* Device and host memory: what each block holds, as far as the tests care. */
typedef struct memory {
    kvleaf_blocks *blocks;
    int32_t device[2][BLOCKS], host[2][HOSTS];
} memory;

static void make(memory *m, bool no_prefix_cache)
{
    const kvleaf_block_group groups[] = {{.num_blocks = BLOCKS, .swap_blocks = HOSTS},
                                         {.num_blocks = BLOCKS, .window = 6, .swap_blocks = HOSTS}};
    *m = (memory){.blocks = NULL};
    assert_ok(kvleaf_blocks_create(
        kvleaf_blocks_params(.block_size = BS, .groups = groups, .num_groups = 2, .no_prefix_cache = no_prefix_cache),
        &m->blocks));
}

/* Writes what the sequence's blocks hold: a number of its own for each. */
static void write_blocks(memory *m, kvleaf_seq seq, int32_t number)
{
    for (int32_t g = 0; g < 2; g++) {
        int32_t table[16], count = 0;
        assert_ok(kvleaf_blocks_seq_table(m->blocks, seq, g, table, 16, &count));
        for (int32_t i = 0; i < count; i++)
            if (table[i] != KVLEAF_NO_BLOCK)
                m->device[g][table[i]] = number + i;
    }
}

static void assert_holds(const memory *m, kvleaf_seq seq, int32_t number, int32_t whole)
{
    for (int32_t g = 0; g < 2; g++) {
        int32_t table[16], count = 0;
        assert_ok(kvleaf_blocks_seq_table(m->blocks, seq, g, table, 16, &count));
        for (int32_t i = 0; i < whole; i++)
            if (table[i] != KVLEAF_NO_BLOCK)
                assert_int_equal(m->device[g][table[i]], number + i);
    }
}

/* A swap with its copies made; returns how many there were. */
static int32_t swap(memory *m, kvleaf_seq seq, bool out)
{
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = -1;
    if (out)
        assert_ok(kvleaf_blocks_swap_out(m->blocks, seq, &copies, &count));
    else
        assert_ok(kvleaf_blocks_swap_in(m->blocks, seq, &copies, &count));
    for (int32_t i = 0; i < count; i++) {
        int32_t *device = &m->device[copies[i].group][copies[i].block],
                *host = &m->host[copies[i].group][copies[i].host];
        *(out ? host : device) = *(out ? device : host);
    }
    assert_ok(kvleaf_blocks_swap_end(m->blocks, seq, true));
    check_blocks(m->blocks, 0);
    return count;
}

/* Uses all blocks that can be had for something else. */
static void overwrite(memory *m)
{
    kvleaf_seq filler = make_seq(m->blocks, 0);
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    int32_t least = INT32_MAX;
    for (int32_t g = 0; g < 2; g++) {
        assert_ok(kvleaf_blocks_query_group(m->blocks, g, &stats));
        least = stats.free + stats.cached < least ? stats.free + stats.cached : least;
    }
    assert_ok(extend(m->blocks, filler, (int64_t)least * BS));
    write_blocks(m, filler, 9000);
    assert_ok(kvleaf_blocks_seq_destroy(m->blocks, &filler));
    check_blocks(m->blocks, 0);
}

static void test_out_and_back(void **state)
{
    (void)state;
    for (int32_t reused = 0; reused < 2; reused++) {
        memory m;
        make(&m, reused == 0);
        kvleaf_seq seq = make_prompt(m.blocks, NULL, line, 14, NULL);
        write_blocks(&m, seq, 100);
        assert_int_equal(swap(&m, seq, true), 4 + 2); /* of the windowed group, 9 .. 14 */
        assert_int_equal(info_of(m.blocks, seq).swapped, 1);
        assert_int_equal(info_of(m.blocks, seq).known, 14);
        assert_int_equal(stats_of(m.blocks).used, 0);
        assert_int_equal(stats_of(m.blocks).swapped, 1);
        assert_int_equal(stats_of(m.blocks).host_used, 6);
        assert_int_equal(stats_of(m.blocks).host_total, 2 * HOSTS);
        assert_int_equal(stats_of(m.blocks).tokens, 14);
        if (reused)
            overwrite(&m);
        kvl_sequence *sequence = NULL;
        assert_ok(kvl_sequence_find(m.blocks, seq, &sequence));
        kvl_sequence_uploaded(sequence, 0, 4);
        assert_int_equal(swap(&m, seq, false), reused ? 6 : 0);
        assert_int_equal(sequence->first_changed[0], 0);
        assert_holds(&m, seq, 100, 4);
        assert_int_equal(stats_of(m.blocks).host_used, 0);
        assert_int_equal(stats_of(m.blocks).swapped_out, 6);
        assert_int_equal(stats_of(m.blocks).swapped_in, reused ? 6 : 0);
        int32_t ids[14];
        assert_ok(kvleaf_blocks_seq_ids(m.blocks, seq, 0, ids, 14));
        assert_memory_equal(ids, line, sizeof ids);
        extend_ids(m.blocks, seq, line + 14, 2);
        compute(m.blocks, seq);
        check_blocks(m.blocks, 0);
        assert_int_equal(match_of(m.blocks, NULL, line, 17), reused ? 16 : 0);
        kvleaf_blocks_destroy(&m.blocks);
    }
}

/* Shared blocks go once and come back once, whoever is first. */
static void test_shared_once(void **state)
{
    (void)state;
    for (int32_t order = 0; order < 4; order++) {
        memory m;
        make(&m, false);
        kvleaf_seq a = make_seq(m.blocks, 10), b = fork_seq(m.blocks, a, 10);
        write_blocks(&m, a, 100);
        kvleaf_seq first = order & 1 ? a : b, second = order & 1 ? b : a;
        assert_int_equal(swap(&m, first, true), 3 + 2);
        assert_int_equal(stats_of(m.blocks).used, 5); /* the other's */
        assert_int_equal(swap(&m, second, true), 0);
        assert_int_equal(stats_of(m.blocks).host_used, 5);
        overwrite(&m);
        first = order & 2 ? a : b;
        second = order & 2 ? b : a;
        assert_int_equal(swap(&m, first, false), 5);
        assert_int_equal(swap(&m, second, false), 0);
        assert_int_equal(info_of(m.blocks, a).blocks_shared, 5);
        assert_holds(&m, a, 100, 3);
        assert_holds(&m, b, 100, 3);
        assert_int_equal(stats_of(m.blocks).host_used, 0);
        kvleaf_blocks_destroy(&m.blocks);
    }
}

/* A host copy is taken for a block's content only while it is: not once the block was written on. */
static void test_content_that_goes_on(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq a = make_seq(m.blocks, 6);
    assert_ok(extend(m.blocks, a, 1)); /* before it is shared: it writes on in place */
    kvleaf_seq b = fork_seq(m.blocks, a, 6);
    write_blocks(&m, a, 100);
    assert_int_equal(swap(&m, b, true), 4);
    compute(m.blocks, a);
    m.device[0][entry_of(m.blocks, a, 1)] = 501;
    assert_int_equal(swap(&m, a, true), 2); /* the second block of each group anew */
    overwrite(&m);
    assert_int_equal(swap(&m, b, false), 4);
    assert_holds(&m, b, 100, 2);
    assert_int_equal(swap(&m, a, false), 2);
    assert_int_equal(m.device[0][entry_of(m.blocks, a, 1)], 501);
    assert_int_equal(m.device[0][entry_of(m.blocks, a, 0)], 100);
    kvleaf_blocks_destroy(&m.blocks);

    make(&m, false); /* and one that is cut and written over by another while it is out */
    a = make_seq(m.blocks, 6);
    b = fork_seq(m.blocks, a, 6);
    write_blocks(&m, a, 100);
    swap(&m, b, true);
    assert_ok(kvleaf_blocks_seq_truncate(m.blocks, a, 5));
    assert_ok(extend(m.blocks, a, 1));
    m.device[0][entry_of(m.blocks, a, 1)] = 77;
    assert_int_equal(swap(&m, b, false), 2);
    assert_holds(&m, b, 100, 2);
    assert_true(entry_of(m.blocks, a, 1) != entry_of(m.blocks, b, 1));
    assert_int_equal(entry_of(m.blocks, a, 0), entry_of(m.blocks, b, 0));
    kvleaf_blocks_destroy(&m.blocks);
}

/* What the index holds by then, put there by another sequence, is taken instead of a copy. */
static void test_index_hit_on_the_way_back(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq seq = make_prompt(m.blocks, NULL, line, 10, NULL), other;
    write_blocks(&m, seq, 100);
    assert_int_equal(swap(&m, seq, true), 5);
    overwrite(&m);
    assert_int_equal(match_of(m.blocks, NULL, line, 9), 0);
    other = make_prompt(m.blocks, NULL, line, 9, NULL);
    write_blocks(&m, other, 100);
    assert_int_equal(swap(&m, seq, false), 1 + 1); /* the partial block of each group */
    assert_holds(&m, seq, 100, 3);
    assert_int_equal(entry_of(m.blocks, seq, 1), entry_of(m.blocks, other, 1));
    kvleaf_blocks_destroy(&m.blocks);

    make(&m, false); /* not after it was cleared */
    seq = make_prompt(m.blocks, NULL, line, 10, NULL);
    swap(&m, seq, true);
    overwrite(&m);
    assert_ok(kvleaf_blocks_prefix_clear(m.blocks));
    other = make_prompt(m.blocks, NULL, line, 9, NULL);
    assert_int_equal(swap(&m, seq, false), 5);
    extend_ids(m.blocks, seq, line + 10, 2);
    compute(m.blocks, seq);
    assert_int_equal(match_of(m.blocks, NULL, line, 13), 8);
    check_blocks(m.blocks, 0);
    kvleaf_blocks_destroy(&m.blocks);
}

/* Blocks that hold no computed token get room and no copy. */
static void test_uncomputed(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq seq = make_prompt(m.blocks, NULL, line, 5, NULL);
    extend_ids(m.blocks, seq, line + 5, 8);
    write_blocks(&m, seq, 100);
    assert_int_equal(swap(&m, seq, true), 2 + 2);
    assert_int_equal(stats_of(m.blocks).host_used, 8);
    overwrite(&m);
    assert_int_equal(swap(&m, seq, false), 4);
    assert_lengths(m.blocks, seq, 5, 5, 13);
    assert_int_equal(info_of(m.blocks, seq).known, 13);
    assert_holds(&m, seq, 100, 2);
    compute(m.blocks, seq);
    assert_int_equal(match_of(m.blocks, NULL, line, 13), 12);
    kvleaf_blocks_destroy(&m.blocks);
}

static void assert_same_stats(const kvleaf_blocks_stats *a, const kvleaf_blocks_stats *b)
{
    const int64_t pairs[][2] = {
        {a->used, b->used},
        {a->cached, b->cached},
        {a->free, b->free},
        {a->indexed, b->indexed},
        {a->host_used, b->host_used},
        {a->swapped, b->swapped},
        {(int64_t)a->swapped_out, (int64_t)b->swapped_out},
        {(int64_t)a->swapped_in, (int64_t)b->swapped_in},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        assert_int_equal(pairs[i][0], pairs[i][1]);
}

/* done = false: as before the begin. */
static void test_given_up(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq seq = make_prompt(m.blocks, NULL, line, 10, NULL), shared = fork_seq(m.blocks, seq, 9);
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0, table[4], entries = 0;
    write_blocks(&m, seq, 100);
    assert_ok(kvleaf_blocks_seq_table(m.blocks, seq, 0, table, 4, &entries));
    kvleaf_blocks_stats before = stats_of(m.blocks), after;
    assert_ok(kvleaf_blocks_swap_out(m.blocks, seq, &copies, &count));
    assert_ok(kvleaf_blocks_swap_end(m.blocks, seq, false));
    check_blocks(m.blocks, 0);
    after = stats_of(m.blocks);
    assert_same_stats(&before, &after);
    assert_table(m.blocks, seq, table, entries);
    swap(&m, seq, true);
    overwrite(&m);
    before = stats_of(m.blocks);
    assert_ok(kvleaf_blocks_swap_in(m.blocks, seq, &copies, &count));
    for (int32_t i = 0; i < count; i++)
        m.device[copies[i].group][copies[i].block] = -1; /* some were made */
    assert_ok(kvleaf_blocks_swap_end(m.blocks, seq, false));
    check_blocks(m.blocks, 0);
    after = stats_of(m.blocks);
    assert_same_stats(&before, &after);
    assert_int_equal(info_of(m.blocks, seq).swapped, 1);
    swap(&m, seq, false);
    assert_holds(&m, seq, 100, 3);
    assert_holds(&m, shared, 100, 2);
    kvleaf_blocks_destroy(&m.blocks);
}

static void test_destroyed_while_out(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq a = make_seq(m.blocks, 10), b = fork_seq(m.blocks, a, 10);
    write_blocks(&m, a, 100);
    swap(&m, a, true);
    swap(&m, b, true);
    assert_ok(kvleaf_blocks_seq_destroy(m.blocks, &a));
    check_blocks(m.blocks, 0);
    assert_int_equal(stats_of(m.blocks).host_used, 5);
    assert_int_equal(stats_of(m.blocks).swapped, 1);
    overwrite(&m);
    assert_int_equal(swap(&m, b, false), 5);
    assert_holds(&m, b, 100, 3);
    swap(&m, b, true);
    assert_ok(kvleaf_blocks_seq_destroy(m.blocks, &b));
    check_blocks(m.blocks, 0);
    assert_int_equal(stats_of(m.blocks).host_used, 0);
    assert_int_equal(stats_of(m.blocks).tokens, 0);
    assert_int_equal(stats_of(m.blocks).free, 2 * BLOCKS);
    kvleaf_blocks_destroy(&m.blocks);
}

static void test_without_room(void **state)
{
    (void)state;
    memory m;
    make(&m, true);
    kvleaf_seq big = make_seq(m.blocks, 16), small = make_seq(m.blocks, 12);
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0;
    swap(&m, big, true);
    assert_status(kvleaf_blocks_swap_out(m.blocks, small, &copies, &count), KVLEAF_NO_BLOCKS);
    assert_int_equal(kvleaf_last_error()->value, 3);
    assert_int_equal(kvleaf_last_error()->limit, 2);
    check_blocks(m.blocks, 0);
    assert_ok(extend(m.blocks, small, 24));
    assert_status(kvleaf_blocks_swap_in(m.blocks, big, &copies, &count), KVLEAF_NO_BLOCKS);
    check_blocks(m.blocks, 0);
    assert_int_equal(info_of(m.blocks, big).swapped, 1);
    assert_ok(kvleaf_blocks_seq_truncate(m.blocks, small, 12));
    swap(&m, big, false);
    kvleaf_blocks_destroy(&m.blocks);
}

static void test_refusals(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_blocks *blocks = m.blocks, *without = make_blocks(4, BS);
    kvleaf_seq seq = make_prompt(blocks, NULL, line, 6, NULL), child = fork_seq(blocks, seq, 6), made = 0;
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0, one = 1, table[4];
    bool can = false;
    assert_status(kvleaf_blocks_swap_out(without, make_seq(without, 3), &copies, &count), KVLEAF_UNSUPPORTED);
    assert_status(kvleaf_blocks_swap_in(blocks, seq, &copies, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_swap_end(blocks, seq, true), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_swap_out(blocks, 0, &copies, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_swap_out(blocks, seq, NULL, &count), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_swap_out(blocks, seq, &copies, NULL), KVLEAF_INVALID);
    assert_status(kvleaf_blocks_swap_out(NULL, seq, &copies, &count), KVLEAF_INVALID);
    assert_ok(extend(blocks, child, 1));
    assert_status(kvleaf_blocks_swap_out(blocks, child, &copies, &count), KVLEAF_BUSY); /* its copy is pending */
    assert_ok(kvleaf_blocks_step_begin(blocks, &child, &one, 1));
    assert_status(kvleaf_blocks_swap_out(blocks, child, &copies, &count), KVLEAF_BUSY);
    make_copies(blocks);
    assert_status(kvleaf_blocks_swap_out(blocks, child, &copies, &count), KVLEAF_BUSY); /* the step is open */
    assert_ok(kvleaf_blocks_step_rollback(blocks, &child, 1));
    swap(&m, child, true);
    assert_status(kvleaf_blocks_swap_out(blocks, child, &copies, &count), KVLEAF_INVALID);
    kvleaf_status answers[] = {
        extend(blocks, child, 1),
        kvleaf_blocks_can_extend(blocks, child, 1, &can),
        kvleaf_blocks_seq_fork(blocks, child, 1, &made),
        kvleaf_blocks_seq_truncate(blocks, child, 0),
        kvleaf_blocks_seq_table(blocks, child, 0, table, 4, &count),
        kvleaf_blocks_seq_ids(blocks, child, 0, table, 1),
        kvleaf_blocks_seq_set_ids(blocks, child, 0, line, 1),
        kvleaf_blocks_step_begin(blocks, &child, &one, 1),
        kvleaf_blocks_seq_rearrange(blocks, (kvleaf_seq[]){seq, child}, (int32_t[]){0, 0}, 2),
    };
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        assert_int_equal(answers[i], KVLEAF_BUSY);
    check_blocks(blocks, 0);
    swap(&m, child, false);
    assert_ok(kvleaf_blocks_step_begin(blocks, &child, &one, 1));
    kvleaf_blocks_destroy(&without);
    kvleaf_blocks_destroy(&m.blocks);
}

/* The managed cache makes the pending copies itself, before those of the swap. */
static void test_begin_with_a_pending_copy(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq seq = make_seq(m.blocks, 6), child = fork_seq(m.blocks, seq, 6);
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0;
    assert_ok(extend(m.blocks, child, 1));
    assert_ok(kvl_swap_begin(m.blocks, child, true, &copies, &count));
    assert_int_equal(count, 4);
    assert_ok(kvleaf_blocks_swap_end(m.blocks, child, false));
    assert_int_equal(pending(m.blocks, NULL), 1);
    check_blocks(m.blocks, 0);
    assert_ok(kvl_swap_begin(m.blocks, child, true, &copies, &count));
    assert_ok(kvleaf_blocks_swap_end(m.blocks, child, true));
    make_copies(m.blocks);
    check_blocks(m.blocks, 0);
    kvleaf_blocks_destroy(&m.blocks);
}

/* Ids that a sharer said are known while the sequence is out, and afterwards. */
static void test_ids_said_by_a_sharer(void **state)
{
    (void)state;
    memory m;
    make(&m, false);
    kvleaf_seq seq = make_seq(m.blocks, 5), child = fork_seq(m.blocks, seq, 5);
    assert_ok(kvleaf_blocks_seq_set_ids(m.blocks, child, 0, line, 5));
    swap(&m, seq, true);
    assert_int_equal(info_of(m.blocks, seq).known, 5);
    assert_ok(kvleaf_blocks_seq_destroy(m.blocks, &child));
    overwrite(&m);
    swap(&m, seq, false);
    assert_int_equal(info_of(m.blocks, seq).known, 5);
    kvleaf_blocks_destroy(&m.blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_out_and_back),
        cmocka_unit_test(test_shared_once),
        cmocka_unit_test(test_content_that_goes_on),
        cmocka_unit_test(test_index_hit_on_the_way_back),
        cmocka_unit_test(test_uncomputed),
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_destroyed_while_out),
        cmocka_unit_test(test_without_room),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_begin_with_a_pending_copy),
        cmocka_unit_test(test_ids_said_by_a_sharer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
