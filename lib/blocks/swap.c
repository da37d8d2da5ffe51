/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences in host memory. A block and the host block that was copied from it are linked while both hold the same, so
 * that what several sequences share goes and comes back once, and what is still on the device is not copied at all. */
#include "blocks/index.h"

#include <string.h>

kvleaf_status kvl_swap_create_group(kvleaf_blocks *blocks, int32_t number, int32_t num_hosts)
{
    kvl_group *group = &blocks->groups[number];
    group->first_unused_host = KVL_NO_HOST;
    if (num_hosts == 0)
        return KVLEAF_OK;
    group->hosts = kvl_alloc(&blocks->allocator, (size_t)num_hosts, sizeof *group->hosts);
    if (!group->hosts)
        return kvl_fail_memory((size_t)num_hosts * sizeof *group->hosts);
    group->num_hosts = num_hosts;
    for (int32_t i = 0; i < num_hosts; i++)
        group->hosts[i] =
            (kvl_host_block){.block = KVLEAF_NO_BLOCK, .next_unused = i + 1 < num_hosts ? i + 1 : KVL_NO_HOST};
    group->first_unused_host = 0;
    return KVLEAF_OK;
}

kvleaf_status kvl_swap_create(kvleaf_blocks *blocks)
{
    kvl_swap *swap = &blocks->swap;
    size_t all = 0, primary = (size_t)blocks->groups[blocks->primary].num_hosts;
    for (int32_t i = 0; i < blocks->num_groups; i++)
        all += (size_t)blocks->groups[i].num_hosts;
    if (all == 0)
        return KVLEAF_OK;
    size_t slots = primary * (size_t)blocks->block_size;
    swap->entries = kvl_alloc(&blocks->allocator, all, sizeof *swap->entries);
    if (!swap->entries)
        return kvl_fail_memory(all * sizeof *swap->entries);
    swap->copies = kvl_alloc(&blocks->allocator, all, sizeof *swap->copies);
    if (!swap->copies)
        return kvl_fail_memory(all * sizeof *swap->copies);
    swap->ids = kvl_alloc(&blocks->allocator, slots, sizeof *swap->ids);
    if (!swap->ids)
        return kvl_fail_memory(slots * sizeof *swap->ids);
    swap->contents = kvl_alloc(&blocks->allocator, primary, sizeof *swap->contents);
    return swap->contents ? KVLEAF_OK : kvl_fail_memory(primary * sizeof *swap->contents);
}

void kvl_swap_destroy(kvleaf_blocks *blocks)
{
    for (int32_t i = 0; i < blocks->num_groups; i++)
        kvl_free(&blocks->allocator, blocks->groups[i].hosts);
    kvl_free(&blocks->allocator, blocks->swap.contents);
    kvl_free(&blocks->allocator, blocks->swap.ids);
    kvl_free(&blocks->allocator, blocks->swap.copies);
    kvl_free(&blocks->allocator, blocks->swap.entries);
}

void kvl_swap_unlink(kvl_group *group, int32_t block)
{
    int32_t host = group->blocks[block].host;
    if (host == KVL_NO_HOST)
        return;
    group->hosts[host].block = KVLEAF_NO_BLOCK;
    group->blocks[block].host = KVL_NO_HOST;
}

static void link(kvl_group *group, int32_t block, int32_t host)
{
    group->hosts[host].block = block;
    group->blocks[block].host = host;
}

static int32_t take_host(kvl_group *group)
{
    int32_t host = group->first_unused_host;
    group->first_unused_host = group->hosts[host].next_unused;
    group->hosts_used++;
    return host;
}

static void drop_host(kvl_group *group, int32_t host)
{
    kvl_host_block *at = &group->hosts[host];
    if (--at->references > 0)
        return;
    if (at->block != KVLEAF_NO_BLOCK)
        kvl_swap_unlink(group, at->block);
    at->next_unused = group->first_unused_host;
    group->first_unused_host = host;
    group->hosts_used--;
}

static int32_t *host_ids(const kvleaf_blocks *blocks, int32_t host)
{
    return blocks->swap.ids + (size_t)host * (size_t)blocks->block_size;
}

/* A block is copied if it holds something: committed tokens. */
static bool has_tokens(const kvleaf_blocks *blocks, const kvl_sequence *sequence, int32_t index)
{
    return (int64_t)index * blocks->block_size < sequence->committed;
}

static void add_copy(kvleaf_blocks *blocks, int32_t group, int32_t block, int32_t host)
{
    blocks->swap.copies[blocks->swap.num_copies++] = (kvleaf_swap_copy){.group = group, .block = block, .host = host};
}

/* Gives each block of a group's table a host block, those that have one already for another sequence the same. */
static void leave_group(kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t number)
{
    kvl_group *group = &blocks->groups[number];
    const int32_t *table = kvl_sequence_table(sequence, number);
    for (int32_t i = sequence->first_held[number]; i < sequence->count; i++) {
        int32_t host = group->blocks[table[i]].host;
        if (host == KVL_NO_HOST) {
            host = take_host(group);
            link(group, table[i], host);
            if (has_tokens(blocks, sequence, i))
                add_copy(blocks, number, table[i], host);
        }
        group->hosts[host].references++;
    }
}

static kvleaf_status begin_out(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        const kvl_group *group = &blocks->groups[i];
        const int32_t *table = kvl_sequence_table(sequence, i);
        int32_t needed = 0, unused = group->num_hosts - group->hosts_used;
        for (int32_t at = sequence->first_held[i]; at < sequence->count; at++)
            needed += group->blocks[table[at]].host == KVL_NO_HOST;
        if (needed > 0 && group->num_hosts == 0)
            return kvl_fail(KVLEAF_UNSUPPORTED, "swap_blocks", needed, 0, "group %d has no swap_blocks", i);
        if (needed > unused)
            return kvl_fail(KVLEAF_NO_BLOCKS, "swap_blocks", needed, unused,
                            "the sequence needs %d host blocks of group %d, %d are unused", needed, i, unused);
    }
    for (int32_t i = 0; i < blocks->num_groups; i++)
        leave_group(blocks, sequence, i);
    sequence->known = kvl_tokens_known(blocks, sequence); /* what a sharer said last is on these blocks only */
    sequence->residence = KVL_LEAVING;
    return KVLEAF_OK;
}

static void end_out(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t number = 0; number < blocks->num_groups; number++) {
        int32_t *table = kvl_sequence_table(sequence, number);
        for (int32_t i = sequence->count - 1; i >= sequence->first_held[number]; i--) {
            int32_t block = table[i], host = blocks->groups[number].blocks[block].host;
            if (number == blocks->primary) {
                memcpy(host_ids(blocks, host), kvl_block_ids(blocks, block),
                       (size_t)blocks->block_size * sizeof *blocks->ids);
                blocks->swap.contents[host] = blocks->contents[block];
            }
            table[i] = host;
            kvl_group_release(blocks, number, &block, 1, &sequence->params);
        }
    }
    for (int32_t i = 0; i < blocks->swap.num_copies; i++)
        blocks->groups[blocks->swap.copies[i].group].swapped_out++;
    sequence->residence = KVL_SWAPPED;
    blocks->swap.sequences++;
}

static void undo_out(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t number = 0; number < blocks->num_groups; number++) {
        const int32_t *table = kvl_sequence_table(sequence, number);
        for (int32_t i = sequence->count - 1; i >= sequence->first_held[number]; i--)
            drop_host(&blocks->groups[number], blocks->groups[number].blocks[table[i]].host);
    }
    sequence->residence = KVL_RESIDENT;
}

void kvl_swap_drop(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t number = 0; number < blocks->num_groups; number++) {
        const int32_t *table = kvl_sequence_table(sequence, number);
        for (int32_t i = sequence->count - 1; i >= sequence->first_held[number]; i--)
            drop_host(&blocks->groups[number], table[i]);
        sequence->first_held[number] = sequence->count;
    }
    sequence->residence = KVL_RESIDENT;
    blocks->swap.sequences--;
}

/* The entry of the index behind `parent` that holds what block `index` of a swapped sequence did, or KVL_NO_ENTRY. */
static int32_t find_entry(const kvleaf_blocks *blocks, const kvl_sequence *sequence, int32_t parent, int32_t index)
{
    int32_t host = kvl_sequence_table(sequence, blocks->primary)[index];
    const kvl_key key = {
        .parent = parent,
        .salt = sequence->params.salt,
        .content = &blocks->swap.contents[host],
        .ids = host_ids(blocks, host),
    };
    int32_t entry = kvl_index_find(blocks, &key);
    return entry != KVL_NO_ENTRY && kvl_index_is_there(blocks, entry, blocks->primary) ? entry : KVL_NO_ENTRY;
}

/* Leading blocks of a swapped sequence that the index may hold: full, committed and known. */
static int32_t indexed_blocks(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    if (!blocks->index.entries || sequence->params.no_prefix || sequence->outdated ||
        sequence->first_held[blocks->primary] > 0)
        return 0;
    int64_t ready = sequence->committed < sequence->known ? sequence->committed : sequence->known;
    return kvl_column(blocks, ready);
}

/* Lists what each entry of the tables becomes: a block that holds the same already, or none yet. */
static void list_entries(kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    kvl_swap *swap = &blocks->swap;
    int32_t indexed = indexed_blocks(blocks, sequence), entry = KVL_NO_ENTRY;
    for (int32_t i = 0; i < sequence->count; i++) {
        bool followed = i < indexed && (i == 0 || entry != KVL_NO_ENTRY);
        entry = followed ? find_entry(blocks, sequence, entry, i) : KVL_NO_ENTRY;
        for (int32_t number = 0; number < blocks->num_groups; number++) {
            if (i < sequence->first_held[number])
                continue;
            int32_t host = kvl_sequence_table(sequence, number)[i], block = blocks->groups[number].hosts[host].block;
            if (block == KVLEAF_NO_BLOCK && entry != KVL_NO_ENTRY && kvl_index_is_there(blocks, entry, number))
                block = kvl_index_block(blocks, entry, number);
            swap->entries[swap->num_entries++] = (kvl_swap_entry){
                .group = number, .index = i, .host = host, .block = block, .found = block != KVLEAF_NO_BLOCK};
        }
    }
}

static kvleaf_status check_room(const kvleaf_blocks *blocks)
{
    int32_t needed[KVL_MAX_GROUPS] = {0};
    for (int32_t i = 0; i < blocks->swap.num_entries; i++) {
        const kvl_swap_entry *entry = &blocks->swap.entries[i];
        needed[entry->group] += !entry->found || blocks->groups[entry->group].blocks[entry->block].next != KVL_UNLISTED;
    }
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t there = kvl_group_available(&blocks->groups[i]);
        if (needed[i] > there)
            return kvl_fail(KVLEAF_NO_BLOCKS, "seq", needed[i], there,
                            "the sequence needs %d blocks of group %d, %d are available", needed[i], i, there);
    }
    return KVLEAF_OK;
}

static kvleaf_status begin_in(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    kvl_swap *swap = &blocks->swap;
    list_entries(blocks, sequence);
    kvleaf_status status = check_room(blocks);
    if (status)
        return status;
    for (int32_t i = 0; i < swap->num_entries; i++)
        if (swap->entries[i].found)
            kvl_group_refer(blocks, swap->entries[i].group, swap->entries[i].block);
    for (int32_t i = 0; i < swap->num_entries; i++) {
        kvl_swap_entry *entry = &swap->entries[i];
        if (entry->found)
            continue;
        entry->block = kvl_group_take(blocks, entry->group);
        if (has_tokens(blocks, sequence, entry->index))
            add_copy(blocks, entry->group, entry->block, entry->host);
    }
    sequence->residence = KVL_RETURNING;
    return KVLEAF_OK;
}

static void end_in(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t i = 0; i < blocks->swap.num_entries; i++) {
        const kvl_swap_entry *entry = &blocks->swap.entries[i];
        kvl_group *group = &blocks->groups[entry->group];
        if (entry->group == blocks->primary && !entry->found) {
            memcpy(kvl_block_ids(blocks, entry->block), host_ids(blocks, entry->host),
                   (size_t)blocks->block_size * sizeof *blocks->ids);
            blocks->contents[entry->block] = blocks->swap.contents[entry->host];
        }
        if (group->hosts[entry->host].block == KVLEAF_NO_BLOCK && group->blocks[entry->block].host == KVL_NO_HOST)
            link(group, entry->block, entry->host); /* for those that share it and come later */
        kvl_sequence_table(sequence, entry->group)[entry->index] = entry->block;
    }
    for (int32_t i = blocks->swap.num_entries - 1; i >= 0; i--) /* the first is handed out first: neighbours stay so */
        drop_host(&blocks->groups[blocks->swap.entries[i].group], blocks->swap.entries[i].host);
    for (int32_t i = 0; i < blocks->swap.num_copies; i++)
        blocks->groups[blocks->swap.copies[i].group].swapped_in++;
    memset(sequence->first_changed, 0, sizeof sequence->first_changed);
    sequence->residence = KVL_RESIDENT;
    blocks->swap.sequences--;
}

static void undo_in(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    for (int32_t i = blocks->swap.num_entries - 1; i >= 0; i--)
        kvl_group_release(blocks, blocks->swap.entries[i].group, &blocks->swap.entries[i].block, 1, &sequence->params);
    sequence->residence = KVL_SWAPPED;
}

static kvleaf_status check_begin(const kvleaf_blocks *blocks, kvleaf_seq seq, bool out, kvl_sequence **sequence)
{
    kvleaf_status status = kvl_sequence_find(blocks, seq, sequence);
    if (status)
        return status;
    if ((*sequence)->planned > (*sequence)->committed)
        return kvl_fail(KVLEAF_BUSY, "seq", (int64_t)seq, 0, "seq %#llx is in an open plan", (unsigned long long)seq);
    if ((*sequence)->residence != (out ? KVL_RESIDENT : KVL_SWAPPED))
        return kvl_fail(KVLEAF_INVALID, "seq", (int64_t)seq, 0, "seq %#llx is %s", (unsigned long long)seq,
                        out ? "swapped out already" : "not swapped out");
    return KVLEAF_OK;
}

kvleaf_status kvl_swap_begin(kvleaf_blocks *blocks, kvleaf_seq seq, bool out, const kvleaf_swap_copy **copies,
                             int32_t *count)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = check_begin(blocks, seq, out, &sequence);
    if (status)
        return status;
    if (!copies || !count)
        return kvl_fail_null(copies ? "count" : "copies");
    blocks->swap.num_entries = blocks->swap.num_copies = 0;
    status = out ? begin_out(blocks, sequence) : begin_in(blocks, sequence);
    if (status)
        return status;
    *copies = blocks->swap.copies;
    *count = blocks->swap.num_copies;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_swap_out(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_swap_copy **copies,
                                     int32_t *count)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = check_begin(blocks, seq, true, &sequence);
    for (int32_t i = 0; !status && i < blocks->num_groups; i++) {
        const int32_t *table = kvl_sequence_table(sequence, i);
        for (int32_t at = sequence->first_held[i]; !status && at < sequence->count; at++)
            if (blocks->groups[i].blocks[table[at]].copy != KVL_NO_COPY)
                status = kvl_fail(KVLEAF_BUSY, "seq", (int64_t)seq, table[at],
                                  "the copy that fills block %d of group %d is still pending", table[at], i);
    }
    return status ? status : kvl_swap_begin(blocks, seq, true, copies, count);
}

kvleaf_status kvleaf_blocks_swap_in(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_swap_copy **copies,
                                    int32_t *count)
{
    return kvl_swap_begin(blocks, seq, false, copies, count);
}

kvleaf_status kvleaf_blocks_swap_end(kvleaf_blocks *blocks, kvleaf_seq seq, bool done)
{
    kvl_sequence *sequence = NULL;
    kvleaf_status status = kvl_sequence_find(blocks, seq, &sequence);
    if (status)
        return status;
    switch (sequence->residence) {
    case KVL_LEAVING:
        done ? end_out(blocks, sequence) : undo_out(blocks, sequence);
        return KVLEAF_OK;
    case KVL_RETURNING:
        done ? end_in(blocks, sequence) : undo_in(blocks, sequence);
        return KVLEAF_OK;
    default:
        return kvl_fail(KVLEAF_INVALID, "seq", (int64_t)seq, 0, "no swap of seq %#llx has begun",
                        (unsigned long long)seq);
    }
}
