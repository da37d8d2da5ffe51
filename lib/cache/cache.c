/* SPDX-License-Identifier: Apache-2.0 */
/* Making a cache, and its sequences. */
#include "cache/cache.h"

#include <limits.h>
#include <math.h>

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
        return kvl_fail_range("num_pools", params->num_pools, 1, 1);
    if (params->num_pools > 1)
        return kvl_fail(KVLEAF_UNSUPPORTED, "num_pools", params->num_pools, 1, "num_pools is %d, only 1 is served",
                        params->num_pools);
    if (!params->pools[0])
        return kvl_fail_null("pools[0]");
    if (kvl_pool_device(params->pools[0]) != device)
        return kvl_fail(KVLEAF_FOREIGN, "pools", 0, 0, "pools[0] is of another device object");
    if (!kvleaf_dtype_size(params->q_dtype))
        return kvl_fail_range("q_dtype", params->q_dtype, KVLEAF_F16, KVLEAF_F32);
    if (!kvleaf_dtype_size(params->out_dtype))
        return kvl_fail_range("out_dtype", params->out_dtype, KVLEAF_F16, KVLEAF_F32);
    if (params->max_context < 0)
        return kvl_fail_range("max_context", params->max_context, 0, INT32_MAX);
    return KVLEAF_OK;
}

static int32_t head_dim_v(const kvleaf_layer *layer)
{
    return layer->head_dim_v ? layer->head_dim_v : layer->head_dim_k;
}

static kvleaf_status check_layer(const kvleaf_layer *layers, int32_t i)
{
    const kvleaf_layer *layer = &layers[i], *first = &layers[0];
    if (layer->num_kv_heads < 1)
        return kvl_fail_range("num_kv_heads", layer->num_kv_heads, 1, INT32_MAX);
    if (layer->num_heads < 1 || layer->num_heads % layer->num_kv_heads)
        return kvl_fail(KVLEAF_INVALID, "num_heads", layer->num_heads, layer->num_kv_heads,
                        "layer %d has %d heads, must be a multiple of its %d KV heads", i, layer->num_heads,
                        layer->num_kv_heads);
    if (head_dim_v(layer) != layer->head_dim_k)
        return kvl_fail(KVLEAF_UNSUPPORTED, "head_dim_v", layer->head_dim_v, layer->head_dim_k,
                        "layer %d has head_dim_v %d, only head_dim_k (%d) is served", i, layer->head_dim_v,
                        layer->head_dim_k);
    if (layer->window)
        return kvl_fail(KVLEAF_UNSUPPORTED, "window", layer->window, 0, "layer %d has window %d, only 0 is served", i,
                        layer->window);
    if (layer->softcap != 0)
        return kvl_fail(KVLEAF_UNSUPPORTED, "softcap", 0, 0, "layer %d has softcap %g, only 0 is served", i,
                        (double)layer->softcap);
    if (layer->sinks)
        return kvl_fail(KVLEAF_UNSUPPORTED, "sinks", i, 0, "layer %d has sinks, which are not served", i);
    if (!(layer->softmax_scale >= 0) || isinf(layer->softmax_scale))
        return kvl_fail(KVLEAF_INVALID, "softmax_scale", i, 0,
                        "layer %d has softmax_scale %g, must be finite and not "
                        "negative",
                        i, (double)layer->softmax_scale);
    if (layer->kv_layer < 0 || layer->kv_layer > i)
        return kvl_fail(KVLEAF_INVALID, "kv_layer", layer->kv_layer, i,
                        "layer %d has kv_layer %d, must be 0 or name an earlier layer, 1 .. %d", i, layer->kv_layer, i);
    if (layer->num_heads != first->num_heads || layer->num_kv_heads != first->num_kv_heads ||
        layer->head_dim_k != first->head_dim_k)
        return kvl_fail(KVLEAF_UNSUPPORTED, "layers", i, 0,
                        "layer %d has another geometry than layer 0, only one is served", i);
    return KVLEAF_OK;
}

static kvleaf_status check_pool(const kvleaf_cache_params *params, const kvleaf_pool_params *pool)
{
    const kvleaf_layer *layer = &params->layers[0];
    int32_t owners = 0;
    for (int32_t i = 0; i < params->num_layers; i++)
        owners += params->layers[i].kv_layer == 0;
    const struct {
        const char *field;
        int32_t wanted, there;
    } pairs[] = {
        {"num_layers", owners, pool->num_layers},
        {"num_kv_heads", layer->num_kv_heads, pool->num_kv_heads},
        {"head_dim_k", layer->head_dim_k, pool->head_dim_k},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (pairs[i].wanted != pairs[i].there)
            return kvl_fail(KVLEAF_INVALID, pairs[i].field, pairs[i].wanted, pairs[i].there,
                            "the layers need a pool with %s %d, pools[0] has %d", pairs[i].field, pairs[i].wanted,
                            pairs[i].there);
    }
    return KVLEAF_OK;
}

static kvleaf_status copy_layers(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    int32_t owners = 0;
    cache->layers = kvl_alloc(&cache->device->allocator, (size_t)params->num_layers, sizeof *cache->layers);
    if (!cache->layers)
        return kvl_fail_memory((size_t)params->num_layers * sizeof *cache->layers);
    cache->num_layers = params->num_layers;
    for (int32_t i = 0; i < params->num_layers; i++) {
        const kvleaf_layer *layer = &params->layers[i];
        float scale = layer->softmax_scale;
        cache->layers[i] = (kvl_cache_layer){
            .owns = layer->kv_layer == 0,
            .pool_layer = layer->kv_layer == 0 ? owners++ : cache->layers[layer->kv_layer - 1].pool_layer,
            .softmax_scale = scale > 0 ? scale : 1.0f / sqrtf((float)layer->head_dim_k),
        };
    }
    return KVLEAF_OK;
}

static kvleaf_status make_blocks(kvleaf_cache *cache, const kvleaf_cache_params *params, const kvleaf_pool_params *pool)
{
    int64_t columns = params->max_context ? kvl_ceil_div(params->max_context, pool->block_size) : pool->num_blocks;
    if (columns > pool->num_blocks)
        columns = pool->num_blocks;
    if (columns > INT_MAX / 2 / pool->block_size)
        columns = INT_MAX / 2 / pool->block_size; /* lengths in tokens are int32 on the device */
    cache->columns = (int32_t)columns;
    cache->num_blocks = pool->num_blocks;
    cache->max_sequences = params->max_sequences ? params->max_sequences : DEFAULT_SEQUENCES;
    const kvleaf_blocks_params blocks = {
        .struct_size = sizeof blocks,
        .num_blocks = pool->num_blocks,
        .block_size = pool->block_size,
        .max_sequences = params->max_sequences,
        .max_blocks_per_seq = cache->columns,
        .free_order = params->free_order,
        .free_count = params->free_count,
        .allocator = cache->device->allocator,
    };
    kvleaf_status status = kvleaf_blocks_create(&blocks, &cache->blocks);
    if (status)
        return status;
    int64_t entries = columns * cache->max_sequences;
    if (entries > INT32_MAX)
        return kvl_fail(KVLEAF_INVALID, "max_context", entries, INT32_MAX,
                        "a block table of %d sequences and %lld blocks each has %lld entries, the limit is %d",
                        cache->max_sequences, (long long)columns, (long long)entries, INT32_MAX);
    return kvl_device_buffer(cache->device, "the block table (max_sequences, max_context)",
                             (uint64_t)entries * sizeof(int32_t), &cache->table);
}

static kvleaf_status fill_cache(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    kvleaf_pool_params pool = {.struct_size = sizeof pool};
    kvleaf_status status = kvleaf_pool_query(cache->pool, &pool);
    for (int32_t i = 0; !status && i < params->num_layers; i++)
        status = check_layer(params->layers, i);
    if (!status)
        status = check_pool(params, &pool);
    if (!status)
        status = copy_layers(cache, params);
    if (!status)
        status = kvl_tail_create(&cache->tail, cache->device);
    if (!status)
        status = make_blocks(cache, params, &pool);
    cache->geometry = (kvl_geometry){
        .q_dtype = params->q_dtype,
        .kv_dtype = pool.dtype,
        .out_dtype = params->out_dtype,
        .layout = pool.layout,
        .num_heads = params->layers[0].num_heads,
        .num_kv_heads = pool.num_kv_heads,
        .head_dim = pool.head_dim_k,
        .block_size = pool.block_size,
    };
    return status;
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
    cache->pool = params->pools[0];
    cache->references = 1;
    kvl_device_retain(device);
    kvl_pool_retain(cache->pool);
    status = fill_cache(cache, params);
    if (status) {
        kvl_cache_release(cache);
        return status;
    }
    *out = cache;
    return KVLEAF_OK;
}

void kvl_cache_release(kvleaf_cache *cache)
{
    if (--cache->references > 0)
        return;
    kvleaf_device *device = cache->device;
    kvl_tail_destroy(&cache->tail);
    if (cache->table)
        device->cl->ReleaseMemObject(cache->table);
    kvleaf_blocks_destroy(&cache->blocks);
    kvl_free(&device->allocator, cache->layers);
    kvl_pool_release(cache->pool);
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

static kvleaf_status check_cache(const kvleaf_cache *cache)
{
    return cache ? KVLEAF_OK : kvl_fail_null("cache");
}

kvleaf_status kvleaf_seq_create(kvleaf_cache *cache, const kvleaf_seq_params *params, kvleaf_seq *out)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_create(cache->blocks, params, out);
}

kvleaf_status kvleaf_seq_extend(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_tokens *tokens, int64_t *cached)
{
    kvleaf_status status = check_cache(cache);
    if (!status)
        status = kvl_tail_check(&cache->tail);
    return status ? status : kvleaf_blocks_seq_extend(cache->blocks, seq, tokens, cached);
}

kvleaf_status kvleaf_can_extend(const kvleaf_cache *cache, kvleaf_seq seq, int64_t count, bool *out)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_can_extend(cache->blocks, seq, count, out);
}

kvleaf_status kvleaf_seq_fork(kvleaf_cache *cache, kvleaf_seq seq, int64_t pos, kvleaf_seq *child)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_fork(cache->blocks, seq, pos, child);
}

kvleaf_status kvleaf_seq_truncate(kvleaf_cache *cache, kvleaf_seq seq, int64_t length)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_truncate(cache->blocks, seq, length);
}

kvleaf_status kvleaf_seq_destroy(kvleaf_cache *cache, kvleaf_seq *seq)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_destroy(cache->blocks, seq);
}

kvleaf_status kvleaf_seq_query(const kvleaf_cache *cache, kvleaf_seq seq, kvleaf_seq_info *info)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_query(cache->blocks, seq, info);
}

kvleaf_status kvleaf_seq_table(const kvleaf_cache *cache, kvleaf_seq seq, int32_t *table, int32_t capacity,
                               int32_t *count)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_table(cache->blocks, seq, 0, table, capacity, count);
}

kvleaf_status kvleaf_cache_query(const kvleaf_cache *cache, kvleaf_blocks_stats *stats)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_query(cache->blocks, stats);
}

const kvleaf_blocks *kvleaf_cache_blocks(const kvleaf_cache *cache)
{
    return cache ? cache->blocks : NULL;
}
