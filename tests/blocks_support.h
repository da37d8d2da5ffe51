/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BLOCKS_SUPPORT_H
#define BLOCKS_SUPPORT_H

/* What the block manager's tests share: short calls, and a check of every invariant from the outside and the inside. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "blocks/blocks.h"

#define assert_status(call, expected)                                                                                  \
    do {                                                                                                               \
        kvleaf_status got_ = (call);                                                                                   \
        if (got_ != (expected))                                                                                        \
            fail_msg("%s: %s (%s), not %s", #call, kvleaf_status_name(got_), kvleaf_last_error()->message,             \
                     kvleaf_status_name(expected));                                                                    \
        if (got_ != KVLEAF_OK)                                                                                         \
            assert_int_equal(kvleaf_last_error()->status, got_);                                                       \
    } while (0)
#define assert_ok(call) assert_status(call, KVLEAF_OK)

static inline kvleaf_blocks *make_blocks(int32_t num_blocks, int32_t block_size)
{
    kvleaf_blocks *blocks = NULL;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = num_blocks, .block_size = block_size), &blocks));
    return blocks;
}

static inline kvleaf_status extend(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = count};
    return kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL);
}

static inline kvleaf_blocks_stats stats_of(const kvleaf_blocks *blocks)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvleaf_blocks_query(blocks, &stats));
    return stats;
}

static inline kvleaf_seq_info info_of(const kvleaf_blocks *blocks, kvleaf_seq seq)
{
    kvleaf_seq_info info = {.struct_size = sizeof info};
    assert_ok(kvleaf_blocks_seq_query(blocks, seq, &info));
    return info;
}

static inline void assert_lengths(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t committed, int64_t planned,
                                  int64_t extended)
{
    kvleaf_seq_info info = info_of(blocks, seq);
    assert_int_equal(info.committed, committed);
    assert_int_equal(info.planned, planned);
    assert_int_equal(info.extended, extended);
}

/* Entry `index` of the sequence's table. */
static inline int32_t entry_of(const kvleaf_blocks *blocks, kvleaf_seq seq, int32_t index)
{
    int32_t count = 0, table[256];
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, 0, table, 256, &count));
    assert_in_range(index, 0, count - 1);
    return table[index];
}

static inline void assert_table(const kvleaf_blocks *blocks, kvleaf_seq seq, const int32_t *expected, int32_t count)
{
    int32_t table[256], got = -1;
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, 0, table, 256, &got));
    assert_int_equal(got, count);
    for (int32_t i = 0; i < count; i++)
        assert_int_equal(table[i], expected[i]);
}

static inline int32_t pending(const kvleaf_blocks *blocks, const kvleaf_block_copy **copies)
{
    const kvleaf_block_copy *list;
    int32_t count = -1;
    assert_ok(kvleaf_blocks_copies(blocks, 0, copies ? copies : &list, &count));
    return count;
}

/* Makes all pending copies count as made. */
static inline void make_copies(kvleaf_blocks *blocks)
{
    for (int32_t i = 0; i < blocks->num_groups; i++)
        assert_ok(kvleaf_blocks_copies_done(blocks, i, blocks->groups[i].num_copies));
}

/* Computes everything that is extended: a whole step of one sequence. */
static inline void compute(kvleaf_blocks *blocks, kvleaf_seq seq)
{
    kvleaf_seq_info info = info_of(blocks, seq);
    int32_t num_q = (int32_t)(info.extended - info.committed);
    assert_ok(kvleaf_blocks_step_begin(blocks, &seq, &num_q, 1));
    make_copies(blocks);
    assert_ok(kvleaf_blocks_step_commit(blocks, &seq, NULL, 1));
}

/* A new sequence with `count` committed tokens. */
static inline kvleaf_seq make_seq(kvleaf_blocks *blocks, int64_t count)
{
    kvleaf_seq seq = 0;
    assert_ok(kvleaf_blocks_seq_create(blocks, NULL, &seq));
    assert_true(seq != 0);
    if (count > 0) {
        assert_ok(extend(blocks, seq, count));
        compute(blocks, seq);
    }
    return seq;
}

static inline kvleaf_seq fork_seq(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos)
{
    kvleaf_seq child = 0;
    assert_ok(kvleaf_blocks_seq_fork(blocks, seq, pos, &child));
    return child;
}

/* Walks the free list both ways; returns its length and marks its members. */
static inline int32_t walk_free_list(const kvl_free_list *list, int32_t num_blocks, bool *listed)
{
    int32_t count = 0, before = KVL_LIST_END;
    for (int32_t at = list->first; at != KVL_LIST_END; at = list->blocks[at].next) {
        assert_in_range(at, 0, num_blocks - 1);
        assert_int_equal(list->blocks[at].previous, before);
        assert_false(listed[at]);
        listed[at] = true;
        before = at;
        count++;
    }
    assert_int_equal(list->last, before);
    assert_int_equal(list->count, count);
    return count;
}

/* What a group's blocks should say, counted from the sequences and the pending copies. */
typedef struct expected_block {
    int32_t references, pins, tokens, fills;
    bool listed;
} expected_block;

static inline void expect_from_sequences(const kvleaf_blocks *blocks, int32_t group, expected_block *expected)
{
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        const int32_t *table = kvl_sequence_table(sequence, group);
        for (int32_t j = 0; sequence->next_unused == KVL_UNLISTED && j < sequence->count; j++) {
            assert_in_range(table[j], 0, blocks->groups[group].num_blocks - 1);
            expected_block *at = &expected[table[j]];
            int64_t here = sequence->extended - (int64_t)j * blocks->block_size;
            here = here > blocks->block_size ? blocks->block_size : here;
            at->tokens = here > at->tokens ? (int32_t)here : at->tokens;
            at->references++;
            for (int32_t k = 0; k < j; k++)
                assert_int_not_equal(table[k], table[j]);
        }
    }
}

/* `withheld` blocks were left out of free_order. */
static inline void check_group(const kvleaf_blocks *blocks, int32_t number, int32_t withheld)
{
    const kvl_group *group = &blocks->groups[number];
    int32_t n = group->num_blocks, used = 0, pinned = 0, outside = 0;
    int64_t wasted = 0;
    expected_block *expected = calloc((size_t)n, sizeof *expected);
    bool *listed = calloc((size_t)n, sizeof *listed);
    expect_from_sequences(blocks, number, expected);
    for (int32_t i = 0; i < group->num_copies; i++) {
        expected[group->copies[i].src].pins++;
        expected[group->copies[i].dst].fills++;
        assert_int_equal(group->blocks[group->copies[i].dst].copy, i);
    }
    int32_t available = walk_free_list(&group->free, n, listed);
    for (int32_t i = 0; i < n; i++) {
        const kvl_block *block = &group->blocks[i];
        const expected_block *e = &expected[i];
        assert_int_equal(block->references, e->references);
        assert_int_equal(kvleaf_blocks_refcount(blocks, number, i), e->references);
        assert_int_equal(block->pins, e->pins);
        assert_int_equal(e->fills, block->copy != KVL_NO_COPY);
        assert_true(e->pins == 0 || e->fills == 0);
        assert_true(e->fills == 0 || e->references > 0);
        assert_int_equal(block->tails, 0);
        assert_int_equal(block->tail_tokens, 0);
        if (listed[i]) {
            assert_true(e->references == 0 && e->pins == 0);
            continue;
        }
        used++;
        pinned += e->references == 0 && e->pins > 0;
        outside += e->references == 0 && e->pins == 0;
        wasted += e->references || e->pins ? blocks->block_size - e->tokens : 0;
    }
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvleaf_blocks_query_group(blocks, number, &stats));
    assert_int_equal(outside, withheld);
    assert_int_equal(stats.total, n);
    assert_int_equal(stats.used, used);
    assert_int_equal(stats.free, available);
    assert_int_equal(stats.cached, 0);
    assert_int_equal(stats.total, stats.used + stats.cached + stats.free);
    assert_int_equal(stats.pinned, pinned);
    assert_int_equal(stats.slots_wasted, wasted);
    free(expected);
    free(listed);
}

/* What the parts of a manager must say of each other at all times. `withheld` blocks were left out of free_order. */
static inline void check_blocks(const kvleaf_blocks *blocks, int32_t withheld)
{
    int32_t live = 0;
    int64_t tokens = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        if (sequence->next_unused != KVL_UNLISTED)
            continue;
        live++;
        tokens += sequence->extended;
        assert_true(0 <= sequence->committed && sequence->committed <= sequence->planned &&
                    sequence->planned <= sequence->extended);
        assert_int_equal(sequence->count, (sequence->extended + blocks->block_size - 1) / blocks->block_size);
    }
    kvleaf_blocks_stats all = stats_of(blocks), sum = {.struct_size = sizeof sum};
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        kvleaf_blocks_stats part = {.struct_size = sizeof part};
        check_group(blocks, i, withheld);
        assert_ok(kvleaf_blocks_query_group(blocks, i, &part));
        sum.total += part.total;
        sum.used += part.used;
        sum.cached += part.cached;
        sum.free += part.free;
        sum.pinned += part.pinned;
        sum.slots_wasted += part.slots_wasted;
        sum.copies += part.copies;
        assert_int_equal(part.sequences, live);
        assert_int_equal(part.tokens, tokens);
    }
    assert_int_equal(all.total, sum.total);
    assert_int_equal(all.used, sum.used);
    assert_int_equal(all.cached, sum.cached);
    assert_int_equal(all.free, sum.free);
    assert_int_equal(all.pinned, sum.pinned);
    assert_int_equal(all.slots_wasted, sum.slots_wasted);
    assert_int_equal(all.copies, sum.copies);
    assert_int_equal(all.sequences, live);
    assert_int_equal(all.tokens, tokens);
}

#endif
