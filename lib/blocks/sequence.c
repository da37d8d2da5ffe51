/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: handles, lengths, block tables. */
#include "blocks/handle.h"
#include "blocks/index.h"

#include <string.h>

#define FIRST_CAPACITY 16 /* entries of a table when it is first needed */

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

kvleaf_status kvl_sequence_check_resident(const kvl_sequence *sequence, kvleaf_seq seq)
{
    return sequence->residence == KVL_RESIDENT
               ? KVLEAF_OK
               : kvl_fail(KVLEAF_BUSY, "seq", (int64_t)seq, 0, "seq %#llx is swapped out", (unsigned long long)seq);
}

static kvleaf_status check_closed(const kvl_sequence *sequence, kvleaf_seq seq)
{
    return sequence->planned == sequence->committed
               ? KVLEAF_OK
               : kvl_fail(KVLEAF_BUSY, "seq", (int64_t)seq, 0, "seq %#llx is in an open plan", (unsigned long long)seq);
}

kvleaf_status kvl_sequence_check_idle(const kvl_sequence *sequence, kvleaf_seq seq)
{
    kvleaf_status status = check_closed(sequence, seq);
    return status ? status : kvl_sequence_check_resident(sequence, seq);
}

kvleaf_status kvl_sequence_find_idle(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out)
{
    kvleaf_status status = kvl_sequence_find(blocks, seq, out);
    return status ? status : kvl_sequence_check_idle(*out, seq);
}

int32_t kvl_sequence_slot(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    return (int32_t)(sequence - blocks->sequences);
}

void kvl_sequence_uploaded(kvl_sequence *sequence, int32_t group, int32_t count)
{
    sequence->first_changed[group] = count;
}

kvleaf_status kvl_sequence_reserve(kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count)
{
    if (count <= sequence->capacity)
        return KVLEAF_OK;
    int32_t capacity = sequence->capacity ? sequence->capacity : FIRST_CAPACITY;
    while (capacity < count)
        capacity = capacity > INT32_MAX / 2 ? INT32_MAX : capacity * 2;
    if (capacity > blocks->max_blocks_per_seq)
        capacity = blocks->max_blocks_per_seq;
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

static kvleaf_seq start_sequence(kvleaf_blocks *blocks, kvl_sequence *sequence, const kvleaf_seq_params *params)
{
    const kvleaf_seq_params usual = {.struct_size = sizeof usual};
    blocks->first_unused = sequence->next_unused;
    blocks->live++;
    sequence->next_unused = KVL_UNLISTED;
    sequence->params = params ? *params : usual;
    sequence->committed = sequence->planned = sequence->extended = sequence->known = sequence->cached = 0;
    sequence->count = sequence->indexed = sequence->peak_blocks = 0;
    sequence->tip = KVL_NO_ENTRY;
    sequence->outdated = false;
    sequence->residence = KVL_RESIDENT;
    for (int32_t i = 0; i < blocks->num_groups; i++)
        sequence->first_changed[i] = sequence->first_held[i] = 0;
    return kvl_handle(blocks->tag, sequence->generation, kvl_sequence_slot(blocks, sequence));
}

kvleaf_status kvl_check_seq_params(const kvleaf_seq_params *params)
{
    if (!params)
        return KVLEAF_OK;
    kvleaf_status status = kvl_check_struct(params, params->struct_size, sizeof *params, "kvleaf_seq_params");
    if (status)
        return status;
    if (params->priority < KVLEAF_PRIORITY_LOW || params->priority > KVLEAF_PRIORITY_HIGH)
        return kvl_fail_range("priority", params->priority, KVLEAF_PRIORITY_LOW, KVLEAF_PRIORITY_HIGH);
    if (params->no_prefix < 0 || params->no_prefix > 1)
        return kvl_fail_range("no_prefix", params->no_prefix, 0, 1);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_create(kvleaf_blocks *blocks, const kvleaf_seq_params *params, kvleaf_seq *out)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (!out)
        return kvl_fail_null("out");
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_check_seq_params(params);
    if (!status)
        status = next_slot(blocks, &sequence);
    if (status)
        return status;
    *out = start_sequence(blocks, sequence, params);
    return KVLEAF_OK;
}

int32_t kvl_first_seen(const kvleaf_blocks *blocks, int32_t group, int64_t position)
{
    int32_t window = blocks->groups[group].window;
    return window > 0 && position >= window ? kvl_column(blocks, position - window + 1) : 0;
}

void kvl_sequence_note_peak(const kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    int32_t held = 0;
    for (int32_t i = 0; i < blocks->num_groups; i++)
        held += sequence->count - sequence->first_held[i];
    if (sequence->peak_blocks < held)
        sequence->peak_blocks = held;
}

void kvl_sequence_leave_windows(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t *table = kvl_sequence_table(sequence, i), first = kvl_first_seen(blocks, i, sequence->committed);
        for (int32_t at = sequence->first_held[i]; at < first; at++) {
            if (table[at] != KVLEAF_NO_BLOCK)
                kvl_group_release(blocks, i, &table[at], 1, &sequence->params);
            table[at] = KVLEAF_NO_BLOCK;
        }
        if (sequence->first_held[i] < first)
            sequence->first_held[i] = first;
    }
}

/* Whether the blocks are there that a sequence of `length` tokens would see in its windows. */
static kvleaf_status check_windows(const kvleaf_blocks *blocks, const kvl_sequence *sequence, const char *field,
                                   int64_t length)
{
    int32_t count = kvl_columns(blocks, length);
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t first = kvl_first_seen(blocks, i, length);
        if (first < count && first < sequence->first_held[i])
            return kvl_fail(KVLEAF_INVALID, field, length, sequence->committed,
                            "%s is %lld, so far back that block %d in the window of group %d is gone", field,
                            (long long)length, first, i);
    }
    return KVLEAF_OK;
}

/* Makes a new sequence share the first `pos` tokens of another. */
static void share(kvleaf_blocks *blocks, const kvl_sequence *parent, int64_t pos, int32_t count, kvl_sequence *child)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        const int32_t *from = kvl_sequence_table(parent, i);
        int32_t *to = kvl_sequence_table(child, i), first = kvl_first_seen(blocks, i, pos);
        child->first_held[i] = first;
        for (int32_t at = 0; at < count; at++) {
            to[at] = at < first ? KVLEAF_NO_BLOCK : from[at];
            if (at >= first)
                kvl_group_refer(blocks, i, to[at]);
        }
    }
    child->count = count;
    child->committed = child->planned = child->extended = pos;
    child->known = parent->known < pos ? parent->known : pos;
    child->outdated = parent->outdated && pos > 0;
    child->indexed = parent->indexed;
    child->tip = parent->tip;
    child->tip_serial = parent->tip_serial;
    kvl_index_shorten(blocks, child, kvl_column(blocks, pos));
    kvl_sequence_note_peak(blocks, child);
    blocks->tokens += pos;
}

kvleaf_status kvleaf_blocks_seq_fork(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos, kvleaf_seq *child)
{
    kvl_sequence *parent = NULL, *made = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &parent);
    if (!status)
        status = kvl_sequence_check_resident(parent, seq);
    if (status)
        return status;
    if (!child)
        return kvl_fail_null("child");
    if (pos < 0 || pos > parent->committed)
        return kvl_fail_range("pos", pos, 0, parent->committed);
    int32_t count = kvl_columns(blocks, pos);
    status = check_windows(blocks, parent, "pos", pos);
    if (!status)
        status = next_slot(blocks, &made);
    if (!status)
        status = kvl_sequence_reserve(blocks, made, count);
    if (status)
        return status;
    *child = start_sequence(blocks, made, &parent->params);
    share(blocks, parent, pos, count, made);
    return KVLEAF_OK;
}

kvleaf_status kvl_sequence_cut(kvleaf_blocks *blocks, kvl_sequence *sequence, int64_t length)
{
    int32_t keep = kvl_columns(blocks, length), first[KVL_MAX_GROUPS];
    int32_t groups = keep < sequence->count ? blocks->num_groups : 0; /* that have something to give back */
    for (int32_t i = 0; i < groups; i++) {
        first[i] = keep > sequence->first_held[i] ? keep : sequence->first_held[i];
        kvleaf_status status = kvl_group_check_release(&blocks->groups[i], kvl_sequence_table(sequence, i) + first[i],
                                                       sequence->count - first[i]);
        if (status)
            return status;
    }
    for (int32_t i = 0; i < groups; i++) {
        kvl_group_release(blocks, i, kvl_sequence_table(sequence, i) + first[i], sequence->count - first[i],
                          &sequence->params);
        if (sequence->first_held[i] > keep)
            sequence->first_held[i] = keep;
    }
    blocks->tokens -= sequence->extended - length;
    sequence->count = keep;
    sequence->extended = length;
    if (sequence->committed > length)
        sequence->committed = length;
    if (sequence->known > length)
        sequence->known = length;
    sequence->planned = sequence->committed;
    sequence->outdated = sequence->outdated && length > 0;
    kvl_index_shorten(blocks, sequence, kvl_column(blocks, length));
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_seq_truncate(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t length)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find_idle(blocks, seq, &sequence);
    if (status)
        return status;
    if (length < 0 || length > sequence->extended)
        return kvl_fail_range("length", length, 0, sequence->extended);
    status = check_windows(blocks, sequence, "length", length);
    return status ? status : kvl_sequence_cut(blocks, sequence, length);
}

kvleaf_status kvleaf_blocks_seq_destroy(kvleaf_blocks *blocks, kvleaf_seq *seq)
{
    if (!seq)
        return kvl_fail_null("seq");
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, *seq, &sequence);
    if (!status)
        status = check_closed(sequence, *seq);
    if (!status && sequence->residence != KVL_SWAPPED)
        status = kvl_sequence_check_resident(sequence, *seq);
    if (!status && sequence->residence == KVL_SWAPPED)
        kvl_swap_drop(blocks, sequence);
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
        status = kvl_sequence_check_resident(sequence, seq);
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
    *info = (kvleaf_seq_info){
        .struct_size = sizeof *info,
        .committed = sequence->committed,
        .planned = sequence->planned,
        .extended = sequence->extended,
        .num_blocks = sequence->count,
        .user = sequence->params.user,
        .salt = sequence->params.salt,
        .cached = sequence->cached,
        .known = kvl_tokens_known(blocks, sequence),
        .swapped = sequence->residence != KVL_RESIDENT,
        .peak_blocks = sequence->peak_blocks,
    };
    for (int32_t i = 0; !info->swapped && i < blocks->num_groups; i++) {
        const int32_t *table = kvl_sequence_table(sequence, i);
        for (int32_t at = sequence->first_held[i]; at < sequence->count; at++) {
            bool shared = blocks->groups[i].blocks[table[at]].references > 1;
            info->blocks_shared += shared;
            info->blocks_unique += !shared;
        }
    }
    return KVLEAF_OK;
}
