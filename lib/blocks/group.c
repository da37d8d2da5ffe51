/* SPDX-License-Identifier: Apache-2.0 */
/* The blocks of a group: their life, and copy-on-write. */
#include "blocks/index.h"

static kvleaf_status fill_lists(kvl_group *group, const int32_t *order, int32_t count)
{
    kvl_list_init(&group->free, group->blocks);
    for (int32_t i = 0; i < KVL_PRIORITIES; i++)
        kvl_list_init(&group->cached[i], group->blocks);
    for (int32_t i = 0; i < count; i++) {
        int32_t block = order ? order[i] : i;
        if (block < 0 || block >= group->num_blocks)
            return kvl_fail(KVLEAF_INVALID, "free_order", block, group->num_blocks - 1,
                            "free_order[%d] is %d, must be 0 .. %d", i, block, group->num_blocks - 1);
        if (!kvl_list_give(&group->free, block))
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
    group->window = params->window;
    group->blocks = kvl_alloc(&blocks->allocator, count, sizeof *group->blocks);
    if (!group->blocks)
        return kvl_fail_memory(count * sizeof *group->blocks);
    group->copies = kvl_alloc(&blocks->allocator, sequences, sizeof *group->copies);
    if (!group->copies)
        return kvl_fail_memory(sequences * sizeof *group->copies);
    for (int32_t i = 0; i < group->num_blocks; i++) {
        group->blocks[i].next = KVL_UNLISTED;
        group->blocks[i].copy = KVL_NO_COPY;
        group->blocks[i].entry = KVL_NO_ENTRY;
        group->blocks[i].host = KVL_NO_HOST;
    }
    return fill_lists(group, params->free_order, params->free_order ? params->free_count : params->num_blocks);
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
    return group->free.count + group->num_cached;
}

int32_t kvl_group_take(kvleaf_blocks *blocks, int32_t number)
{
    kvl_group *group = &blocks->groups[number];
    int32_t id = group->free.first;
    if (id == KVL_LIST_END) {
        id = kvl_group_victim(blocks, number);
        kvl_group_unlist(blocks, number, id);
        kvl_index_leave(blocks, number, id);
        group->evictions++;
    } else {
        kvl_group_unlist(blocks, number, id);
    }
    group->blocks[id].references = 1;
    kvl_swap_unlink(group, id);
    return id;
}

void kvl_group_refer(kvleaf_blocks *blocks, int32_t number, int32_t id)
{
    kvl_block *block = &blocks->groups[number].blocks[id];
    if (block->references == 0 && kvl_block_held(block))
        blocks->groups[number].pinned--;
    else if (block->references == 0)
        kvl_group_unlist(blocks, number, id);
    block->references++;
}

/* Forgets the pending copy that was to fill a block; the last in the list takes its place there. */
static void drop_copy(kvleaf_blocks *blocks, int32_t number, int32_t filled)
{
    kvl_group *group = &blocks->groups[number];
    int32_t at = group->blocks[filled].copy, source = group->copies[at].src;
    group->copies[at] = group->copies[--group->num_copies];
    group->blocks[group->copies[at].dst].copy = at;
    group->blocks[filled].copy = KVL_NO_COPY;
    kvl_group_unpin(blocks, number, source);
}

static void drop_reference(kvleaf_blocks *blocks, int32_t number, int32_t id, const kvleaf_seq_params *terms)
{
    kvl_block *block = &blocks->groups[number].blocks[id];
    if (--block->references > 0)
        return;
    kvl_group_settle(blocks, number, id, terms);
    if (block->copy != KVL_NO_COPY)
        drop_copy(blocks, number, id);
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

void kvl_group_release(kvleaf_blocks *blocks, int32_t group, const int32_t *ids, int32_t count,
                       const kvleaf_seq_params *terms)
{
    for (int32_t i = count - 1; i >= 0; i--)
        drop_reference(blocks, group, ids[i], terms);
}

bool kvl_group_must_copy(const kvl_group *group, int32_t id, int32_t slot)
{
    const kvl_block *block = &group->blocks[id];
    return block->references > 1 || slot < block->pinned_slots || (block->holds > 0 && block->entry != KVL_NO_ENTRY);
}

void kvl_group_fill(kvl_group *group, int32_t source, int32_t destination)
{
    group->blocks[destination].copy = group->num_copies;
    group->copies[group->num_copies++] = (kvleaf_block_copy){.src = source, .dst = destination};
}

int32_t kvl_group_copy_on_write(kvleaf_blocks *blocks, int32_t number, int32_t id, int32_t slots,
                                const kvleaf_seq_params *terms)
{
    kvl_group *group = &blocks->groups[number];
    /* What a pending copy will fill is copied from where that one reads. */
    int32_t copy = group->blocks[id].copy, source = copy == KVL_NO_COPY ? id : group->copies[copy].src;
    kvl_group_pin(blocks, number, source, slots);
    int32_t taken = kvl_group_take(blocks, number);
    kvl_group_fill(group, source, taken);
    drop_reference(blocks, number, id, terms);
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
        kvl_group_unpin(blocks, number, group->copies[i].src);
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
