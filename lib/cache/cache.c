/* SPDX-License-Identifier: Apache-2.0 */
/* Making a cache. */
#include "cache/cache.h"

#include <limits.h>

#define DEFAULT_SEQUENCES 256

static kvleaf_status check_params(const kvleaf_device *device, const kvleaf_cache_params *params)
{
    kvleaf_status status =
        kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "kvleaf_cache_params");
    if (status)
        return status;
    if (!params->layers)
        return kvl_fail_null("layers");
    if (params->num_layers < 1)
        return kvl_fail_range("num_layers", params->num_layers, 1, INT32_MAX);
    if (!params->pools)
        return kvl_fail_null("pools");
    if (params->num_pools < 1)
        return kvl_fail_range("num_pools", params->num_pools, 1, params->num_layers);
    for (int32_t i = 0; i < params->num_pools; i++) {
        if (!params->pools[i])
            return kvl_fail(KVLEAF_INVALID, "pools", i, params->num_pools, "pools[%d] is null", i);
        if (kvl_pool_device(params->pools[i]) != device)
            return kvl_fail(KVLEAF_FOREIGN, "pools", i, 0, "pools[%d] is of another device object", i);
    }
    if (!kvleaf_dtype_size(params->q_dtype))
        return kvl_fail_range("q_dtype", params->q_dtype, KVLEAF_F16, KVLEAF_F32);
    if (!kvleaf_dtype_size(params->out_dtype))
        return kvl_fail_range("out_dtype", params->out_dtype, KVLEAF_F16, KVLEAF_F32);
    if (params->max_context < 0)
        return kvl_fail_range("max_context", params->max_context, 0, INT32_MAX);
    if (params->swap_blocks < 0)
        return kvl_fail_range("swap_blocks", params->swap_blocks, 0, INT32_MAX);
    if (params->num_pools > 1 && (params->free_order || params->free_count))
        return kvl_fail(KVLEAF_INVALID, "free_order", params->free_count, 0,
                        "free_order is for a cache of one group, there are %d pools", params->num_pools);
    return KVLEAF_OK;
}

/* Columns of a block table. Without a window all of a sequence's blocks are in the pool at once; with windows in all
 * groups a sequence may be longer than any pool. */
static int32_t count_columns(const kvleaf_cache *cache, int32_t max_context)
{
    int64_t full = INT32_MAX, largest = 0;
    for (int32_t i = 0; i < cache->num_groups; i++) {
        const kvl_cache_group *group = &cache->groups[i];
        if (!group->geometry.window && group->num_blocks < full)
            full = group->num_blocks;
        if (group->num_blocks > largest)
            largest = group->num_blocks;
    }
    int64_t columns = max_context ? kvl_ceil_div(max_context, cache->block_size) : largest;
    if (columns > full)
        columns = full;
    if (columns > INT_MAX / 2 / cache->block_size)
        columns = INT_MAX / 2 / cache->block_size; /* lengths in tokens are int32 on the device */
    return (int32_t)columns;
}

static kvleaf_status make_blocks(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    const kvleaf_allocator *allocator = &cache->device->allocator;
    kvleaf_block_group *groups = kvl_alloc(allocator, (size_t)cache->num_groups, sizeof *groups);
    if (!groups)
        return kvl_fail_memory((size_t)cache->num_groups * sizeof *groups);
    for (int32_t i = 0; i < cache->num_groups; i++)
        groups[i] = (kvleaf_block_group){
            .num_blocks = cache->groups[i].num_blocks,
            .window = cache->groups[i].geometry.window,
            .swap_blocks = params->swap_blocks,
        };
    groups[0].free_order = params->free_order;
    groups[0].free_count = params->free_count;
    const kvleaf_blocks_params blocks = {
        .struct_size = sizeof blocks,
        .block_size = cache->block_size,
        .max_sequences = params->max_sequences,
        .max_blocks_per_seq = cache->columns,
        .groups = groups,
        .num_groups = cache->num_groups,
        .no_prefix_cache = params->no_prefix_cache,
        .eviction = params->eviction,
        .event = params->event,
        .event_user = params->event_user,
        .now_ms = params->now_ms,
        .now_user = params->now_user,
        .allocator = *allocator,
    };
    kvleaf_status status = kvleaf_blocks_create(&blocks, &cache->blocks);
    kvl_free(allocator, groups);
    return status;
}

static kvleaf_status make_tables(kvleaf_cache *cache)
{
    int64_t entries = (int64_t)cache->columns * cache->max_sequences;
    if (entries > INT32_MAX)
        return kvl_fail(KVLEAF_INVALID, "max_context", entries, INT32_MAX,
                        "a block table of %d sequences and %d blocks each has %lld entries, the limit is %d",
                        cache->max_sequences, cache->columns, (long long)entries, INT32_MAX);
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = kvl_device_buffer(cache->device, "the block table (max_sequences, max_context)",
                                   (uint64_t)entries * sizeof(int32_t), &cache->groups[i].table);
    return status;
}

static kvleaf_status fill_cache(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    kvleaf_status status = kvl_cache_form_groups(cache, params);
    if (status)
        return status;
    cache->max_sequences = params->max_sequences ? params->max_sequences : DEFAULT_SEQUENCES;
    cache->columns = count_columns(cache, params->max_context);
    status = kvl_tail_create(&cache->tail, cache->device);
    if (!status)
        status = make_blocks(cache, params);
    return status ? status : make_tables(cache);
}

kvleaf_status kvleaf_cache_create(kvleaf_device *device, const kvleaf_cache_params *params, kvleaf_cache **out)
{
    if (!device)
        return kvl_fail_null("device");
    if (!out)
        return kvl_fail_null("out");
    kvleaf_status status = check_params(device, params);
    if (status)
        return status;
    kvleaf_cache *cache = kvl_alloc(&device->allocator, 1, sizeof *cache);
    if (!cache)
        return kvl_fail_memory(sizeof *cache);
    cache->device = device;
    cache->references = 1;
    kvl_device_retain(device);
    status = fill_cache(cache, params);
    if (status) {
        kvl_cache_release(cache);
        return status;
    }
    *out = cache;
    return KVLEAF_OK;
}

static void release_group(kvleaf_device *device, kvl_cache_group *group)
{
    if (group->table)
        device->cl->ReleaseMemObject(group->table);
    kvl_pool_copier_destroy(&group->copier);
    kvl_host_pool_destroy(&group->host);
    if (group->pool)
        kvl_pool_release(group->pool);
}

void kvl_cache_release(kvleaf_cache *cache)
{
    if (--cache->references > 0)
        return;
    kvleaf_device *device = cache->device;
    kvl_tail_destroy(&cache->tail);
    for (int32_t i = 0; i < cache->num_groups; i++)
        release_group(device, &cache->groups[i]);
    kvleaf_blocks_destroy(&cache->blocks);
    kvl_free(&device->allocator, cache->groups);
    kvl_free(&device->allocator, cache->layers);
    kvl_free(&device->allocator, cache);
    kvl_device_release(device);
}

void kvleaf_cache_destroy(kvleaf_cache **cache)
{
    if (!cache || !*cache)
        return;
    kvl_cache_release(*cache);
    *cache = NULL;
}

int32_t kvleaf_cache_group(const kvleaf_cache *cache, int32_t layer)
{
    return cache && layer >= 0 && layer < cache->num_layers ? cache->layers[layer].group : -1;
}
