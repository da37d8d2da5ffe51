/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks_pair.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void pair_note(blocks_pair *pair, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(pair->notes[pair->operations++ % PAIR_NOTES], PAIR_NOTE_SIZE, format, arguments);
    va_end(arguments);
}

void pair_wrong(const blocks_pair *pair, const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "after operation %lld of seed %llu: ", (long long)pair->operations, (unsigned long long)pair->seed);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\nlast error: %s\nthe last operations:\n", kvleaf_last_error()->message);
    int64_t first = pair->operations > PAIR_NOTES ? pair->operations - PAIR_NOTES : 0;
    for (int64_t i = first; i < pair->operations; i++)
        fprintf(stderr, "  %lld %s\n", (long long)i + 1, pair->notes[i % PAIR_NOTES]);
    abort();
}

/* Whether two counts are one. */
static void same(const blocks_pair *pair, const char *what, int32_t at, int64_t got, int64_t expected)
{
    if (got != expected)
        pair_wrong(pair, "%s of %d is %lld, not %lld", what, at, (long long)got, (long long)expected);
}

static void asked(const blocks_pair *pair, const char *call, kvleaf_status status)
{
    if (status)
        pair_wrong(pair, "%s answers %s", call, kvleaf_status_name(status));
}

static void compare_table(const blocks_pair *pair, int32_t at, int32_t group, const model_counts *counts,
                          kvleaf_seq_info *info)
{
    const model_sequence *s = &pair->m.sequences[at];
    int32_t table[MODEL_BLOCKS], count = -1;
    asked(pair, "seq_table",
          kvleaf_blocks_seq_table(pair->real, pair->handles[at], group, table, MODEL_BLOCKS, &count));
    same(pair, "the number of blocks of sequence", at, count, s->count);
    for (int32_t i = 0; i < count; i++) {
        if (table[i] != s->table[group][i])
            pair_wrong(pair, "sequence %d has block %d, not %d, at %d in group %d", at, table[i], s->table[group][i], i,
                       group);
        if (table[i] == MODEL_NONE)
            continue;
        info->blocks_shared += counts->holders[table[i]] > 1;
        info->blocks_unique += counts->holders[table[i]] == 1;
    }
    for (int64_t p = 0; p < s->committed; p++) {
        int32_t block = table[p / pair->m.p.block_size];
        if (block != MODEL_NONE && model_read(&pair->m, group, block, p) != s->tokens[p].content)
            pair_wrong(pair, "token %lld of sequence %d is not in block %d of group %d", (long long)p, at, block,
                       group);
    }
}

/* Of the known tokens whose blocks are there. */
static void compare_ids(const blocks_pair *pair, int32_t at)
{
    const model_sequence *s = &pair->m.sequences[at];
    int32_t ids[MODEL_TOKENS], gone = 0;
    int64_t known = model_known(s);
    while (gone < s->count && s->table[pair->m.primary][gone] == MODEL_NONE)
        gone++;
    int64_t first = (int64_t)gone * pair->m.p.block_size;
    if (s->planned > s->committed || first >= known)
        return;
    asked(pair, "seq_ids", kvleaf_blocks_seq_ids(pair->real, pair->handles[at], first, ids, known - first));
    for (int64_t i = first; i < known; i++)
        if (ids[i - first] != s->tokens[i].id)
            pair_wrong(pair, "token %d of sequence %d has id %d, not %d", (int)i, at, ids[i - first], s->tokens[i].id);
}

static void compare_sequence(const blocks_pair *pair, int32_t at, const model_counts *counts)
{
    const model_sequence *s = &pair->m.sequences[at];
    kvleaf_seq_info info = {.struct_size = sizeof info}, counted = {0};
    asked(pair, "seq_query", kvleaf_blocks_seq_query(pair->real, pair->handles[at], &info));
    same(pair, "committed", at, info.committed, s->committed);
    same(pair, "planned", at, info.planned, s->planned);
    same(pair, "extended", at, info.extended, s->extended);
    same(pair, "num_blocks", at, info.num_blocks, s->count);
    same(pair, "user", at, (int64_t)info.user, (int64_t)s->user);
    same(pair, "salt", at, (int64_t)info.salt, (int64_t)s->terms.salt);
    same(pair, "cached", at, info.cached, s->cached);
    same(pair, "known", at, info.known, model_known(s));
    same(pair, "peak_blocks", at, info.peak_blocks, s->peak);
    same(pair, "swapped", at, info.swapped, s->swapped);
    if (!s->swapped)
        compare_ids(pair, at);
    for (int32_t group = 0; !s->swapped && group < pair->m.p.num_groups; group++)
        compare_table(pair, at, group, &counts[group], &counted);
    same(pair, "blocks_unique", at, info.blocks_unique, counted.blocks_unique);
    same(pair, "blocks_shared", at, info.blocks_shared, counted.blocks_shared);
}

static void compare_stats(const blocks_pair *pair, int32_t group, const kvleaf_blocks_stats *got,
                          const kvleaf_blocks_stats *expected)
{
    const struct {
        const char *what;
        int64_t got, expected;
    } counts[] = {
        {"total", got->total, expected->total},
        {"used", got->used, expected->used},
        {"cached", got->cached, expected->cached},
        {"free", got->free, expected->free},
        {"pinned", got->pinned, expected->pinned},
        {"sequences", got->sequences, expected->sequences},
        {"tokens", got->tokens, expected->tokens},
        {"slots_wasted", got->slots_wasted, expected->slots_wasted},
        {"indexed", got->indexed, expected->indexed},
        {"copies", (int64_t)got->copies, (int64_t)expected->copies},
        {"swapped", got->swapped, expected->swapped},
        {"host_total", got->host_total, expected->host_total},
        {"host_used", got->host_used, expected->host_used},
        {"swapped_out", (int64_t)got->swapped_out, (int64_t)expected->swapped_out},
        {"swapped_in", (int64_t)got->swapped_in, (int64_t)expected->swapped_in},
        {"looked_up", (int64_t)got->looked_up, (int64_t)expected->looked_up},
        {"hits", (int64_t)got->hits, (int64_t)expected->hits},
        {"evictions", (int64_t)got->evictions, (int64_t)expected->evictions},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        same(pair, counts[i].what, group, counts[i].got, counts[i].expected);
    same(pair, "used + cached + free", group, (int64_t)got->used + got->cached + got->free, got->total);
}

/* Adds a group's counts to those of all; sequences and tokens are the manager's. */
static void add_stats(kvleaf_blocks_stats *all, const kvleaf_blocks_stats *one)
{
    all->total += one->total;
    all->used += one->used;
    all->cached += one->cached;
    all->free += one->free;
    all->pinned += one->pinned;
    all->slots_wasted += one->slots_wasted;
    all->indexed += one->indexed;
    all->copies += one->copies;
    all->evictions += one->evictions;
    all->host_total += one->host_total;
    all->host_used += one->host_used;
    all->swapped_out += one->swapped_out;
    all->swapped_in += one->swapped_in;
    all->swapped = one->swapped;
    all->looked_up = one->looked_up;
    all->hits = one->hits;
    all->sequences = one->sequences;
    all->tokens = one->tokens;
}

/* The order in which blocks will be handed out: the free ones, then those of a priority that are cached. */
static void compare_lists(const blocks_pair *pair, int32_t group)
{
    const kvl_group *real = &pair->real->groups[group];
    const model_group *g = &pair->m.groups[group];
    int32_t at = real->free.first;
    for (int32_t i = 0; i < g->free.count; at = real->free.blocks[at].next, i++)
        if (at != g->free.blocks[i])
            pair_wrong(pair, "block %d, not %d, is at %d of the free ones of group %d", at, g->free.blocks[i], i,
                       group);
    for (int32_t priority = 0; priority < KVL_PRIORITIES; priority++) {
        at = real->cached[priority].first;
        for (int32_t i = 0; i < g->cached.count; i++) {
            int32_t expected = g->cached.blocks[i];
            if (g->priority[expected] != priority + KVLEAF_PRIORITY_LOW)
                continue;
            if (at != expected)
                pair_wrong(pair, "block %d, not %d, is next of the cached ones of group %d and priority %d", at,
                           expected, group, priority + KVLEAF_PRIORITY_LOW);
            at = real->blocks[at].next;
        }
    }
}

/* Which entry finds which block, by the manager's own pages. */
static void compare_index(const blocks_pair *pair, int32_t group)
{
    for (int32_t block = 0; block < pair->m.p.groups[group].num_blocks; block++) {
        int32_t got = pair->real->groups[group].blocks[block].entry, expected = model_entry_of(&pair->m, group, block);
        if (got != expected)
            pair_wrong(pair, "block %d of group %d is found by entry %d, not %d", block, group, got, expected);
    }
}

static void compare_group(const blocks_pair *pair, int32_t group, const model_counts *counts, kvleaf_blocks_stats *all)
{
    kvleaf_blocks_stats got = {.struct_size = sizeof got}, expected;
    asked(pair, "query_group", kvleaf_blocks_query_group(pair->real, group, &got));
    model_stats(&pair->m, group, counts, &expected);
    compare_stats(pair, group, &got, &expected);
    add_stats(all, &expected);
    compare_lists(pair, group);
    compare_index(pair, group);
    for (int32_t block = -1; block <= expected.total; block++)
        same(pair, "the reference count of block", block, kvleaf_blocks_refcount(pair->real, group, block),
             block < 0 || block == expected.total ? -1 : counts->holders[block]);
}

void pair_compare(const blocks_pair *pair)
{
    kvleaf_blocks_stats got = {.struct_size = sizeof got}, expected = {.struct_size = sizeof expected};
    model_counts counts[MODEL_GROUPS];
    for (int32_t group = 0; group < pair->m.p.num_groups; group++) {
        model_count(&pair->m, group, &counts[group]);
        compare_group(pair, group, &counts[group], &expected);
    }
    asked(pair, "query", kvleaf_blocks_query(pair->real, &got));
    compare_stats(pair, -1, &got, &expected);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        if (pair->m.sequences[i].live)
            compare_sequence(pair, i, counts);
}
