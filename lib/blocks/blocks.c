/* SPDX-License-Identifier: Apache-2.0 */
/* Making a manager, the life of a block, copy-on-write, accounting. */
#include "blocks/blocks.h"
#include "blocks/handle.h"

#include <time.h>

#define MAX_BLOCK_SIZE     256
#define DEFAULT_BLOCK_SIZE 16
#define DEFAULT_SEQUENCES  256

/* Bits that differ from manager to manager without a counter that all of them would share: the address tells those
 * apart that live together, the clock those that live one after the other at one address. */
static uint64_t distinct_bits(const kvleaf_blocks *blocks)
{
    struct timespec now = {0};
    timespec_get(&now, TIME_UTC);
    uint64_t bits = (uint64_t)(uintptr_t)blocks ^ ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u; /* the finaliser of splitmix64 */
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

static kvleaf_status check_params(const kvleaf_blocks_params *params)
{
    kvleaf_status status =
        kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "kvleaf_blocks_params");
    if (status)
        return status;
    if (params->num_blocks < 1)
        return kvl_fail_range("num_blocks", params->num_blocks, 1, INT32_MAX);
    if (params->block_size < 0 || params->block_size > MAX_BLOCK_SIZE)
        return kvl_fail_range("block_size", params->block_size, 0, MAX_BLOCK_SIZE);
    if (params->max_sequences < 0 || params->max_sequences > KVL_MAX_SEQUENCES)
        return kvl_fail_range("max_sequences", params->max_sequences, 0, KVL_MAX_SEQUENCES);
    if (params->max_blocks_per_seq < 0)
        return kvl_fail_range("max_blocks_per_seq", params->max_blocks_per_seq, 0, INT32_MAX);
    if (params->free_count < 0 || params->free_count > params->num_blocks)
        return kvl_fail_range("free_count", params->free_count, 0, params->num_blocks);
    if (!params->free_order && params->free_count > 0)
        return kvl_fail(KVLEAF_INVALID, "free_order", 0, 0, "free_order is null and free_count is %d",
                        params->free_count);
    if (!params->allocator.allocate != !params->allocator.release)
        return kvl_fail(KVLEAF_INVALID, "allocator", 0, 0, "allocator has only one of allocate and release");
    return KVLEAF_OK;
}

static kvleaf_status fill_free_list(kvleaf_blocks *blocks, const int32_t *order, int32_t count)
{
    kvl_free_list_init(&blocks->free, blocks->blocks, blocks->num_blocks);
    for (int32_t i = 0; i < count; i++) {
        int32_t block = order ? order[i] : i;
        if (block < 0 || block >= blocks->num_blocks)
            return kvl_fail(KVLEAF_INVALID, "free_order", block, blocks->num_blocks - 1,
                            "free_order[%d] is %d, must be 0 .. %d", i, block, blocks->num_blocks - 1);
        if (!kvl_free_list_give(&blocks->free, block))
            return kvl_fail(KVLEAF_INVALID, "free_order", block, 1, "free_order[%d] is %d, which stands before it", i,
                            block);
    }
    blocks->used = blocks->num_blocks - count;
    return KVLEAF_OK;
}

static kvleaf_status allocate_parts(kvleaf_blocks *blocks)
{
    size_t sequences = (size_t)blocks->max_sequences, count = (size_t)blocks->num_blocks;
    blocks->blocks = kvl_alloc(&blocks->allocator, count, sizeof *blocks->blocks);
    if (!blocks->blocks)
        return kvl_fail_memory(count * sizeof *blocks->blocks);
    blocks->sequences = kvl_alloc(&blocks->allocator, sequences, sizeof *blocks->sequences);
    if (!blocks->sequences)
        return kvl_fail_memory(sequences * sizeof *blocks->sequences);
    blocks->copies = kvl_alloc(&blocks->allocator, sequences, sizeof *blocks->copies);
    if (!blocks->copies)
        return kvl_fail_memory(sequences * sizeof *blocks->copies);
    return KVLEAF_OK;
}

static void init_sequences(kvleaf_blocks *blocks)
{
    uint64_t bits = distinct_bits(blocks);
    blocks->tag = kvl_handle_tag(bits);
    blocks->first_unused = 0;
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        blocks->sequences[i].generation = kvl_handle_next((uint32_t)bits);
        blocks->sequences[i].next_unused = i + 1 < blocks->max_sequences ? i + 1 : KVL_LIST_END;
    }
}

kvleaf_status kvleaf_blocks_create(const kvleaf_blocks_params *params, kvleaf_blocks **out)
{
    if (!out)
        return kvl_fail_null("out");
    kvleaf_status status = check_params(params);
    if (status)
        return status;
    kvleaf_blocks *blocks = kvl_alloc(&params->allocator, 1, sizeof *blocks);
    if (!blocks)
        return kvl_fail_memory(sizeof *blocks);
    blocks->allocator = params->allocator;
    blocks->num_blocks = params->num_blocks;
    blocks->block_size = params->block_size ? params->block_size : DEFAULT_BLOCK_SIZE;
    blocks->max_sequences = params->max_sequences ? params->max_sequences : DEFAULT_SEQUENCES;
    blocks->max_blocks_per_seq = params->max_blocks_per_seq ? params->max_blocks_per_seq : params->num_blocks;
    status = allocate_parts(blocks);
    if (!status) {
        for (int32_t i = 0; i < blocks->num_blocks; i++)
            blocks->blocks[i].copy = KVL_NO_COPY;
        init_sequences(blocks);
        status =
            fill_free_list(blocks, params->free_order, params->free_order ? params->free_count : params->num_blocks);
    }
    if (status) {
        kvleaf_blocks_destroy(&blocks);
        return status;
    }
    *out = blocks;
    return KVLEAF_OK;
}

void kvleaf_blocks_destroy(kvleaf_blocks **blocks)
{
    if (!blocks || !*blocks)
        return;
    kvleaf_blocks *gone = *blocks;
    kvleaf_allocator allocator = gone->allocator;
    for (int32_t i = 0; gone->sequences && i < gone->max_sequences; i++)
        kvl_free(&allocator, gone->sequences[i].table);
    kvl_free(&allocator, gone->copies);
    kvl_free(&allocator, gone->sequences);
    kvl_free(&allocator, gone->blocks);
    kvl_free(&allocator, gone);
    *blocks = NULL;
}

int32_t kvl_blocks_take(kvleaf_blocks *blocks)
{
    int32_t block = kvl_free_list_take(&blocks->free);
    blocks->blocks[block].references = 1;
    blocks->used++;
    return block;
}

/* Ends one pending copy's hold on its source, which is free if nothing else holds it. */
static void unpin(kvleaf_blocks *blocks, int32_t id)
{
    kvl_block *source = &blocks->blocks[id];
    if (--source->pins > 0)
        return;
    source->pinned_slots = 0;
    if (source->references == 0) {
        blocks->pinned--;
        blocks->used--;
        kvl_free_list_give(&blocks->free, id);
    }
}

/* Forgets the pending copy that was to fill a block; the last in the list takes its place there. */
static void drop_copy(kvleaf_blocks *blocks, kvl_block *filled)
{
    int32_t at = filled->copy, source = blocks->copies[at].src;
    blocks->copies[at] = blocks->copies[--blocks->num_copies];
    blocks->blocks[blocks->copies[at].dst].copy = at;
    filled->copy = KVL_NO_COPY;
    unpin(blocks, source);
}

/* Files a block that has just lost its last reference. */
static void settle(kvleaf_blocks *blocks, int32_t id)
{
    kvl_block *block = &blocks->blocks[id];
    if (block->pins > 0) {
        blocks->pinned++;
        return;
    }
    blocks->used--;
    kvl_free_list_give(&blocks->free, id);
    if (block->copy != KVL_NO_COPY)
        drop_copy(blocks, block);
}

kvleaf_status kvl_blocks_release(kvleaf_blocks *blocks, const int32_t *ids, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        bool in_range = ids[i] >= 0 && ids[i] < blocks->num_blocks;
        if (in_range && blocks->blocks[ids[i]].references > 0) {
            blocks->blocks[ids[i]].references--;
            continue;
        }
        for (int32_t undo = 0; undo < i; undo++)
            blocks->blocks[ids[undo]].references++;
        if (!in_range)
            return kvl_fail_range("block", ids[i], 0, blocks->num_blocks - 1);
        return kvl_fail(KVLEAF_INVALID, "block", ids[i], 0, "block %d is given back more often than it was taken",
                        ids[i]);
    }
    /* A block that is named as often as it has references loses the last of them where it is named last. */
    for (int32_t i = 0; i < count; i++)
        blocks->blocks[ids[i]].references++;
    for (int32_t i = count - 1; i >= 0; i--)
        if (--blocks->blocks[ids[i]].references == 0)
            settle(blocks, ids[i]);
    return KVLEAF_OK;
}

bool kvl_blocks_must_copy(const kvleaf_blocks *blocks, int32_t block, int32_t slot)
{
    const kvl_block *at = &blocks->blocks[block];
    return at->references > 1 || slot < at->pinned_slots;
}

int32_t kvl_blocks_copy_on_write(kvleaf_blocks *blocks, int32_t block, int32_t slots)
{
    kvl_block *left = &blocks->blocks[block];
    /* What a pending copy will fill is copied from where that one reads. */
    int32_t from = left->copy == KVL_NO_COPY ? block : blocks->copies[left->copy].src;
    kvl_block *source = &blocks->blocks[from];
    int32_t taken = kvl_blocks_take(blocks);
    blocks->blocks[taken].copy = blocks->num_copies;
    blocks->copies[blocks->num_copies++] = (kvleaf_block_copy){.src = from, .dst = taken};
    source->pins++;
    if (source->pinned_slots < slots)
        source->pinned_slots = slots;
    if (--left->references == 0)
        settle(blocks, block);
    return taken;
}

kvleaf_status kvleaf_blocks_copies(const kvleaf_blocks *blocks, const kvleaf_block_copy **copies, int32_t *count)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (!copies || !count)
        return kvl_fail_null(copies ? "count" : "copies");
    *copies = blocks->copies;
    *count = blocks->num_copies;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_copies_done(kvleaf_blocks *blocks, int32_t count)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    if (count < 0 || count > blocks->num_copies)
        return kvl_fail_range("count", count, 0, blocks->num_copies);
    for (int32_t i = 0; i < count; i++) {
        blocks->blocks[blocks->copies[i].dst].copy = KVL_NO_COPY;
        unpin(blocks, blocks->copies[i].src);
    }
    blocks->num_copies -= count;
    for (int32_t i = 0; i < blocks->num_copies; i++) {
        blocks->copies[i] = blocks->copies[i + count];
        blocks->blocks[blocks->copies[i].dst].copy = i;
    }
    blocks->copies_done += (uint64_t)count;
    return KVLEAF_OK;
}

/* Slots of referenced blocks that no sequence has a token in. All blocks of a table but the last are full, so only a
 * block that is the last of every sequence that holds it has such slots. */
static int64_t empty_slots(const kvleaf_blocks *blocks)
{
    int64_t empty = 0;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < blocks->max_sequences; i++) {
            const kvl_sequence *sequence = &blocks->sequences[i];
            if (sequence->next_unused != KVL_UNLISTED || sequence->count == 0)
                continue;
            kvl_block *last = &blocks->blocks[sequence->table[sequence->count - 1]];
            int32_t tokens = (int32_t)(sequence->extended - (int64_t)(sequence->count - 1) * blocks->block_size);
            if (pass == 0) {
                last->tails++;
                last->tail_tokens = tokens > last->tail_tokens ? tokens : last->tail_tokens;
                continue;
            }
            if (last->tails == last->references)
                empty += blocks->block_size - last->tail_tokens;
            last->tails = last->tail_tokens = 0; /* counted once: references is not 0 */
        }
    }
    return empty;
}

kvleaf_status kvleaf_blocks_query(const kvleaf_blocks *blocks, kvleaf_blocks_stats *stats)
{
    if (!blocks)
        return kvl_fail_null("blocks");
    kvleaf_status status =
        kvl_check_struct(stats, stats ? stats->struct_size : 0, sizeof *stats, "kvleaf_blocks_stats");
    if (status)
        return status;
    stats->total = blocks->num_blocks;
    stats->used = blocks->used;
    stats->cached = 0;
    stats->free = blocks->free.count;
    stats->pinned = blocks->pinned;
    stats->sequences = blocks->live;
    stats->tokens = blocks->tokens;
    stats->slots_wasted = empty_slots(blocks) + (int64_t)blocks->pinned * blocks->block_size;
    stats->copies = blocks->copies_done;
    return KVLEAF_OK;
}

int32_t kvleaf_blocks_refcount(const kvleaf_blocks *blocks, int32_t block)
{
    if (!blocks || block < 0 || block >= blocks->num_blocks)
        return -1;
    return blocks->blocks[block].references;
}
