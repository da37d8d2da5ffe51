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
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, table, 256, &count));
    assert_in_range(index, 0, count - 1);
    return table[index];
}

static inline void assert_table(const kvleaf_blocks *blocks, kvleaf_seq seq, const int32_t *expected, int32_t count)
{
    int32_t table[256], got = -1;
    assert_ok(kvleaf_blocks_seq_table(blocks, seq, table, 256, &got));
    assert_int_equal(got, count);
    for (int32_t i = 0; i < count; i++)
        assert_int_equal(table[i], expected[i]);
}

static inline int32_t pending(const kvleaf_blocks *blocks, const kvleaf_block_copy **copies)
{
    const kvleaf_block_copy *list;
    int32_t count = -1;
    assert_ok(kvleaf_blocks_copies(blocks, copies ? copies : &list, &count));
    return count;
}

/* Makes all pending copies count as made. */
static inline void make_copies(kvleaf_blocks *blocks)
{
    assert_ok(kvleaf_blocks_copies_done(blocks, pending(blocks, NULL)));
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

/* What the parts of a manager must say of each other at all times. `withheld` blocks were left out of free_order. */
static inline void check_blocks(const kvleaf_blocks *blocks, int32_t withheld)
{
    int32_t n = blocks->num_blocks, live = 0, used = 0, pinned = 0, outside = 0;
    int32_t *references = calloc((size_t)n, sizeof *references), *pins = calloc((size_t)n, sizeof *pins);
    int32_t *tokens = calloc((size_t)n, sizeof *tokens), *fills = calloc((size_t)n, sizeof *fills);
    bool *listed = calloc((size_t)n, sizeof *listed);
    int64_t total_tokens = 0, wasted = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        if (sequence->next_unused != KVL_UNLISTED)
            continue;
        live++;
        total_tokens += sequence->extended;
        assert_true(0 <= sequence->committed && sequence->committed <= sequence->planned &&
                    sequence->planned <= sequence->extended);
        assert_int_equal(sequence->count, (sequence->extended + blocks->block_size - 1) / blocks->block_size);
        for (int32_t j = 0; j < sequence->count; j++) {
            int32_t id = sequence->table[j];
            assert_in_range(id, 0, n - 1);
            references[id]++;
            int64_t here = sequence->extended - (int64_t)j * blocks->block_size;
            here = here > blocks->block_size ? blocks->block_size : here;
            tokens[id] = here > tokens[id] ? (int32_t)here : tokens[id];
            for (int32_t k = 0; k < j; k++)
                assert_int_not_equal(sequence->table[k], id);
        }
    }
    for (int32_t i = 0; i < blocks->num_copies; i++) {
        pins[blocks->copies[i].src]++;
        fills[blocks->copies[i].dst]++;
        assert_int_equal(blocks->blocks[blocks->copies[i].dst].copy, i);
    }
    int32_t available = walk_free_list(&blocks->free, n, listed);
    for (int32_t i = 0; i < n; i++) {
        const kvl_block *block = &blocks->blocks[i];
        assert_int_equal(block->references, references[i]);
        assert_int_equal(kvleaf_blocks_refcount(blocks, i), references[i]);
        assert_int_equal(block->pins, pins[i]);
        assert_int_equal(fills[i], block->copy != KVL_NO_COPY);
        assert_true(pins[i] == 0 || fills[i] == 0);
        assert_true(fills[i] == 0 || references[i] > 0);
        assert_int_equal(block->tails, 0);
        assert_int_equal(block->tail_tokens, 0);
        if (listed[i]) {
            assert_true(references[i] == 0 && pins[i] == 0);
            continue;
        }
        used++;
        pinned += references[i] == 0 && pins[i] > 0;
        outside += references[i] == 0 && pins[i] == 0;
        wasted += references[i] || pins[i] ? blocks->block_size - tokens[i] : 0;
    }
    kvleaf_blocks_stats stats = stats_of(blocks);
    assert_int_equal(outside, withheld);
    assert_int_equal(stats.total, n);
    assert_int_equal(stats.used, used);
    assert_int_equal(stats.free, available);
    assert_int_equal(stats.cached, 0);
    assert_int_equal(stats.total, stats.used + stats.cached + stats.free);
    assert_int_equal(stats.pinned, pinned);
    assert_int_equal(stats.sequences, live);
    assert_int_equal(stats.tokens, total_tokens);
    assert_int_equal(stats.slots_wasted, wasted);
    free(references);
    free(pins);
    free(tokens);
    free(fills);
    free(listed);
}

#endif
