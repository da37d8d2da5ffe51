/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt's blocks are entered in one loop (kvl_index_follow), whose time is its instructions: what it calls for every
 * block is inline, and external where index.h declares it. */
#include "blocks/index.h"

#include <string.h>

#define XXH_INLINE_ALL /* inputs are short */
#include <xxhash.h>

static void clear_index(kvleaf_blocks *blocks)
{
    kvl_index *index = &blocks->index;
    int64_t partners = (int64_t)blocks->groups[blocks->primary].num_blocks * blocks->num_groups;
    for (int64_t i = 0; i < index->num_buckets; i++)
        index->buckets[i] = index->roots[i] = KVL_NO_ENTRY;
    for (int64_t i = 0; i < partners; i++)
        index->partners[i] = KVLEAF_NO_BLOCK;
}

kvleaf_status kvl_index_create(kvleaf_blocks *blocks)
{
    kvl_index *index = &blocks->index;
    int32_t count = blocks->groups[blocks->primary].num_blocks;
    index->num_buckets = 1;
    while (index->num_buckets < count)
        index->num_buckets *= 2;
    index->entries = kvl_alloc(&blocks->allocator, (size_t)count, sizeof *index->entries);
    if (!index->entries)
        return kvl_fail_memory((size_t)count * sizeof *index->entries);
    size_t partners = (size_t)count * (size_t)blocks->num_groups;
    index->partners = kvl_alloc(&blocks->allocator, partners, sizeof *index->partners);
    if (!index->partners)
        return kvl_fail_memory(partners * sizeof *index->partners);
    index->buckets = kvl_alloc(&blocks->allocator, (size_t)index->num_buckets, sizeof *index->buckets);
    if (!index->buckets)
        return kvl_fail_memory((size_t)index->num_buckets * sizeof *index->buckets);
    index->roots = kvl_alloc(&blocks->allocator, (size_t)index->num_buckets, sizeof *index->roots);
    if (!index->roots)
        return kvl_fail_memory((size_t)index->num_buckets * sizeof *index->roots);
    clear_index(blocks);
    return KVLEAF_OK;
}

void kvl_index_destroy(kvleaf_blocks *blocks)
{
    kvl_free(&blocks->allocator, blocks->index.roots);
    kvl_free(&blocks->allocator, blocks->index.buckets);
    kvl_free(&blocks->allocator, blocks->index.partners);
    kvl_free(&blocks->allocator, blocks->index.entries);
}

static int32_t *bucket_of(const kvl_index *index, uint64_t hash)
{
    return &index->buckets[hash & (uint64_t)(index->num_buckets - 1)];
}

static int32_t *roots_of(const kvl_index *index, uint64_t salt)
{
    uint64_t mixed = (salt ^ (salt >> 32)) * 0x9e3779b97f4a7c15u;
    return &index->roots[(mixed >> 32) & (uint64_t)(index->num_buckets - 1)];
}

/* Of the parent's hash (or the salt, where a chain begins), the digest and the hash of the ids, which are hashed where
 * they lie and do not wait for the parent's. */
static inline void hash_block(const kvleaf_blocks *blocks, const kvl_key *key, uint64_t hash[2])
{
    const kvl_index *index = &blocks->index;
    const bool root = key->parent == KVL_NO_ENTRY;
    const kvl_entry *parent = &index->entries[root ? 0 : key->parent];
    const uint64_t *digest = key->content->digest;
    XXH128_hash_t ids = XXH3_128bits(key->ids, (size_t)blocks->block_size * sizeof *key->ids);
    const uint64_t all[] = {
        root ? key->salt : parent->hash[0], root ? 0 : parent->hash[1], digest[0], digest[1], ids.low64, ids.high64,
    };
    XXH128_hash_t made = XXH3_128bits(all, sizeof all);
    hash[0] = index->one_hash ? 1 : made.low64;
    hash[1] = index->one_hash ? 1 : made.high64;
}

static bool is_found_by(const kvleaf_blocks *blocks, int32_t block, const kvl_key *key)
{
    const kvl_entry *entry = &blocks->index.entries[block];
    const uint64_t *there = blocks->contents[block].digest, *digest = key->content->digest;
    return entry->parent == key->parent && entry->salt == key->salt && there[0] == digest[0] && there[1] == digest[1] &&
           memcmp(kvl_block_ids(blocks, block), key->ids, (size_t)blocks->block_size * sizeof *key->ids) == 0;
}

static int32_t find_by_hash(const kvleaf_blocks *blocks, const kvl_key *key)
{
    uint64_t hash[2];
    hash_block(blocks, key, hash);
    int32_t at = *bucket_of(&blocks->index, hash[0]);
    while (at != KVL_NO_ENTRY && !is_found_by(blocks, at, key))
        at = blocks->index.entries[at].next_in_bucket;
    return at;
}

inline int32_t kvl_index_find(const kvleaf_blocks *blocks, const kvl_key *key)
{
    const kvl_entry *entries = blocks->index.entries;
    if (key->parent == KVL_NO_ENTRY)
        return find_by_hash(blocks, key);
    /* Most blocks are continued in one way, or not yet: then there is no need to hash. */
    int32_t latest = entries[key->parent].first_child;
    if (latest == KVL_NO_ENTRY || is_found_by(blocks, latest, key))
        return latest;
    return entries[latest].next_sibling == KVL_NO_ENTRY ? KVL_NO_ENTRY : find_by_hash(blocks, key);
}

static int32_t *partner_of(const kvleaf_blocks *blocks, int32_t entry, int32_t group)
{
    return &blocks->index.partners[(size_t)entry * (size_t)blocks->num_groups + (size_t)group];
}

int32_t kvl_index_block(const kvleaf_blocks *blocks, int32_t entry, int32_t group)
{
    return group == blocks->primary ? entry : *partner_of(blocks, entry, group);
}

int32_t kvl_index_first(const kvleaf_blocks *blocks, int32_t parent, uint64_t salt)
{
    return parent == KVL_NO_ENTRY ? *roots_of(&blocks->index, salt) : blocks->index.entries[parent].first_child;
}

static void tell(const kvleaf_blocks *blocks, kvleaf_event_type type, int32_t group, int32_t block, int32_t at)
{
    const kvl_entry *entry = &blocks->index.entries[at];
    kvleaf_event event = {.type = type, .group = group, .block = block, .salt = entry->salt};
    memcpy(event.hash, entry->hash, sizeof event.hash);
    if (entry->parent != KVL_NO_ENTRY)
        memcpy(event.parent, blocks->index.entries[entry->parent].hash, sizeof event.parent);
    if (type == KVLEAF_EVENT_STORED) {
        event.ids = kvl_block_ids(blocks, at);
        event.count = blocks->block_size;
    }
    blocks->event(blocks->event_user, &event);
}

/* Holds `entry` and all before it for pins of what is behind. */
static void hold_chain(kvleaf_blocks *blocks, int32_t entry, int32_t count)
{
    for (; count && entry != KVL_NO_ENTRY; entry = blocks->index.entries[entry].parent)
        kvl_group_hold(blocks, blocks->primary, entry, count);
}

/* Lets an entry find a block; `before`, and all before that, stay while the block is pinned. */
static inline void make_found(kvleaf_blocks *blocks, int32_t entry, int32_t group, int32_t id, int32_t before)
{
    kvl_block *block = &blocks->groups[group].blocks[id];
    block->entry = entry;
    blocks->groups[group].indexed++;
    hold_chain(blocks, before, block->user_pins);
    if (blocks->event)
        tell(blocks, KVLEAF_EVENT_STORED, group, id, entry);
}

void kvl_index_attach(kvleaf_blocks *blocks, int32_t entry, int32_t group, int32_t id)
{
    *partner_of(blocks, entry, group) = id;
    make_found(blocks, entry, group, id, entry);
}

inline void kvl_index_enter(kvleaf_blocks *blocks, int32_t block, const kvl_key *key)
{
    kvl_index *index = &blocks->index;
    kvl_entry *entry = &index->entries[block];
    kvl_entry *parent = key->parent == KVL_NO_ENTRY ? NULL : &index->entries[key->parent];
    hash_block(blocks, key, entry->hash);
    int32_t *bucket = bucket_of(index, entry->hash[0]);
    int32_t *first = parent ? &parent->first_child : roots_of(index, key->salt);
    entry->parent = key->parent;
    entry->next_in_bucket = *bucket;
    entry->salt = key->salt;
    entry->first_child = entry->previous_sibling = KVL_NO_ENTRY;
    entry->next_sibling = *first;
    entry->children = 0;
    entry->depth = parent ? parent->depth + 1 : 0;
    entry->serial = ++index->serial;
    if (*first != KVL_NO_ENTRY)
        index->entries[*first].previous_sibling = block;
    *first = *bucket = block;
    if (parent)
        parent->children++;
    make_found(blocks, block, blocks->primary, block, key->parent);
}

/* Makes a block of an entry unknown to it; a cached one becomes free. */
static void detach(kvleaf_blocks *blocks, int32_t entry, int32_t group, int32_t id)
{
    kvl_block *block = &blocks->groups[group].blocks[id];
    bool cached = block->next != KVL_UNLISTED;
    if (blocks->event)
        tell(blocks, KVLEAF_EVENT_REMOVED, group, id, entry);
    if (cached)
        kvl_group_unlist(blocks, group, id);
    *partner_of(blocks, entry, group) = KVLEAF_NO_BLOCK;
    block->entry = KVL_NO_ENTRY;
    blocks->groups[group].indexed--;
    if (cached)
        kvl_group_list(blocks, group, id);
}

/* Takes an entry without children out. */
static void remove_leaf(kvleaf_blocks *blocks, int32_t at)
{
    kvl_index *index = &blocks->index;
    kvl_entry *entry = &index->entries[at];
    for (int32_t i = 0; i < blocks->num_groups; i++)
        if (kvl_index_block(blocks, at, i) != KVLEAF_NO_BLOCK)
            detach(blocks, at, i, kvl_index_block(blocks, at, i));
    if (entry->previous_sibling != KVL_NO_ENTRY)
        index->entries[entry->previous_sibling].next_sibling = entry->next_sibling;
    else if (entry->parent != KVL_NO_ENTRY)
        index->entries[entry->parent].first_child = entry->next_sibling;
    else
        *roots_of(index, entry->salt) = entry->next_sibling;
    if (entry->next_sibling != KVL_NO_ENTRY)
        index->entries[entry->next_sibling].previous_sibling = entry->previous_sibling;
    if (entry->parent != KVL_NO_ENTRY)
        index->entries[entry->parent].children--;
    int32_t *link = bucket_of(index, entry->hash[0]);
    while (*link != at)
        link = &index->entries[*link].next_in_bucket;
    *link = entry->next_in_bucket;
    entry->serial = 0;
}

void kvl_index_leave(kvleaf_blocks *blocks, int32_t group, int32_t block)
{
    int32_t entry = blocks->groups[group].blocks[block].entry;
    if (group != blocks->primary) {
        detach(blocks, entry, group, block);
        return;
    }
    const kvl_entry *entries = blocks->index.entries;
    for (int32_t at = entry, parent = KVL_NO_ENTRY;; at = parent) {
        while (entries[at].first_child != KVL_NO_ENTRY)
            at = entries[at].first_child;
        parent = entries[at].parent;
        remove_leaf(blocks, at);
        if (at == entry)
            return;
    }
}

int32_t kvl_index_next(const kvleaf_blocks *blocks, int32_t entry)
{
    const kvl_entry *entries = blocks->index.entries;
    int32_t root = entry;
    if (entry != KVL_NO_ENTRY) {
        if (entries[entry].first_child != KVL_NO_ENTRY)
            return entries[entry].first_child;
        for (; entries[root].parent != KVL_NO_ENTRY; root = entries[root].parent)
            if (entries[root].next_sibling != KVL_NO_ENTRY)
                return entries[root].next_sibling;
    }
    int32_t count = entries ? blocks->groups[blocks->primary].num_blocks : 0;
    for (root++; root < count; root++)
        if (entries[root].serial && entries[root].parent == KVL_NO_ENTRY)
            return root;
    return KVL_NO_ENTRY;
}

bool kvl_index_holds(const kvleaf_blocks *blocks, const kvl_sequence *sequence)
{
    return sequence->indexed == 0 || blocks->index.entries[sequence->tip].serial == sequence->tip_serial;
}

static void set_tip(const kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count, int32_t tip)
{
    sequence->indexed = count;
    sequence->tip = tip;
    sequence->tip_serial = count ? blocks->index.entries[tip].serial : 0;
}

void kvl_index_lengthen(const kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count, int32_t tip)
{
    set_tip(blocks, sequence, sequence->indexed + count, tip);
}

void kvl_index_shorten(const kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count)
{
    if (count == 0 || !kvl_index_holds(blocks, sequence))
        set_tip(blocks, sequence, 0, KVL_NO_ENTRY);
    int32_t tip = sequence->tip;
    for (int32_t i = sequence->indexed; i > count; i--)
        tip = blocks->index.entries[tip].parent;
    if (sequence->indexed > count)
        set_tip(blocks, sequence, count, tip);
}

/* The entry behind `tip` that finds what a block of the primary group holds; the block's own, where there was none. */
static int32_t follow_block(kvleaf_blocks *blocks, int32_t block, int32_t tip, uint64_t salt)
{
    const kvl_key key = {
        .parent = tip, .salt = salt, .content = &blocks->contents[block], .ids = kvl_block_ids(blocks, block)};
    int32_t entry = kvl_index_find(blocks, &key);
    if (entry != KVL_NO_ENTRY && !kvl_group_expired(blocks, blocks->primary, entry))
        return entry;
    if (entry != KVL_NO_ENTRY)
        kvl_index_leave(blocks, blocks->primary, entry);
    kvl_index_enter(blocks, block, &key);
    return block;
}

/* Lets an entry know the sequence's blocks of the other groups, where it knows none. */
static void follow_partners(kvleaf_blocks *blocks, const kvl_sequence *sequence, int32_t at, int32_t entry)
{
    for (int32_t i = 0; i < blocks->num_groups; i++) {
        int32_t own = kvl_sequence_table(sequence, i)[at];
        if (i == blocks->primary || own == KVLEAF_NO_BLOCK || blocks->groups[i].blocks[own].entry != KVL_NO_ENTRY)
            continue;
        int32_t there = kvl_index_block(blocks, entry, i);
        if (there != KVLEAF_NO_BLOCK && kvl_group_expired(blocks, i, there))
            kvl_index_leave(blocks, i, there);
        if (kvl_index_block(blocks, entry, i) == KVLEAF_NO_BLOCK)
            kvl_index_attach(blocks, entry, i, own);
    }
}

/* The blocks of a sequence lie anywhere; what has to be read of the next one comes while this one is hashed. */
static void prefetch_block(const kvleaf_blocks *blocks, int32_t block)
{
    kvl_prefetch(&blocks->index.entries[block]);
    kvl_prefetch(&blocks->contents[block]);
    kvl_prefetch(&blocks->groups[blocks->primary].blocks[block]);
    kvl_prefetch(kvl_block_ids(blocks, block));
}

void kvl_index_follow(kvleaf_blocks *blocks, kvl_sequence *sequence)
{
    if (!blocks->index.entries || sequence->params.no_prefix || sequence->outdated)
        return;
    int64_t ready = sequence->committed < sequence->known ? sequence->committed : sequence->known;
    int32_t full = kvl_column(blocks, ready);
    if (sequence->indexed >= full)
        return;
    if (!kvl_index_holds(blocks, sequence))
        set_tip(blocks, sequence, 0, KVL_NO_ENTRY);
    const int32_t *table = kvl_sequence_table(sequence, blocks->primary);
    int32_t at = sequence->indexed, tip = sequence->tip, block = table[at];
    for (; block != KVLEAF_NO_BLOCK; at++) {
        int32_t next = at + 1 < full ? table[at + 1] : KVLEAF_NO_BLOCK;
        if (next != KVLEAF_NO_BLOCK)
            prefetch_block(blocks, next);
        tip = follow_block(blocks, block, tip, sequence->params.salt);
        if (blocks->num_groups > 1)
            follow_partners(blocks, sequence, at, tip);
        block = next;
    }
    set_tip(blocks, sequence, at, tip);
}

/* Nothing finds the blocks of a group any more; cached ones become free in the order in which they would be evicted. */
static void forget_group(kvleaf_blocks *blocks, int32_t number)
{
    kvl_group *group = &blocks->groups[number];
    for (int32_t i = 0; i < KVL_PRIORITIES; i++) {
        while (group->cached[i].first != KVL_LIST_END) {
            int32_t block = group->cached[i].first;
            kvl_group_unlist(blocks, number, block);
            group->blocks[block].entry = KVL_NO_ENTRY;
            kvl_group_list(blocks, number, block);
        }
    }
    for (int32_t i = 0; i < group->num_blocks; i++) {
        kvl_block *block = &group->blocks[i];
        block->entry = KVL_NO_ENTRY;
        if (block->holds != block->user_pins)
            kvl_group_hold(blocks, number, i, block->user_pins - block->holds);
    }
    group->indexed = 0;
}

kvleaf_status kvleaf_blocks_prefix_clear(kvleaf_blocks *blocks)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    kvl_index *index = &blocks->index;
    if (!index->entries)
        return KVLEAF_OK;
    for (int32_t i = 0; i < blocks->num_groups; i++)
        forget_group(blocks, i);
    clear_index(blocks);
    for (int32_t i = 0; i < blocks->groups[blocks->primary].num_blocks; i++)
        index->entries[i].serial = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++)
        blocks->sequences[i].outdated = blocks->sequences[i].planned > 0;
    const kvleaf_event event = {.type = KVLEAF_EVENT_CLEARED, .block = KVLEAF_NO_BLOCK};
    if (blocks->event)
        blocks->event(blocks->event_user, &event);
    return KVLEAF_OK;
}
