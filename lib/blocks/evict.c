/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks that nothing refers to: which list they are in, which cached one goes first, and pins. */
#include "blocks/index.h"

uint64_t kvl_blocks_now(const kvleaf_blocks *blocks)
{
    return blocks->now_ms ? blocks->now_ms(blocks->now_user) : kvl_clock_ms();
}

static bool listed(const kvl_block *block)
{
    return block->next != KVL_UNLISTED;
}

static kvl_block_list *list_of(kvl_group *group, const kvl_block *block)
{
    return block->entry == KVL_NO_ENTRY ? &group->free : &group->cached[block->priority - KVLEAF_PRIORITY_LOW];
}

/* Tells the policy of a block that has become cached. */
static void tell_added(const kvleaf_blocks *blocks, int32_t group, int32_t id)
{
    if (!blocks->eviction.added)
        return;
    const kvl_block *block = &blocks->groups[group].blocks[id];
    const kvl_entry *entry = &blocks->index.entries[block->entry];
    const kvleaf_cached_block cached = {
        .group = group,
        .block = id,
        .depth = entry->depth,
        .children = entry->children,
        .priority = block->priority,
        .last_use_ms = block->last_use,
        .expires_ms = block->expires,
        .hash = {entry->hash[0], entry->hash[1]},
    };
    blocks->eviction.added(blocks->eviction.user, &cached);
}

/* What a block that becomes cached goes before: the one that it continues, where that is in its list already (it left a
 * window, or is of another sequence), since with that one it would be lost. */
static int32_t place_of(const kvleaf_blocks *blocks, int32_t number, const kvl_block *block)
{
    if (number != blocks->primary || block->entry == KVL_NO_ENTRY)
        return KVL_LIST_END;
    int32_t parent = blocks->index.entries[block->entry].parent;
    if (parent == KVL_NO_ENTRY)
        return KVL_LIST_END;
    const kvl_block *before = &blocks->groups[number].blocks[parent];
    return listed(before) && before->priority == block->priority ? parent : KVL_LIST_END;
}

void kvl_group_list(kvleaf_blocks *blocks, int32_t number, int32_t id)
{
    kvl_group *group = &blocks->groups[number];
    kvl_block *block = &group->blocks[id];
    group->used--;
    kvl_list_insert(list_of(group, block), id, place_of(blocks, number, block));
    if (block->entry == KVL_NO_ENTRY)
        return;
    group->num_cached++;
    tell_added(blocks, number, id);
}

void kvl_group_unlist(kvleaf_blocks *blocks, int32_t number, int32_t id)
{
    kvl_group *group = &blocks->groups[number];
    kvl_block *block = &group->blocks[id];
    group->used++;
    kvl_list_remove(list_of(group, block), id);
    if (block->entry == KVL_NO_ENTRY)
        return;
    group->num_cached--;
    if (blocks->eviction.removed)
        blocks->eviction.removed(blocks->eviction.user, number, id);
}

bool kvl_group_expired(const kvleaf_blocks *blocks, int32_t group, int32_t id)
{
    const kvl_block *block = &blocks->groups[group].blocks[id];
    return listed(block) && block->expires && block->expires <= kvl_blocks_now(blocks);
}

int32_t kvl_group_victim(kvleaf_blocks *blocks, int32_t number)
{
    kvl_group *group = &blocks->groups[number];
    if (blocks->eviction.victim) {
        int32_t id = blocks->eviction.victim(blocks->eviction.user, number);
        if (id >= 0 && id < group->num_blocks && listed(&group->blocks[id]) && group->blocks[id].entry != KVL_NO_ENTRY)
            return id;
    }
    int32_t lowest = KVL_LIST_END;
    for (int32_t i = KVL_PRIORITIES - 1; i >= 0; i--) {
        int32_t first = group->cached[i].first;
        if (first == KVL_LIST_END)
            continue;
        if (kvl_group_expired(blocks, number, first))
            return first;
        lowest = first;
    }
    return lowest;
}

/* A block's pins or holds have changed; whether it was held before. */
static void refile(kvleaf_blocks *blocks, int32_t group, int32_t id, bool was_held)
{
    const kvl_block *block = &blocks->groups[group].blocks[id];
    if (block->references > 0 || was_held == kvl_block_held(block))
        return;
    if (was_held) {
        blocks->groups[group].pinned--;
        kvl_group_list(blocks, group, id);
    } else {
        kvl_group_unlist(blocks, group, id);
        blocks->groups[group].pinned++;
    }
}

void kvl_group_hold(kvleaf_blocks *blocks, int32_t group, int32_t id, int32_t count)
{
    kvl_block *block = &blocks->groups[group].blocks[id];
    bool was_held = kvl_block_held(block);
    block->holds += count;
    refile(blocks, group, id, was_held);
}

void kvl_group_pin(kvleaf_blocks *blocks, int32_t group, int32_t id, int32_t slots)
{
    kvl_block *block = &blocks->groups[group].blocks[id];
    bool was_held = kvl_block_held(block);
    block->pins++;
    if (block->pinned_slots < slots)
        block->pinned_slots = (int16_t)slots;
    refile(blocks, group, id, was_held);
}

void kvl_group_unpin(kvleaf_blocks *blocks, int32_t group, int32_t id)
{
    kvl_block *block = &blocks->groups[group].blocks[id];
    if (--block->pins > 0)
        return;
    block->pinned_slots = 0;
    refile(blocks, group, id, true);
}

/* Files a block that has just lost its last reference. */
void kvl_group_settle(kvleaf_blocks *blocks, int32_t number, int32_t id, const kvleaf_seq_params *terms)
{
    kvl_group *group = &blocks->groups[number];
    kvl_block *block = &group->blocks[id];
    bool timed = block->entry != KVL_NO_ENTRY && (terms->ttl_ms || blocks->eviction.added);
    block->last_use = timed ? kvl_blocks_now(blocks) : 0;
    bool expires = timed && terms->ttl_ms && terms->ttl_ms <= UINT64_MAX - block->last_use;
    block->expires = expires ? block->last_use + terms->ttl_ms : 0;
    block->priority = (int16_t)terms->priority;
    if (kvl_block_held(block))
        group->pinned++;
    else
        kvl_group_list(blocks, number, id);
}

/* The block of a pin, and the entry whose chain it holds. */
static kvleaf_status find_block(const kvleaf_blocks *blocks, int32_t group, int32_t id, kvl_block **block,
                                int32_t *before)
{
    kvleaf_status status = kvl_group_check(blocks, group);
    if (status)
        return status;
    if (id < 0 || id >= blocks->groups[group].num_blocks)
        return kvl_fail_range("block", id, 0, blocks->groups[group].num_blocks - 1);
    *block = &blocks->groups[group].blocks[id];
    *before = (*block)->entry;
    if (*before != KVL_NO_ENTRY && group == blocks->primary)
        *before = blocks->index.entries[*before].parent;
    return KVLEAF_OK;
}

static void pin(kvleaf_blocks *blocks, int32_t group, int32_t id, int32_t before, int32_t count)
{
    blocks->groups[group].blocks[id].user_pins += count;
    kvl_group_hold(blocks, group, id, count);
    for (; before != KVL_NO_ENTRY; before = blocks->index.entries[before].parent)
        kvl_group_hold(blocks, blocks->primary, before, count);
}

kvleaf_status kvleaf_blocks_pin(kvleaf_blocks *blocks, int32_t group, int32_t id)
{
    kvl_block *block = NULL;
    int32_t before = KVL_NO_ENTRY;
    kvleaf_status status = find_block(blocks, group, id, &block, &before);
    if (status)
        return status;
    if (block->references == 0 && block->entry == KVL_NO_ENTRY && !kvl_block_held(block))
        return kvl_fail(KVLEAF_INVALID, "block", id, 0, "block %d is neither used nor cached", id);
    pin(blocks, group, id, before, 1);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_unpin(kvleaf_blocks *blocks, int32_t group, int32_t id)
{
    kvl_block *block = NULL;
    int32_t before = KVL_NO_ENTRY;
    kvleaf_status status = find_block(blocks, group, id, &block, &before);
    if (status)
        return status;
    if (block->user_pins == 0)
        return kvl_fail(KVLEAF_INVALID, "block", id, 0, "block %d is not pinned", id);
    pin(blocks, group, id, before, -1);
    return KVLEAF_OK;
}
