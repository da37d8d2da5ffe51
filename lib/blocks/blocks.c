/* SPDX-License-Identifier: Apache-2.0 */
/* Making a manager, accounting. */
#include "blocks/handle.h"
#include "blocks/index.h"

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

static kvleaf_status check_group(const kvleaf_block_group *group)
{
    if (group->num_blocks < 1)
        return kvl_fail_range("num_blocks", group->num_blocks, 1, INT32_MAX);
    if (group->window < 0)
        return kvl_fail_range("window", group->window, 0, INT32_MAX);
    if (group->swap_blocks < 0)
        return kvl_fail_range("swap_blocks", group->swap_blocks, 0, INT32_MAX);
    if (group->free_count < 0 || group->free_count > group->num_blocks)
        return kvl_fail_range("free_count", group->free_count, 0, group->num_blocks);
    if (!group->free_order && group->free_count > 0)
        return kvl_fail(KVLEAF_INVALID, "free_order", 0, 0, "free_order is null and free_count is %d",
                        group->free_count);
    return KVLEAF_OK;
}

static kvleaf_status check_params(const kvleaf_blocks_params *params, const kvleaf_block_group *groups,
                                  int32_t num_groups)
{
    if (num_groups < 1 || num_groups > KVL_MAX_GROUPS)
        return kvl_fail_range("num_groups", num_groups, 1, KVL_MAX_GROUPS);
    for (int32_t i = 0; i < num_groups; i++) {
        kvleaf_status status = check_group(&groups[i]);
        if (status)
            return status;
    }
    if (params->block_size < 0 || params->block_size > MAX_BLOCK_SIZE)
        return kvl_fail_range("block_size", params->block_size, 0, MAX_BLOCK_SIZE);
    if (params->max_sequences < 0 || params->max_sequences > KVL_MAX_SEQUENCES)
        return kvl_fail_range("max_sequences", params->max_sequences, 0, KVL_MAX_SEQUENCES);
    if (params->max_blocks_per_seq < 0)
        return kvl_fail_range("max_blocks_per_seq", params->max_blocks_per_seq, 0, INT32_MAX);
    if (params->no_prefix_cache < 0 || params->no_prefix_cache > 1)
        return kvl_fail_range("no_prefix_cache", params->no_prefix_cache, 0, 1);
    if (!params->allocator.allocate != !params->allocator.release)
        return kvl_fail(KVLEAF_INVALID, "allocator", 0, 0, "allocator has only one of allocate and release");
    return KVLEAF_OK;
}

static kvleaf_status make_sequences(kvleaf_blocks *blocks)
{
    size_t count = (size_t)blocks->max_sequences;
    uint64_t bits = distinct_bits(blocks);
    blocks->tag = kvl_handle_tag(bits);
    blocks->sequences = kvl_alloc(&blocks->allocator, count, sizeof *blocks->sequences);
    if (!blocks->sequences)
        return kvl_fail_memory(count * sizeof *blocks->sequences);
    for (int32_t i = 0; i < blocks->max_sequences; i++) {
        blocks->sequences[i].generation = kvl_handle_next((uint32_t)bits);
        blocks->sequences[i].next_unused = i + 1 < blocks->max_sequences ? i + 1 : KVL_LIST_END;
    }
    return KVLEAF_OK;
}

/* What is noted of the tokens in the primary group's blocks. */
static kvleaf_status make_tokens(kvleaf_blocks *blocks)
{
    size_t count = (size_t)blocks->groups[blocks->primary].num_blocks, slots = count * (size_t)blocks->block_size;
    blocks->ids = kvl_alloc(&blocks->allocator, slots, sizeof *blocks->ids);
    if (!blocks->ids)
        return kvl_fail_memory(slots * sizeof *blocks->ids);
    blocks->contents = kvl_alloc(&blocks->allocator, count, sizeof *blocks->contents);
    return blocks->contents ? KVLEAF_OK : kvl_fail_memory(count * sizeof *blocks->contents);
}

/* The first group without a window, else the one of the largest. */
static int32_t find_primary(const kvleaf_block_group *groups, int32_t num_groups)
{
    int32_t primary = 0;
    for (int32_t i = 1; i < num_groups && groups[primary].window > 0; i++)
        if (groups[i].window == 0 || groups[i].window > groups[primary].window)
            primary = i;
    return primary;
}

/* -1 where it is no power of two. */
static int32_t log2_of(int32_t value)
{
    int32_t shift = 0;
    while (1 << shift < value)
        shift++;
    return 1 << shift == value ? shift : -1;
}

static kvleaf_status fill_blocks(kvleaf_blocks *blocks, const kvleaf_blocks_params *params,
                                 const kvleaf_block_group *groups, int32_t num_groups)
{
    int32_t most = 0;
    for (int32_t i = 0; i < num_groups; i++)
        most = groups[i].num_blocks > most ? groups[i].num_blocks : most;
    blocks->allocator = params->allocator;
    blocks->num_groups = num_groups;
    blocks->block_size = params->block_size ? params->block_size : DEFAULT_BLOCK_SIZE;
    blocks->block_shift = log2_of(blocks->block_size);
    blocks->max_sequences = params->max_sequences ? params->max_sequences : DEFAULT_SEQUENCES;
    blocks->max_blocks_per_seq = params->max_blocks_per_seq ? params->max_blocks_per_seq : most;
    blocks->primary = find_primary(groups, num_groups);
    blocks->event = params->event;
    blocks->event_user = params->event_user;
    blocks->now_ms = params->now_ms;
    blocks->now_user = params->now_user;
    if (params->eviction)
        blocks->eviction = *params->eviction;
    kvleaf_status status = make_sequences(blocks);
    for (int32_t i = 0; !status && i < num_groups; i++)
        status = kvl_group_create(blocks, i, &groups[i]);
    if (!status)
        status = make_tokens(blocks);
    for (int32_t i = 0; !status && i < num_groups; i++)
        status = kvl_swap_create_group(blocks, i, groups[i].swap_blocks);
    if (!status)
        status = kvl_swap_create(blocks);
    if (!status && !params->no_prefix_cache)
        status = kvl_index_create(blocks);
    return status;
}

kvleaf_status kvleaf_blocks_create(const kvleaf_blocks_params *params, kvleaf_blocks **out)
{
    if (!out)
        return kvl_fail_null("out");
    kvleaf_status status =
        kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "kvleaf_blocks_params");
    if (status)
        return status;
    const kvleaf_block_group only = {
        .num_blocks = params->num_blocks,
        .window = params->window,
        .swap_blocks = params->swap_blocks,
        .free_order = params->free_order,
        .free_count = params->free_count,
    };
    const kvleaf_block_group *groups = params->groups ? params->groups : &only;
    int32_t num_groups = params->groups ? params->num_groups : 1;
    if (!params->groups && params->num_groups)
        return kvl_fail_null("groups");
    status = check_params(params, groups, num_groups);
    if (status)
        return status;
    kvleaf_blocks *blocks = kvl_alloc(&params->allocator, 1, sizeof *blocks);
    if (!blocks)
        return kvl_fail_memory(sizeof *blocks);
    status = fill_blocks(blocks, params, groups, num_groups);
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
    for (int32_t i = 0; gone->sequences && i < gone->max_sequences; i++) {
        kvl_free(&allocator, gone->sequences[i].table);
        kvl_free(&allocator, gone->sequences[i].spare);
    }
    for (int32_t i = 0; i < gone->num_groups; i++)
        kvl_group_destroy(gone, i);
    kvl_index_destroy(gone);
    kvl_free(&allocator, gone->contents);
    kvl_free(&allocator, gone->ids);
    kvl_swap_destroy(gone);
    kvl_free(&allocator, gone->before);
    kvl_free(&allocator, gone->sequences);
    kvl_free(&allocator, gone);
    *blocks = NULL;
}

/* Slots of a group's referenced blocks that no sequence has a token in. All blocks of a table but the last are full, so
 * only a block that is the last of every sequence that holds it has such slots. */
static int64_t empty_slots(const kvleaf_blocks *blocks, int32_t group)
{
    int64_t empty = 0;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < blocks->max_sequences; i++) {
            const kvl_sequence *sequence = &blocks->sequences[i];
            if (sequence->next_unused != KVL_UNLISTED || sequence->count == 0 || sequence->residence == KVL_SWAPPED)
                continue;
            int32_t block = kvl_sequence_table(sequence, group)[sequence->count - 1];
            if (block == KVLEAF_NO_BLOCK)
                continue;
            kvl_block *last = &blocks->groups[group].blocks[block];
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

static void add_group(const kvleaf_blocks *blocks, int32_t number, kvleaf_blocks_stats *stats)
{
    const kvl_group *group = &blocks->groups[number];
    stats->total += group->num_blocks;
    stats->used += group->used;
    stats->cached += group->num_cached;
    stats->free += group->free.count;
    stats->indexed += group->indexed;
    stats->evictions += group->evictions;
    stats->host_total += group->num_hosts;
    stats->host_used += group->hosts_used;
    stats->swapped_out += group->swapped_out;
    stats->swapped_in += group->swapped_in;
    stats->pinned += group->pinned;
    stats->slots_wasted += empty_slots(blocks, number) + (int64_t)group->pinned * blocks->block_size;
    stats->copies += group->copies_done;
}

static kvleaf_status fill_stats(const kvleaf_blocks *blocks, int32_t first, int32_t count, kvleaf_blocks_stats *stats)
{
    kvleaf_status status =
        kvl_check_struct(stats, stats ? stats->struct_size : 0, sizeof *stats, "kvleaf_blocks_stats");
    if (status)
        return status;
    *stats = (kvleaf_blocks_stats){
        .struct_size = sizeof *stats,
        .sequences = blocks->live,
        .swapped = blocks->swap.sequences,
        .tokens = blocks->tokens,
        .looked_up = blocks->looked_up,
        .hits = blocks->hits,
    };
    for (int32_t i = first; i < first + count; i++)
        add_group(blocks, i, stats);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_blocks_query(const kvleaf_blocks *blocks, kvleaf_blocks_stats *stats)
{
    return blocks ? fill_stats(blocks, 0, blocks->num_groups, stats) : kvl_fail_null("blocks");
}

kvleaf_status kvleaf_blocks_query_group(const kvleaf_blocks *blocks, int32_t group, kvleaf_blocks_stats *stats)
{
    kvleaf_status status = kvl_group_check(blocks, group);
    return status ? status : fill_stats(blocks, group, 1, stats);
}
