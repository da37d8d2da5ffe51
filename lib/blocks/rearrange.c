/* SPDX-License-Identifier: Apache-2.0 */
/* Beam search: what live sequences hold, dealt anew. */
#include "blocks/handle.h"
#include "blocks/index.h"

#include <string.h>

/* The sequences as they were before, kept for the next call. */
static kvleaf_status reserve_before(kvleaf_blocks *blocks, int32_t n)
{
    if (n <= blocks->before_capacity)
        return KVLEAF_OK;
    kvl_sequence *before = kvl_alloc(&blocks->allocator, (size_t)n, sizeof *before);
    if (!before)
        return kvl_fail_memory((size_t)n * sizeof *before);
    kvl_free(&blocks->allocator, blocks->before);
    blocks->before = before;
    blocks->before_capacity = n;
    return KVLEAF_OK;
}

/* A second table of the sequence's own, as large as `capacity` asks for. */
static kvleaf_status reserve_spare(kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t capacity)
{
    if (capacity <= sequence->spare_capacity)
        return KVLEAF_OK;
    size_t entries = (size_t)capacity * (size_t)blocks->num_groups;
    int32_t *spare = kvl_alloc(&blocks->allocator, entries, sizeof *spare);
    if (!spare)
        return kvl_fail_memory(entries * sizeof *spare);
    kvl_free(&blocks->allocator, sequence->spare);
    sequence->spare = spare;
    sequence->spare_capacity = capacity;
    return KVLEAF_OK;
}

static kvleaf_status check(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *parents, int32_t n)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (n < 0)
        return kvl_fail_range("n", n, 0, INT32_MAX);
    if (n > 0 && (!seqs || !parents))
        return kvl_fail_null(seqs ? "parents" : "seqs");
    blocks->mark++;
    for (int32_t i = 0; i < n; i++) {
        kvl_sequence *sequence = NULL;
        kvleaf_status status = kvl_sequence_find_once(blocks, seqs, i, &sequence);
        if (!status)
            status = kvl_sequence_check_idle(sequence, seqs[i]);
        if (status)
            return status;
        if (parents[i] < 0 || parents[i] >= n)
            return kvl_fail(KVLEAF_INVALID, "parents", parents[i], n - 1, "parents[%d] is %d, must be 0 .. %d", i,
                            parents[i], n - 1);
        if (sequence->extended > sequence->committed)
            return kvl_fail(KVLEAF_INVALID, "seqs", i, 0, "seqs[%d] has uncommitted tokens", i);
    }
    return KVLEAF_OK;
}

/* Where two tables of a group differ first; `shorter` where they do not. */
static int32_t first_difference(const int32_t *a, const int32_t *b, int32_t from, int32_t shorter)
{
    while (from < shorter && a[from] == b[from])
        from++;
    return from < shorter ? from : shorter;
}

/* Gives a sequence that held `old` what `parent` held. Its former table becomes the spare one. */
static void take_over(kvleaf_blocks *blocks, kvl_sequence *sequence, const kvl_sequence *old,
                      const kvl_sequence *parent)
{
    *sequence = *parent;
    sequence->params.user = old->params.user;
    sequence->table = old->spare;
    sequence->capacity = old->spare_capacity;
    sequence->spare = old->table;
    sequence->spare_capacity = old->capacity;
    sequence->generation = old->generation;
    sequence->mark = old->mark;
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t *table = kvl_sequence_table(sequence, i), first = parent->first_held[i];
        int32_t shorter = old->count < parent->count ? old->count : parent->count;
        if (parent->count > 0) /* else there may be no tables */
            memcpy(table, kvl_sequence_table(parent, i), (size_t)parent->count * sizeof *table);
        for (int32_t at = first; at < parent->count; at++)
            kvl_group_refer(blocks, i, table[at]);
        int32_t changed = first_difference(table, kvl_sequence_table(old, i), first, shorter);
        sequence->first_changed[i] = old->first_changed[i] < changed ? old->first_changed[i] : changed;
    }
    blocks->tokens += parent->extended - old->extended;
}

static void give_back(kvleaf_blocks *blocks, const kvl_sequence *old)
{
    for (int32_t i = 0; old->count > 0 && i < blocks->num_groups; i++)
        kvl_group_release(blocks, i, kvl_sequence_table(old, i) + old->first_held[i], old->count - old->first_held[i],
                          &old->params);
}

kvleaf_status kvleaf_blocks_seq_rearrange(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *parents,
                                          int32_t n)
{
    kvleaf_status status = check(blocks, seqs, parents, n);
    if (!status)
        status = reserve_before(blocks, n);
    for (int32_t i = 0; !status && i < n; i++) {
        kvl_sequence *sequence = &blocks->sequences[kvl_handle_slot_of(seqs[i])];
        int32_t capacity = blocks->sequences[kvl_handle_slot_of(seqs[parents[i]])].capacity;
        if (parents[i] != i)
            status = reserve_spare(blocks, sequence, capacity);
        blocks->before[i] = *sequence;
    }
    if (status)
        return status;
    for (int32_t i = 0; i < n; i++)
        if (parents[i] != i)
            take_over(blocks, &blocks->sequences[kvl_handle_slot_of(seqs[i])], &blocks->before[i],
                      &blocks->before[parents[i]]);
    for (int32_t i = 0; i < n; i++)
        if (parents[i] != i)
            give_back(blocks, &blocks->before[i]);
    return KVLEAF_OK;
}
