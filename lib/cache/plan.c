/* SPDX-License-Identifier: Apache-2.0 */
/* Making plans. */
#include "cache/cache.h"

#include <limits.h>

#define DEFAULT_TOKENS 4096
#define DEFAULT_STEPS  2
#define MAX_ENTRIES    (1 << 20)
#define MAX_STEPS      1024
/* Where nothing else is said, a step's work buffers are sized for the pool read this often over, and its table updates
 * likewise; sequences that are new to the device and share more than that take several steps. */
#define POOL_READS  4
#define MIN_KEYS    512       /* a sequence, besides */
#define MIN_UPDATES (1 << 18) /* 2 MiB a staging slot: what a small pool's tables may always be written with */

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static kvleaf_status check_params(const kvleaf_plan_params *params)
{
    kvleaf_status status = kvl_check_struct(params, params->struct_size, sizeof *params, "kvleaf_plan_params");
    if (status)
        return status;
    const struct {
        const char *field;
        int64_t value, high;
    } checks[] = {
        {"max_entries", params->max_entries, MAX_ENTRIES},
        {"max_tokens", params->max_tokens, INT_MAX / 8},
        {"max_decode_keys", params->max_decode_keys, INT64_MAX / 2},
        {"steps_in_flight", params->steps_in_flight, MAX_STEPS},
        {"sharing", params->sharing, KVLEAF_SHARING_ALWAYS},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (checks[i].value < 0 || checks[i].value > checks[i].high)
            return kvl_fail_range(checks[i].field, checks[i].value, 0, checks[i].high);
    }
    return KVLEAF_OK;
}

/* A group's engine, with every default filled in. */
static kvl_engine_params resolve(const kvleaf_cache *cache, const kvl_cache_group *group,
                                 const kvleaf_plan_params *params)
{
    int32_t block_size = cache->block_size;
    int64_t entries = params->max_entries ? params->max_entries : cache->max_sequences;
    int64_t context = (int64_t)cache->columns * block_size;
    int64_t keys = min64(entries * context, POOL_READS * (int64_t)group->num_blocks * block_size + entries * MIN_KEYS);
    int64_t updates = POOL_READS * (int64_t)group->num_blocks;
    updates = min64(entries * cache->columns, updates > MIN_UPDATES ? updates : MIN_UPDATES);
    return (kvl_engine_params){
        .geometry = group->geometry,
        .operations = 1u << KVL_APPEND | 1u << KVL_DECODE | 1u << KVL_PREFILL | 1u << KVL_GATHER,
        .max_seqs = (int32_t)entries,
        .max_tokens = params->max_tokens ? params->max_tokens : DEFAULT_TOKENS,
        .max_context = (int32_t)context,
        .max_decode_keys = params->max_decode_keys ? params->max_decode_keys : keys,
        .max_updates = (int32_t)min64(updates, INT32_MAX),
        .max_copies = cache->max_sequences,
        .steps_in_flight = params->steps_in_flight ? params->steps_in_flight : DEFAULT_STEPS,
        .sharing = params->sharing,
    };
}

static kvleaf_status make_views(const kvl_cache_group *group, kvl_plan_group *part)
{
    for (int32_t layer = 0; layer < group->num_layers; layer++) {
        kvleaf_kv_view view = {.struct_size = sizeof view};
        kvleaf_status status = kvleaf_pool_view(group->pool, layer, &view);
        if (!status)
            status = kvl_engine_view(part->engine, &view, &part->views[layer]);
        if (status)
            return status;
    }
    return KVLEAF_OK;
}

static kvleaf_status fill_group(kvleaf_plan *plan, int32_t index, const kvleaf_plan_params *params)
{
    const kvl_cache_group *group = &plan->cache->groups[index];
    kvl_plan_group *part = &plan->groups[index];
    kvl_engine_params engine = resolve(plan->cache, group, params);
    plan->max_tokens = engine.max_tokens;
    part->max_updates = engine.max_updates;
    part->views = kvl_alloc(&plan->cache->device->allocator, (size_t)group->num_layers, sizeof *part->views);
    if (!part->views)
        return kvl_fail_memory((size_t)group->num_layers * sizeof *part->views);
    kvleaf_status status = kvl_engine_create(plan->cache->device, &engine, &part->engine);
    return status ? status : make_views(group, part);
}

static kvleaf_status fill_plan(kvleaf_plan *plan, const kvleaf_plan_params *params)
{
    const kvleaf_cache *cache = plan->cache;
    const kvleaf_allocator *allocator = &cache->device->allocator;
    plan->max_entries = params->max_entries ? params->max_entries : cache->max_sequences;
    size_t entries = (size_t)plan->max_entries;
    plan->groups = kvl_alloc(allocator, (size_t)cache->num_groups, sizeof *plan->groups);
    plan->seqs = kvl_alloc(allocator, entries, sizeof *plan->seqs);
    plan->num_q = kvl_alloc(allocator, entries, sizeof *plan->num_q);
    plan->sequences = kvl_alloc(allocator, entries, sizeof *plan->sequences);
    plan->steps = kvl_alloc(allocator, entries, sizeof *plan->steps);
    if (!plan->groups || !plan->seqs || !plan->num_q || !plan->sequences || !plan->steps)
        return kvl_fail_memory(entries * sizeof *plan->steps);
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = fill_group(plan, i, params);
    return status;
}

kvleaf_status kvleaf_plan_create(kvleaf_cache *cache, const kvleaf_plan_params *params, kvleaf_plan **out)
{
    if (!cache)
        return kvl_fail_null("cache");
    if (!out)
        return kvl_fail_null("out");
    const kvleaf_plan_params defaults = {.struct_size = sizeof defaults};
    if (!params)
        params = &defaults;
    kvleaf_status status = check_params(params);
    if (status)
        return status;
    kvleaf_plan *plan = kvl_alloc(&cache->device->allocator, 1, sizeof *plan);
    if (!plan)
        return kvl_fail_memory(sizeof *plan);
    plan->cache = cache;
    cache->references++;
    status = fill_plan(plan, params);
    if (status) {
        kvleaf_plan_destroy(&plan);
        return status;
    }
    *out = plan;
    return KVLEAF_OK;
}

void kvleaf_plan_destroy(kvleaf_plan **at)
{
    kvleaf_plan *plan = at ? *at : NULL;
    if (!plan)
        return;
    *at = NULL;
    kvleaf_cache *cache = plan->cache;
    const kvleaf_allocator *allocator = &cache->device->allocator;
    if (plan->state != KVL_PLAN_IDLE)
        kvleaf_blocks_step_rollback(cache->blocks, plan->seqs, plan->num_entries);
    for (int32_t i = 0; plan->groups && i < cache->num_groups; i++) {
        kvl_engine_destroy(&plan->groups[i].engine);
        kvl_free(allocator, plan->groups[i].views);
    }
    kvl_free(allocator, plan->groups);
    kvl_free(allocator, plan->steps);
    kvl_free(allocator, plan->sequences);
    kvl_free(allocator, plan->num_q);
    kvl_free(allocator, plan->seqs);
    kvl_free(allocator, plan);
    kvl_cache_release(cache);
}

const char *kvleaf_plan_variant(const kvleaf_plan *plan, const char *operation)
{
    return plan && operation ? kvl_engine_variant(plan->groups[0].engine, operation) : "";
}
