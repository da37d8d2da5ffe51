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

#include "blocks/index.h"

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

/* Extends by tokens that are known; returns how many of them were found. */
static inline int64_t extend_ids(kvleaf_blocks *blocks, kvleaf_seq seq, const int32_t *ids, int64_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    int64_t cached = -1;
    assert_ok(kvleaf_blocks_seq_extend(blocks, seq, &tokens, &cached));
    return cached;
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

/* A new sequence with these committed tokens; *cached (may be NULL) of them were found. */
static inline kvleaf_seq make_prompt(kvleaf_blocks *blocks, const kvleaf_seq_params *params, const int32_t *ids,
                                     int64_t count, int64_t *cached)
{
    kvleaf_seq seq = 0;
    assert_ok(kvleaf_blocks_seq_create(blocks, params, &seq));
    int64_t found = extend_ids(blocks, seq, ids, count);
    if (cached)
        *cached = found;
    compute(blocks, seq);
    return seq;
}

/* What a new sequence of these params would find. */
static inline int64_t match_of(const kvleaf_blocks *blocks, const kvleaf_seq_params *params, const int32_t *ids,
                               int64_t count)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    int64_t matched = -1;
    assert_ok(kvleaf_blocks_prefix_match(blocks, params, &tokens, &matched));
    return matched;
}

static inline kvleaf_seq fork_seq(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos)
{
    kvleaf_seq child = 0;
    assert_ok(kvleaf_blocks_seq_fork(blocks, seq, pos, &child));
    return child;
}

/* Walks a list both ways; returns its length and marks its members. */
static inline int32_t walk_list(const kvl_block_list *list, int32_t num_blocks, bool *listed)
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
    int32_t references, pins, holds, tokens, fills;
} expected_block;

static inline void expect_from_sequences(const kvleaf_blocks *blocks, int32_t group, expected_block *expected)
{
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        const int32_t *table = kvl_sequence_table(sequence, group);
        if (sequence->next_unused != KVL_UNLISTED || sequence->residence == KVL_SWAPPED)
            continue;
        for (int32_t j = 0; j < sequence->first_held[group]; j++)
            assert_int_equal(table[j], KVLEAF_NO_BLOCK);
        for (int32_t j = sequence->first_held[group]; j < sequence->count; j++) {
            assert_in_range(table[j], 0, blocks->groups[group].num_blocks - 1);
            expected_block *at = &expected[table[j]];
            int64_t here = sequence->extended - (int64_t)j * blocks->block_size;
            here = here > blocks->block_size ? blocks->block_size : here;
            at->tokens = here > at->tokens ? (int32_t)here : at->tokens;
            at->references++;
            for (int32_t k = sequence->first_held[group]; k < j; k++)
                assert_int_not_equal(table[k], table[j]);
        }
    }
}

/* Pins hold their block, and what is before it in the index. */
static inline void expect_from_pins(const kvleaf_blocks *blocks, int32_t group, expected_block *expected)
{
    for (int32_t g = 0; g < blocks->num_groups; g++) {
        for (int32_t i = 0; i < blocks->groups[g].num_blocks; i++) {
            const kvl_block *block = &blocks->groups[g].blocks[i];
            int32_t at = block->entry;
            if (g == group)
                expected[i].holds += block->user_pins;
            if (g == blocks->primary && at != KVL_NO_ENTRY)
                at = blocks->index.entries[at].parent;
            for (; group == blocks->primary && at != KVL_NO_ENTRY; at = blocks->index.entries[at].parent)
                expected[at].holds += block->user_pins;
        }
    }
}

/* The lists of a group, and that each listed block is in the right one. */
static inline void check_lists(const kvleaf_blocks *blocks, int32_t number, bool *listed)
{
    const kvl_group *group = &blocks->groups[number];
    int32_t cached = 0;
    walk_list(&group->free, group->num_blocks, listed);
    for (int32_t i = 0; i < group->num_blocks; i++)
        assert_true(!listed[i] || group->blocks[i].entry == KVL_NO_ENTRY);
    for (int32_t priority = 0; priority < KVL_PRIORITIES; priority++) {
        cached += walk_list(&group->cached[priority], group->num_blocks, listed);
        for (int32_t at = group->cached[priority].first; at != KVL_LIST_END; at = group->blocks[at].next) {
            assert_true(group->blocks[at].entry != KVL_NO_ENTRY);
            assert_int_equal(group->blocks[at].priority, priority + KVLEAF_PRIORITY_LOW);
        }
    }
    assert_int_equal(group->num_cached, cached);
}

static inline void check_block(const kvl_block *block, const expected_block *e, bool listed)
{
    assert_int_equal(block->references, e->references);
    assert_int_equal(block->pins, e->pins);
    assert_int_equal(block->holds, e->holds);
    assert_int_equal(e->fills, block->copy != KVL_NO_COPY);
    assert_true(e->pins == 0 || e->fills == 0);
    assert_true(e->fills == 0 || e->references > 0);
    assert_true(e->fills == 0 || block->entry == KVL_NO_ENTRY);
    assert_int_equal(block->tails, 0);
    assert_int_equal(block->tail_tokens, 0);
    assert_true(!listed || (e->references == 0 && e->pins == 0 && e->holds == 0));
}

/* `withheld` blocks were left out of free_order. */
static inline void check_group(const kvleaf_blocks *blocks, int32_t number, int32_t withheld)
{
    const kvl_group *group = &blocks->groups[number];
    int32_t n = group->num_blocks, used = 0, pinned = 0, outside = 0, indexed = 0;
    int64_t wasted = 0;
    expected_block *expected = calloc((size_t)n, sizeof *expected);
    bool *listed = calloc((size_t)n, sizeof *listed);
    expect_from_sequences(blocks, number, expected);
    expect_from_pins(blocks, number, expected);
    for (int32_t i = 0; i < group->num_copies; i++) {
        expected[group->copies[i].src].pins++;
        expected[group->copies[i].dst].fills++;
        assert_int_equal(group->blocks[group->copies[i].dst].copy, i);
    }
    check_lists(blocks, number, listed);
    for (int32_t i = 0; i < n; i++) {
        const expected_block *e = &expected[i];
        bool held = e->pins > 0 || e->holds > 0;
        check_block(&group->blocks[i], e, listed[i]);
        assert_int_equal(kvleaf_blocks_refcount(blocks, number, i), e->references);
        indexed += group->blocks[i].entry != KVL_NO_ENTRY;
        used += !listed[i];
        pinned += e->references == 0 && held;
        outside += !listed[i] && e->references == 0 && !held;
        wasted += e->references || held ? blocks->block_size - e->tokens : 0;
    }
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvleaf_blocks_query_group(blocks, number, &stats));
    assert_int_equal(outside, withheld);
    assert_int_equal(stats.total, n);
    assert_int_equal(stats.used, used);
    assert_int_equal(stats.cached, group->num_cached);
    assert_int_equal(stats.free, group->free.count);
    assert_int_equal(stats.total, stats.used + stats.cached + stats.free);
    assert_int_equal(stats.indexed, indexed);
    assert_int_equal(stats.pinned, pinned);
    assert_int_equal(stats.slots_wasted, wasted);
    free(expected);
    free(listed);
}

/* Host blocks: those of the swapped sequences, and links that both sides know. */
static inline void check_hosts(const kvleaf_blocks *blocks, int32_t number)
{
    const kvl_group *group = &blocks->groups[number];
    int32_t *references = calloc((size_t)group->num_hosts + 1, sizeof *references), used = 0, unused = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        if (sequence->next_unused != KVL_UNLISTED || sequence->residence != KVL_SWAPPED)
            continue;
        for (int32_t j = sequence->first_held[number]; j < sequence->count; j++) {
            assert_in_range(kvl_sequence_table(sequence, number)[j], 0, group->num_hosts - 1);
            references[kvl_sequence_table(sequence, number)[j]]++;
        }
    }
    for (int32_t i = 0; i < group->num_hosts; i++) {
        const kvl_host_block *host = &group->hosts[i];
        assert_int_equal(host->references, references[i]);
        assert_true(host->block == KVLEAF_NO_BLOCK || (references[i] > 0 && group->blocks[host->block].host == i));
        used += references[i] > 0;
    }
    for (int32_t i = 0; i < group->num_blocks; i++)
        if (group->blocks[i].host != KVL_NO_HOST)
            assert_int_equal(group->hosts[group->blocks[i].host].block, i);
    for (int32_t at = group->first_unused_host; at != KVL_NO_HOST; at = group->hosts[at].next_unused)
        unused++;
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    assert_ok(kvleaf_blocks_query_group(blocks, number, &stats));
    assert_int_equal(used + unused, group->num_hosts);
    assert_int_equal(stats.host_total, group->num_hosts);
    assert_int_equal(stats.host_used, used);
    free(references);
}

/* An entry is where it must be found, once, and knows its neighbours and blocks. */
static inline void check_entry(const kvleaf_blocks *blocks, int32_t at)
{
    const kvl_entry *entries = blocks->index.entries, *entry = &entries[at];
    const kvl_key key = {entry->parent, entry->salt, &blocks->contents[at], kvl_block_ids(blocks, at)};
    int32_t children = 0;
    assert_int_equal(kvl_index_find(blocks, &key), at);
    int32_t in_bucket = blocks->index.buckets[entry->hash[0] & (uint64_t)(blocks->index.num_buckets - 1)];
    while (in_bucket != at && in_bucket != KVL_NO_ENTRY)
        in_bucket = entries[in_bucket].next_in_bucket;
    assert_int_equal(in_bucket, at);
    for (int32_t i = 0; i < blocks->block_size; i++)
        assert_true(key.ids[i] != KVL_UNKNOWN);
    if (entry->parent != KVL_NO_ENTRY) {
        assert_true(entries[entry->parent].serial > 0 && entries[entry->parent].serial < entry->serial);
        assert_int_equal(entry->depth, entries[entry->parent].depth + 1);
    }
    for (int32_t child = entry->first_child, before = KVL_NO_ENTRY; child != KVL_NO_ENTRY;
         before = child, child = entries[child].next_sibling, children++) {
        assert_int_equal(entries[child].parent, at);
        assert_int_equal(entries[child].previous_sibling, before);
    }
    assert_int_equal(children, entry->children);
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t block = kvl_index_block(blocks, at, i);
        assert_true(block == KVLEAF_NO_BLOCK || blocks->groups[i].blocks[block].entry == at);
    }
    assert_int_equal(kvl_index_block(blocks, at, blocks->primary), at);
}

static inline void check_index(const kvleaf_blocks *blocks)
{
    int32_t entries = 0, walked = 0;
    if (!blocks->index.entries)
        return;
    for (int32_t i = 0; i < blocks->groups[blocks->primary].num_blocks; i++) {
        assert_int_equal(blocks->index.entries[i].serial > 0,
                         blocks->groups[blocks->primary].blocks[i].entry != KVL_NO_ENTRY);
        if (blocks->index.entries[i].serial == 0)
            continue;
        entries++;
        check_entry(blocks, i);
    }
    for (int32_t i = 0; i < blocks->num_groups; i++)
        for (int32_t j = 0; j < blocks->groups[i].num_blocks; j++)
            if (blocks->groups[i].blocks[j].entry != KVL_NO_ENTRY)
                assert_int_equal(kvl_index_block(blocks, blocks->groups[i].blocks[j].entry, i), j);
    for (int32_t at = kvl_index_next(blocks, KVL_NO_ENTRY); at != KVL_NO_ENTRY; at = kvl_index_next(blocks, at))
        walked++;
    assert_int_equal(walked, entries);
}

/* What the parts of a manager must say of each other at all times. `withheld` blocks were left out of free_order. */
static inline void check_blocks(const kvleaf_blocks *blocks, int32_t withheld)
{
    int32_t live = 0, swapped = 0;
    int64_t tokens = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        const kvl_sequence *sequence = &blocks->sequences[i];
        if (sequence->next_unused != KVL_UNLISTED)
            continue;
        live++;
        swapped += sequence->residence == KVL_SWAPPED;
        tokens += sequence->extended;
        assert_true(0 <= sequence->committed && sequence->committed <= sequence->planned &&
                    sequence->planned <= sequence->extended);
        assert_int_equal(sequence->count, (sequence->extended + blocks->block_size - 1) / blocks->block_size);
    }
    check_index(blocks);
    kvleaf_blocks_stats all = stats_of(blocks), sum = {.struct_size = sizeof sum};
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        kvleaf_blocks_stats part = {.struct_size = sizeof part};
        check_group(blocks, i, withheld);
        check_hosts(blocks, i);
        assert_ok(kvleaf_blocks_query_group(blocks, i, &part));
        sum.total += part.total;
        sum.used += part.used;
        sum.cached += part.cached;
        sum.free += part.free;
        sum.pinned += part.pinned;
        sum.indexed += part.indexed;
        sum.evictions += part.evictions;
        sum.swapped_out += part.swapped_out;
        sum.swapped_in += part.swapped_in;
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
    assert_int_equal(all.indexed, sum.indexed);
    assert_int_equal(all.evictions, sum.evictions);
    assert_int_equal(all.slots_wasted, sum.slots_wasted);
    assert_int_equal(all.copies, sum.copies);
    assert_int_equal(all.swapped_out, sum.swapped_out);
    assert_int_equal(all.swapped_in, sum.swapped_in);
    assert_int_equal(all.sequences, live);
    assert_int_equal(all.swapped, swapped);
    assert_int_equal(all.tokens, tokens);
}

/* Ids to take prompts from. */
static const int32_t line[64] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                                 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44,
                                 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64};

/* Destroys a sequence; what is left holds together. */
static inline void destroy(kvleaf_blocks *blocks, kvleaf_seq seq)
{
    assert_ok(kvleaf_blocks_seq_destroy(blocks, &seq));
    check_blocks(blocks, 0);
}

#endif
