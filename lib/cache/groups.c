/* SPDX-License-Identifier: Apache-2.0 */
/* From the table of layers to groups, each with its pool. */
#include "cache/cache.h"

#include <math.h>

static int32_t head_dim_v(const kvleaf_layer *layer)
{
    return layer->head_dim_v ? layer->head_dim_v : layer->head_dim_k;
}

static kvleaf_status check_layer(const kvleaf_layer *layers, int32_t i)
{
    const kvleaf_layer *layer = &layers[i];
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
    if (layer->window < 0)
        return kvl_fail_range("window", layer->window, 0, INT32_MAX);
    if (layer->sinks)
        return kvl_fail(KVLEAF_UNSUPPORTED, "sinks", i, 0, "layer %d has sinks, which are not served", i);
    if (layer->kv_layer < 0 || layer->kv_layer > i)
        return kvl_fail(KVLEAF_INVALID, "kv_layer", layer->kv_layer, i,
                        "layer %d has kv_layer %d, must be 0 or name an earlier layer, 1 .. %d", i, layer->kv_layer, i);
    return kvl_check_scores(layer->softmax_scale, layer->softcap, i);
}

static bool alike(const kvleaf_layer *a, const kvleaf_layer *b)
{
    return a->num_kv_heads == b->num_kv_heads && a->head_dim_k == b->head_dim_k && a->window == b->window;
}

/* The first layer of layer i's group. Layers that are alike are one group, and K/V are read by layers of one group. */
static kvleaf_status find_first(const kvleaf_layer *layers, int32_t i, int32_t *first)
{
    const kvleaf_layer *layer = &layers[i];
    if (layer->kv_layer && !alike(layer, &layers[layer->kv_layer - 1]))
        return kvl_fail(KVLEAF_UNSUPPORTED, "kv_layer", layer->kv_layer, i,
                        "layer %d has another geometry or window than layer %d, whose K/V it reads", i,
                        layer->kv_layer - 1);
    for (*first = 0; !alike(layer, &layers[*first]);)
        ++*first;
    if (layer->num_heads != layers[*first].num_heads)
        return kvl_fail(KVLEAF_UNSUPPORTED, "layers", i, *first,
                        "layer %d has %d heads, layer %d of its group %d: only one number is served", i,
                        layer->num_heads, *first, layers[*first].num_heads);
    if (layer->softcap != layers[*first].softcap)
        return kvl_fail(KVLEAF_UNSUPPORTED, "layers", i, *first,
                        "layer %d has softcap %g, layer %d of its group %g: only one is served", i,
                        (double)layer->softcap, *first, (double)layers[*first].softcap);
    return KVLEAF_OK;
}

/* The groups in the order in which they first occur, each with its first layer's geometry and the number of layers that
 * have K/V of their own. */
static kvleaf_status number_layers(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    for (int32_t i = 0; i < params->num_layers; i++) {
        const kvleaf_layer *layer = &params->layers[i];
        int32_t first = 0;
        kvleaf_status status = check_layer(params->layers, i);
        if (!status)
            status = find_first(params->layers, i, &first);
        if (status)
            return status;
        if (first == i && cache->num_groups == params->num_pools)
            return kvl_fail(KVLEAF_INVALID, "num_pools", params->num_pools, cache->num_groups + 1,
                            "num_pools is %d, but layer %d begins group %d", params->num_pools, i, cache->num_groups);
        int32_t index = first == i ? cache->num_groups++ : cache->layers[first].group;
        kvl_cache_group *group = &cache->groups[index];
        if (first == i)
            group->geometry = (kvl_geometry){
                .q_dtype = params->q_dtype,
                .out_dtype = params->out_dtype,
                .num_heads = layer->num_heads,
                .num_kv_heads = layer->num_kv_heads,
                .head_dim = layer->head_dim_k,
                .window = layer->window,
                .softcap = layer->softcap,
            };
        bool owns = layer->kv_layer == 0;
        cache->layers[i] = (kvl_cache_layer){
            .group = index,
            .owns = owns,
            .pool_layer = owns ? group->num_layers++ : cache->layers[layer->kv_layer - 1].pool_layer,
            .softmax_scale = layer->softmax_scale > 0 ? layer->softmax_scale : 1.0f / sqrtf((float)layer->head_dim_k),
        };
    }
    if (cache->num_groups < params->num_pools)
        return kvl_fail(KVLEAF_INVALID, "num_pools", params->num_pools, cache->num_groups,
                        "num_pools is %d, the layers make %d groups", params->num_pools, cache->num_groups);
    return KVLEAF_OK;
}

static kvleaf_status check_pool(const kvleaf_cache *cache, int32_t index, const kvleaf_pool_params *pool)
{
    const kvl_cache_group *group = &cache->groups[index];
    const struct {
        const char *field;
        int32_t wanted, there;
    } pairs[] = {
        {"num_layers", group->num_layers, pool->num_layers},
        {"num_kv_heads", group->geometry.num_kv_heads, pool->num_kv_heads},
        {"head_dim_k", group->geometry.head_dim, pool->head_dim_k},
        {"block_size", cache->block_size, pool->block_size},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (pairs[i].wanted != pairs[i].there)
            return kvl_fail(KVLEAF_INVALID, pairs[i].field, pairs[i].wanted, pairs[i].there,
                            "group %d needs a pool with %s %d, pools[%d] has %d", index, pairs[i].field,
                            pairs[i].wanted, index, pairs[i].there);
    }
    return KVLEAF_OK;
}

static kvleaf_status fill_group(kvleaf_cache *cache, int32_t index, const kvleaf_cache_params *params)
{
    kvl_cache_group *group = &cache->groups[index];
    kvleaf_pool_params pool = {.struct_size = sizeof pool};
    kvleaf_status status = kvleaf_pool_query(params->pools[index], &pool);
    if (index == 0)
        cache->block_size = pool.block_size;
    if (!status)
        status = check_pool(cache, index, &pool);
    if (status)
        return status;
    group->pool = params->pools[index];
    kvl_pool_retain(group->pool);
    group->num_blocks = pool.num_blocks;
    group->geometry.kv_dtype = pool.dtype;
    group->geometry.layout = pool.layout;
    group->geometry.block_size = pool.block_size;
    status = kvl_pool_copier_create(group->pool, &group->copier);
    return status || !params->swap_blocks ? status
                                          : kvl_host_pool_create(group->pool, params->swap_blocks, &group->host);
}

kvleaf_status kvl_cache_form_groups(kvleaf_cache *cache, const kvleaf_cache_params *params)
{
    const kvleaf_allocator *allocator = &cache->device->allocator;
    cache->num_layers = params->num_layers;
    cache->layers = kvl_alloc(allocator, (size_t)params->num_layers, sizeof *cache->layers);
    cache->groups = kvl_alloc(allocator, (size_t)params->num_pools, sizeof *cache->groups);
    if (!cache->layers || !cache->groups)
        return kvl_fail_memory((size_t)params->num_layers * sizeof *cache->layers);
    kvleaf_status status = number_layers(cache, params);
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = fill_group(cache, i, params);
    return status;
}
