/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: handles, lengths, block tables. */
#include "blocks/blocks.h"
#include "blocks/handle.h"

#include <string.h>

#define FIRST_CAPACITY 16 /* entries of a table when it is first needed */

static int32_t min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

kvleaf_status kvl_sequence_find(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (seq == 0)
        return kvl_fail(KVLEAF_INVALID, "seq", 0, 0, "seq is 0, which is no sequence");
    int32_t slot = kvl_handle_slot_of(seq);
    if (kvl_handle_tag_of(seq) != blocks->tag || slot >= blocks->max_sequences)
        return kvl_fail(KVLEAF_FOREIGN, "seq", (int64_t)seq, 0, "seq %#llx is of another cache or block manager",
                        (unsigned long long)seq);
    kvl_sequence *sequence = &blocks->sequences[slot];
    if (sequence->next_unused != KVL_UNLISTED || sequence->generation != kvl_handle_generation_of(seq))
        return kvl_fail(KVLEAF_STALE, "seq", (int64_t)seq, 0, "seq %#llx was destroyed", (unsigned long long)seq);
    *out = sequence;
    return KVLEAF_OK;
}

/* As kvl_sequence_find; BUSY in an open step. */
static kvleaf_status find_idle(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out)
{
    kvleaf_status status = kvl_sequence_find(blocks, seq, out);
    if (!status && (*out)->planned > (*out)->committed)
        status = kvl_fail(KVLEAF_BUSY, "seq", (int64_t)seq, 0, "seq %#llx is in an open plan", (unsigned long long)seq);
    return status;
}

int32_t kvl_sequence_slot(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    return (int32_t)(sequence - blocks->sequences);
}

void kvl_sequence_uploaded(kvl_sequence *sequence, int32_t group, int32_t count)
{
    sequence->first_changed[group] = count;
}

static kvleaf_status reserve_table(kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count)
{
    if (count <= sequence->capacity)
        return KVLEAF_OK;
    int32_t capacity = sequence->capacity ? sequence->capacity : FIRST_CAPACITY;
    while (capacity < count)
        capacity = capacity > INT32_MAX / 2 ? INT32_MAX : capacity * 2;
    capacity = min32(capacity, blocks->max_blocks_per_seq);
    size_t entries = (size_t)capacity * (size_t)blocks->num_groups;
    int32_t *table = kvl_alloc(&blocks->allocator, entries, sizeof *table);
    if (!table)
        return kvl_fail_memory(entries * sizeof *table);
    for (int32_t i = 0; sequence->count > 0 && i < blocks->num_groups; i++)
        memcpy(table + (size_t)i * (size_t)capacity, kvl_sequence_table(sequence, i),
               (size_t)sequence->count * sizeof *table);
    kvl_free(&blocks->allocator, sequence->table);
    sequence->table = table;
    sequence->capacity = capacity;
    return KVLEAF_OK;
}

/* The slot the next sequence gets; it stays unused until start_sequence. */
static kvleaf_status next_slot(kvleaf_blocks *blocks, kvl_sequence **out)
{
    if (blocks->first_unused == KVL_LIST_END)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_sequences", (int64_t)blocks->live + 1, blocks->max_sequences,
                        "%d sequences are live, which is max_sequences", blocks->max_sequences);
    *out = &blocks->sequences[blocks->first_unused];
    return KVLEAF_OK;
}

static kvleaf_seq start_sequence(kvleaf_blocks *blocks, kvl_sequence *sequence, uint64_t user)
{
    blocks->first_unused = sequence->next_unused;
    blocks->live++;
    sequence->next_unused = KVL_UNLISTED;
    sequence->committed = sequence->planned = sequence->extended = 0;
    sequence->count = 0;
    memset(sequence->first_changed, 0, (size_t)blocks->num_groups * sizeof *sequence->first_changed);
    sequence->user = user;
    return kvl_handle(blocks->tag, sequence->generation, kvl_sequence_slot(blocks, sequence));
}

kvleaf_status kvleaf_blocks_seq_create(kvleaf_blocks *blocks, const kvleaf_seq_params *params, kvleaf_seq *out)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (!out)
        return kvl_fail_null("out");
    kvleaf_status status = KVLEAF_OK;
    if (params)
        status = kvl_check_struct(params, params->struct_size, sizeof *params, "kvleaf_seq_params");
    kvl_sequence *sequence = NULL;
    if (!status)
        status = next_slot(blocks, &sequence);
    if (status)
        return status;
    *out = start_sequence(blocks, sequence, params ? params->user : 0);
    return KVLEAF_OK;
}

/* What an extension by some tokens needs. */
typedef struct growth {
    int32_t count; /* entries of each table afterwards */
    int32_t slot;  /* where the first new token goes in the last block of now; 0 = it needs a new one */
    struct {
        bool copy;      /* that block has to be copied first */
        int32_t blocks; /* to take, the copy included */
    } groups[KVL_MAX_GROUPS];
} growth;

/* False where it is beyond max_blocks_per_seq. */
static bool plan_growth(const kvleaf_blocks *blocks, const kvl_sequence *sequence, int64_t tokens, growth *out)
{
    int64_t most = (int64_t)blocks->max_blocks_per_seq * blocks->block_size;
    if (tokens > most - sequence->extended)
        return false;
    out->count = (int32_t)kvl_ceil_div(sequence->extended + tokens, blocks->block_size);
    out->slot = (int32_t)(sequence->extended % blocks->block_size);
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        const int32_t *table = kvl_sequence_table(sequence, i);
        out->groups[i].copy = tokens > 0 && out->slot > 0 &&
                              kvl_group_must_copy(&blocks->groups[i], table[sequence->count - 1], out->slot);
        out->groups[i].blocks = out->count - sequence->count + (out->groups[i].copy ? 1 : 0);
    }
    return true;
}

/* A group without the blocks that are needed, or -1. */
static int32_t lacking_group(const kvleaf_blocks *blocks, const growth *growth)
{
    for (int32_t i = 0; i < blocks->num_groups; i++)
        if (growth->groups[i].blocks > kvl_group_available(&blocks->groups[i]))
            return i;
    return -1;
}

static void add_entry(kvl_sequence *sequence, int32_t group, int32_t index, int32_t block)
{
    kvl_sequence_table(sequence, group)[index] = block;
    sequence->first_changed[group] = min32(sequence->first_changed[group], index);
}

static void grow(kvleaf_blocks *blocks, kvl_sequence *sequence, const growth *growth)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        if (growth->groups[i].copy) {
            /* Only committed tokens are worth copying; whatever lies behind them is still to be computed. */
            int32_t last = sequence->count - 1, block = kvl_sequence_table(sequence, i)[last];
            int32_t slots = (int32_t)(sequence->committed - (int64_t)last * blocks->block_size);
            add_entry(sequence, i, last, kvl_group_copy_on_write(&blocks->groups[i], block, slots));
        }
        for (int32_t at = sequence->count; at < growth->count; at++)
            add_entry(sequence, i, at, kvl_group_take(&blocks->groups[i]));
    }
    sequence->count = growth->count;
}

kvleaf_status kvleaf_blocks_seq_extend(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_tokens *tokens,
                                       int64_t *cached)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = find_idle(blocks, seq, &sequence);
    if (!status)
        status = kvl_check_struct(tokens, tokens ? tokens->struct_size : 0, sizeof *tokens, "kvleaf_tokens");
    if (status)
        return status;
    if (tokens->count < 0)
        return kvl_fail_range("count", tokens->count, 0, INT64_MAX);
    growth growth;
    if (!plan_growth(blocks, sequence, tokens->count, &growth)) {
        int64_t most = (int64_t)blocks->max_blocks_per_seq * blocks->block_size;
        return kvl_fail(KVLEAF_TOO_SMALL, "count", tokens->count, most - sequence->extended,
                        "%lld more tokens behind %lld, a sequence may have %lld", (long long)tokens->count,
                        (long long)sequence->extended, (long long)most);
    }
    int32_t lacking = lacking_group(blocks, &growth);
    if (lacking >= 0) {
        int32_t needed = growth.groups[lacking].blocks, there = kvl_group_available(&blocks->groups[lacking]);
        return kvl_fail(KVLEAF_NO_BLOCKS, "count", needed, there,
                        "%lld more tokens need %d blocks of group %d, %d are available", (long long)tokens->count,
                        needed, lacking, there);
    }
    status = reserve_table(blocks, sequence, growth.count);
    if (status)
        return status;
    grow(blocks, sequence, &growth);
    sequence->extended += tokens->count;
    blocks->tokens += tokens->count;
    if (cached)
        *cached = 0;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_can_extend(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count, bool *out)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (status)
        return status;
    if (!out)
        return kvl_fail_null("out");
    if (count < 0)
        return kvl_fail_range("count", count, 0, INT64_MAX);
    growth growth;
    *out = plan_growth(blocks, sequence, count, &growth) && lacking_group(blocks, &growth) < 0;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_fork(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos, kvleaf_seq *child)
{
    kvl_sequence *parent = NULL, *made = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &parent);
    if (status)
        return status;
    if (!child)
        return kvl_fail_null("child");
    if (pos < 0 || pos > parent->committed)
        return kvl_fail_range("pos", pos, 0, parent->committed);
    int32_t count = (int32_t)kvl_ceil_div(pos, blocks->block_size);
    status = next_slot(blocks, &made);
    if (!status)
        status = reserve_table(blocks, made, count);
    if (status)
        return status;
    *child = start_sequence(blocks, made, parent->user);
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        const int32_t *from = kvl_sequence_table(parent, i);
        int32_t *to = kvl_sequence_table(made, i);
        for (int32_t at = 0; at < count; at++) {
            to[at] = from[at];
            blocks->groups[i].blocks[to[at]].references++;
        }
    }
    made->count = count;
    made->committed = made->planned = made->extended = pos;
    blocks->tokens += pos;
    return KVLEAF_OK;
}

kvleaf_status kvl_sequence_cut(kvleaf_blocks *blocks, kvl_sequence *sequence, int64_t length)
{
    int32_t keep = (int32_t)kvl_ceil_div(length, blocks->block_size);
    int32_t gone = sequence->count - keep;
    for (int32_t i = 0; gone > 0 && i < blocks->num_groups; i++) {
        kvleaf_status status =
            kvl_group_check_release(&blocks->groups[i], kvl_sequence_table(sequence, i) + keep, gone);
        if (status)
            return status;
    }
    for (int32_t i = 0; gone > 0 && i < blocks->num_groups; i++)
        kvl_group_release(&blocks->groups[i], kvl_sequence_table(sequence, i) + keep, gone);
    blocks->tokens -= sequence->extended - length;
    sequence->count = keep;
    sequence->extended = length;
    if (sequence->committed > length)
        sequence->committed = length;
    sequence->planned = sequence->committed;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_truncate(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t length)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = find_idle(blocks, seq, &sequence);
    if (status)
        return status;
    if (length < 0 || length > sequence->extended)
        return kvl_fail_range("length", length, 0, sequence->extended);
    return kvl_sequence_cut(blocks, sequence, length);
}

kvleaf_status kvleaf_blocks_seq_destroy(kvleaf_blocks *blocks, kvleaf_seq *seq)
{
    if (!seq)
        return kvl_fail_null("seq");
    kvl_sequence *sequence = NULL;
    kvleaf_status status = find_idle(blocks, *seq, &sequence);
    if (!status)
        status = kvl_sequence_cut(blocks, sequence, 0);
    if (status)
        return status;
    sequence->generation = kvl_handle_next(sequence->generation);
    sequence->next_unused = blocks->first_unused;
    blocks->first_unused = kvl_sequence_slot(blocks, sequence);
    blocks->live--;
    *seq = 0;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_table(const kvleaf_blocks *blocks, kvleaf_seq seq, int32_t group, int32_t *table,
                                      int32_t capacity, int32_t *count)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (!status)
        status = kvl_group_check(blocks, group);
    if (status)
        return status;
    if (!count)
        return kvl_fail_null("count");
    if (capacity < 0)
        return kvl_fail_range("capacity", capacity, 0, INT32_MAX);
    if (!table && capacity > 0)
        return kvl_fail_null("table");
    *count = sequence->count;
    if (capacity < sequence->count)
        return kvl_fail(KVLEAF_TOO_SMALL, "capacity", capacity, sequence->count,
                        "capacity is %d, the table has %d blocks", capacity, sequence->count);
    if (sequence->count > 0)
        memcpy(table, kvl_sequence_table(sequence, group), (size_t)sequence->count * sizeof *table);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_query(const kvleaf_blocks *blocks, kvleaf_seq seq, kvleaf_seq_info *info)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (!status)
        status = kvl_check_struct(info, info ? info->struct_size : 0, sizeof *info, "kvleaf_seq_info");
    if (status)
        return status;
    info->committed = sequence->committed;
    info->planned = sequence->planned;
    info->extended = sequence->extended;
    info->num_blocks = sequence->count;
    info->blocks_shared = 0;
    for (int32_t i = 0; i < blocks->num_groups; i++)
        for (int32_t at = 0; at < sequence->count; at++)
            info->blocks_shared += blocks->groups[i].blocks[kvl_sequence_table(sequence, i)[at]].references > 1;
    info->blocks_unique = sequence->count * blocks->num_groups - info->blocks_shared;
    info->user = sequence->user;
    return KVLEAF_OK;
}
