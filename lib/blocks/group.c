/* SPDX-License-Identifier: Apache-2.0 */
/* The blocks of a group: their life, and copy-on-write. */
#include "blocks/blocks.h"

static kvleaf_status fill_free_list(kvl_group *group, const int32_t *order, int32_t count)
{
    kvl_free_list_init(&group->free, group->blocks, group->num_blocks);
    for (int32_t i = 0; i < count; i++) {
        int32_t block = order ? order[i] : i;
        if (block < 0 || block >= group->num_blocks)
            return kvl_fail(KVLEAF_INVALID, "free_order", block, group->num_blocks - 1,
                            "free_order[%d] is %d, must be 0 .. %d", i, block, group->num_blocks - 1);
        if (!kvl_free_list_give(&group->free, block))
            return kvl_fail(KVLEAF_INVALID, "free_order", block, 1, "free_order[%d] is %d, which stands before it", i,
                            block);
    }
    group->used = group->num_blocks - count;
    return KVLEAF_OK;
}

kvleaf_status kvl_group_create(kvleaf_blocks *blocks, int32_t number, const kvleaf_block_group *params)
{
    kvl_group *group = &blocks->groups[number];
    size_t count = (size_t)params->num_blocks, sequences = (size_t)blocks->max_sequences;
    group->num_blocks = params->num_blocks;
    group->blocks = kvl_alloc(&blocks->allocator, count, sizeof *group->blocks);
    if (!group->blocks)
        return kvl_fail_memory(count * sizeof *group->blocks);
    group->copies = kvl_alloc(&blocks->allocator, sequences, sizeof *group->copies);
    if (!group->copies)
        return kvl_fail_memory(sequences * sizeof *group->copies);
    for (int32_t i = 0; i < group->num_blocks; i++)
        group->blocks[i].copy = KVL_NO_COPY;
    return fill_free_list(group, params->free_order, params->free_order ? params->free_count : params->num_blocks);
}

void kvl_group_destroy(kvleaf_blocks *blocks, int32_t number)
{
    kvl_free(&blocks->allocator, blocks->groups[number].copies);
    kvl_free(&blocks->allocator, blocks->groups[number].blocks);
}

kvleaf_status kvl_group_check(const kvleaf_blocks *blocks, int32_t group)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    return group < 0 || group >= blocks->num_groups ? kvl_fail_range("group", group, 0, blocks->num_groups - 1)
                                                    : KVLEAF_OK;
}

int32_t kvl_group_available(const kvl_group *group)
{
    return group->free.count;
}

int32_t kvl_group_take(kvl_group *group)
{
    int32_t block = kvl_free_list_take(&group->free);
    group->blocks[block].references = 1;
    group->used++;
    return block;
}

/* Ends one pending copy's hold on its source, which is free if nothing else holds it. */
static void unpin(kvl_group *group, int32_t id)
{
    kvl_block *source = &group->blocks[id];
    if (--source->pins > 0)
        return;
    source->pinned_slots = 0;
    if (source->references == 0) {
        group->pinned--;
        group->used--;
        kvl_free_list_give(&group->free, id);
    }
}

/* Forgets the pending copy that was to fill a block; the last in the list takes its place there. */
static void drop_copy(kvl_group *group, kvl_block *filled)
{
    int32_t at = filled->copy, source = group->copies[at].src;
    group->copies[at] = group->copies[--group->num_copies];
    group->blocks[group->copies[at].dst].copy = at;
    filled->copy = KVL_NO_COPY;
    unpin(group, source);
}

/* Files a block that has just lost its last reference. */
static void settle(kvl_group *group, int32_t id)
{
    kvl_block *block = &group->blocks[id];
    if (block->pins > 0) {
        group->pinned++;
        return;
    }
    group->used--;
    kvl_free_list_give(&group->free, id);
    if (block->copy != KVL_NO_COPY)
        drop_copy(group, block);
}

kvleaf_status kvl_group_check_release(kvl_group *group, const int32_t *ids, int32_t count)
{
    int32_t held = 0;
    bool in_range = true;
    for (; held < count; held++) {
        in_range = ids[held] >= 0 && ids[held] < group->num_blocks;
        if (!in_range || group->blocks[ids[held]].references == 0)
            break;
        group->blocks[ids[held]].references--;
    }
    for (int32_t i = 0; i < held; i++)
        group->blocks[ids[i]].references++;
    if (held == count)
        return KVLEAF_OK;
    if (!in_range)
        return kvl_fail_range("block", ids[held], 0, group->num_blocks - 1);
    return kvl_fail(KVLEAF_INVALID, "block", ids[held], 0, "block %d is given back more often than it was taken",
                    ids[held]);
}

void kvl_group_release(kvl_group *group, const int32_t *ids, int32_t count)
{
    for (int32_t i = count - 1; i >= 0; i--)
        if (--group->blocks[ids[i]].references == 0)
            settle(group, ids[i]);
}

bool kvl_group_must_copy(const kvl_group *group, int32_t block, int32_t slot)
{
    const kvl_block *at = &group->blocks[block];
    return at->references > 1 || slot < at->pinned_slots;
}

int32_t kvl_group_copy_on_write(kvl_group *group, int32_t block, int32_t slots)
{
    kvl_block *left = &group->blocks[block];
    /* What a pending copy will fill is copied from where that one reads. */
    int32_t from = left->copy == KVL_NO_COPY ? block : group->copies[left->copy].src;
    kvl_block *source = &group->blocks[from];
    int32_t taken = kvl_group_take(group);
    group->blocks[taken].copy = group->num_copies;
    group->copies[group->num_copies++] = (kvleaf_block_copy){.src = from, .dst = taken};
    source->pins++;
    if (source->pinned_slots < slots)
        source->pinned_slots = slots;
    if (--left->references == 0)
        settle(group, block);
    return taken;
}

kvleaf_status kvleaf_blocks_copies(const kvleaf_blocks *blocks, int32_t group, const kvleaf_block_copy **copies,
                                   int32_t *count)
{
    kvleaf_status status = kvl_group_check(blocks, group);
    if (status)
        return status;
    if (!copies || !count)
        return kvl_fail_null(copies ? "count" : "copies");
    *copies = blocks->groups[group].copies;
    *count = blocks->groups[group].num_copies;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_copies_done(kvleaf_blocks *blocks, int32_t number, int32_t count)
{
    kvleaf_status status = kvl_group_check(blocks, number);
    if (status)
        return status;
    kvl_group *group = &blocks->groups[number];
    if (count < 0 || count > group->num_copies)
        return kvl_fail_range("count", count, 0, group->num_copies);
    for (int32_t i = 0; i < count; i++) {
        group->blocks[group->copies[i].dst].copy = KVL_NO_COPY;
        unpin(group, group->copies[i].src);
    }
    group->num_copies -= count;
    for (int32_t i = 0; i < group->num_copies; i++) {
        group->copies[i] = group->copies[i + count];
        group->blocks[group->copies[i].dst].copy = i;
    }
    group->copies_done += (uint64_t)count;
    return KVLEAF_OK;
}

int32_t kvleaf_blocks_refcount(const kvleaf_blocks *blocks, int32_t group, int32_t block)
{
    if (!blocks || group < 0 || group >= blocks->num_groups || block < 0 || block >= blocks->groups[group].num_blocks)
        return -1;
    return blocks->groups[group].blocks[block].references;
}
