/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: making one, opening and closing its steps. */
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
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (checks[i].value < 0 || checks[i].value > checks[i].high)
            return kvl_fail_range(checks[i].field, checks[i].value, 0, checks[i].high);
    }
    return KVLEAF_OK;
}

/* Fills in the defaults. */
static kvl_engine_params resolve(const kvleaf_cache *cache, const kvleaf_plan_params *params)
{
    int32_t block_size = cache->geometry.block_size;
    int64_t entries = params->max_entries ? params->max_entries : cache->max_sequences;
    int64_t context = (int64_t)cache->columns * block_size;
    int64_t keys = min64(entries * context, POOL_READS * (int64_t)cache->num_blocks * block_size + entries * MIN_KEYS);
    int64_t updates = POOL_READS * (int64_t)cache->num_blocks;
    updates = min64(entries * cache->columns, updates > MIN_UPDATES ? updates : MIN_UPDATES);
    return (kvl_engine_params){
        .geometry = cache->geometry,
        .operations = 1u << KVL_APPEND | 1u << KVL_DECODE | 1u << KVL_PREFILL | 1u << KVL_GATHER,
        .max_seqs = (int32_t)entries,
        .max_tokens = params->max_tokens ? params->max_tokens : DEFAULT_TOKENS,
        .max_context = (int32_t)context,
        .max_decode_keys = params->max_decode_keys ? params->max_decode_keys : keys,
        .max_updates = (int32_t)min64(updates, INT32_MAX),
        .max_copies = cache->max_sequences,
        .steps_in_flight = params->steps_in_flight ? params->steps_in_flight : DEFAULT_STEPS,
    };
}

static kvleaf_status make_views(kvleaf_plan *plan)
{
    const kvleaf_cache *cache = plan->cache;
    kvleaf_pool_params pool = {.struct_size = sizeof pool};
    kvleaf_status status = kvleaf_pool_query(cache->pool, &pool);
    if (status)
        return status;
    plan->views = kvl_alloc(&cache->device->allocator, (size_t)pool.num_layers, sizeof *plan->views);
    if (!plan->views)
        return kvl_fail_memory((size_t)pool.num_layers * sizeof *plan->views);
    for (int32_t layer = 0; !status && layer < pool.num_layers; layer++) {
        cl_mem k = NULL, v = NULL;
        status = kvleaf_pool_memory(cache->pool, layer, &k, &v);
        if (status)
            return status;
        const kvleaf_kv_view view = {
            .struct_size = sizeof view,
            .k = {.handle = k, .dtype = pool.dtype},
            .v = {.handle = v, .dtype = pool.dtype},
            .layout = pool.layout,
            .num_blocks = pool.num_blocks,
        };
        status = kvl_engine_view(plan->engine, &view, &plan->views[layer]);
    }
    return status;
}

static kvleaf_status fill_plan(kvleaf_plan *plan, const kvl_engine_params *engine)
{
    const kvleaf_allocator *allocator = &plan->cache->device->allocator;
    size_t entries = (size_t)engine->max_seqs;
    plan->max_entries = engine->max_seqs;
    plan->max_tokens = engine->max_tokens;
    plan->max_updates = engine->max_updates;
    plan->seqs = kvl_alloc(allocator, entries, sizeof *plan->seqs);
    plan->num_q = kvl_alloc(allocator, entries, sizeof *plan->num_q);
    plan->steps = kvl_alloc(allocator, entries, sizeof *plan->steps);
    if (!plan->seqs || !plan->num_q || !plan->steps)
        return kvl_fail_memory(entries * sizeof *plan->steps);
    kvleaf_status status = kvl_engine_create(plan->cache->device, engine, &plan->engine);
    if (!status)
        status = kvl_pool_copier_create(plan->cache->pool, &plan->copier);
    return status ? status : make_views(plan);
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
    kvl_engine_params engine = resolve(cache, params);
    kvleaf_plan *plan = kvl_alloc(&cache->device->allocator, 1, sizeof *plan);
    if (!plan)
        return kvl_fail_memory(sizeof *plan);
    plan->cache = cache;
    cache->references++;
    status = fill_plan(plan, &engine);
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
    kvl_engine_destroy(&plan->engine);
    kvl_pool_copier_destroy(&plan->copier);
    kvl_free(allocator, plan->views);
    kvl_free(allocator, plan->steps);
    kvl_free(allocator, plan->num_q);
    kvl_free(allocator, plan->seqs);
    kvl_free(allocator, plan);
    kvl_cache_release(cache);
}

const char *kvleaf_plan_variant(const kvleaf_plan *plan, const char *operation)
{
    return plan && operation ? kvl_engine_variant(plan->engine, operation) : "";
}

static kvleaf_status check_entry(const kvleaf_batch_entry *entry, int32_t at)
{
    const struct {
        const char *field;
        int64_t value, high;
    } checks[] = {
        {"family", entry->family, KVLEAF_FAMILY_DECODE},
        {"mask", entry->mask, KVLEAF_MASK_NONE},
        {"flags", entry->flags, 0},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (checks[i].value < 0 || checks[i].value > checks[i].high)
            return kvl_fail(KVLEAF_INVALID, checks[i].field, checks[i].value, checks[i].high,
                            "batch[%d].%s is %lld, must be 0 .. %lld", at, checks[i].field, (long long)checks[i].value,
                            (long long)checks[i].high);
    }
    if (entry->kv_seq)
        return kvl_fail(KVLEAF_UNSUPPORTED, "kv_seq", at, 0, "batch[%d].kv_seq is not served yet, must be 0", at);
    return KVLEAF_OK;
}

/* All that can be known before the block manager is asked. Sums the query rows. */
static kvleaf_status check_batch(const kvleaf_plan *plan, const kvleaf_batch_entry *batch, int32_t n, int32_t *total_q)
{
    if (plan->state != KVL_PLAN_IDLE)
        return kvl_fail(KVLEAF_BUSY, "plan", 0, 0, "the plan's step is still open");
    if (n < 0)
        return kvl_fail_range("n", n, 0, plan->max_entries);
    if (n > 0 && !batch)
        return kvl_fail_null("batch");
    if (n > plan->max_entries)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_entries", n, plan->max_entries,
                        "the step has %d entries, the plan's max_entries is %d", n, plan->max_entries);
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++) {
        kvleaf_status status = check_entry(&batch[i], i);
        if (status)
            return status;
        rows += batch[i].num_q > 0 ? batch[i].num_q : 0; /* the block manager refuses the others */
    }
    if (rows > plan->max_tokens)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_tokens", rows, plan->max_tokens,
                        "the step has %lld query rows, the plan's max_tokens is %d", (long long)rows, plan->max_tokens);
    *total_q = (int32_t)rows;
    return KVLEAF_OK;
}

/* Entries of the sequence's table that a step reads. */
static int32_t entries_read(const kvleaf_cache *cache, const kvl_sequence *sequence)
{
    return (int32_t)kvl_ceil_div(sequence->planned, cache->geometry.block_size);
}

/* What the step needs room for in the staging slot. */
static kvleaf_status count(const kvleaf_plan *plan, int32_t total_q, kvl_counts *out)
{
    const kvleaf_cache *cache = plan->cache;
    int64_t updates = 0;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        kvl_sequence *sequence = NULL;
        kvleaf_status status = kvl_sequence_find(cache->blocks, plan->seqs[i], &sequence);
        if (status)
            return status;
        int32_t changed = entries_read(cache, sequence) - sequence->first_changed[0];
        updates += changed > 0 ? changed : 0;
    }
    if (updates > plan->max_updates)
        return kvl_fail(KVLEAF_TOO_SMALL, "batch", updates, plan->max_updates,
                        "the step changes %lld entries of block tables, at most %d fit: take fewer new sequences",
                        (long long)updates, plan->max_updates);
    *out = (kvl_counts){
        .num_slots = total_q, .num_updates = (int32_t)updates, .num_copies = cache->blocks->groups[0].num_copies};
    return KVLEAF_OK;
}

static void put_slots(const kvl_sequence *sequence, int32_t block_size, int64_t **slots)
{
    for (int64_t position = sequence->committed; position < sequence->planned; position++) {
        int64_t block = kvl_sequence_table(sequence, 0)[position / block_size];
        *(*slots)++ = block * block_size + position % block_size;
    }
}

static void put_updates(const kvleaf_cache *cache, const kvl_sequence *sequence, int32_t **updates)
{
    int32_t row = kvl_sequence_slot(cache->blocks, sequence) * cache->columns;
    for (int32_t i = sequence->first_changed[0]; i < entries_read(cache, sequence); i++) {
        *(*updates)++ = row + i;
        *(*updates)++ = kvl_sequence_table(sequence, 0)[i];
    }
}

static kvleaf_status fill(kvleaf_plan *plan, const kvleaf_batch_entry *batch, kvl_staging staging)
{
    const kvleaf_cache *cache = plan->cache;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        kvl_sequence *sequence = NULL;
        kvleaf_status status = kvl_sequence_find(cache->blocks, plan->seqs[i], &sequence);
        if (status)
            return status;
        plan->steps[i] = (kvl_step_seq){
            .q_len = plan->num_q[i],
            .kv_len = (int32_t)sequence->planned,
            .table = kvl_sequence_slot(cache->blocks, sequence) * cache->columns,
            .family = batch[i].family,
            .mask = batch[i].mask,
        };
        put_slots(sequence, cache->geometry.block_size, &staging.slots);
        put_updates(cache, sequence, &staging.updates);
    }
    const kvl_group *group = &cache->blocks->groups[0];
    for (int32_t i = 0; i < group->num_copies; i++) {
        staging.copies[2 * i] = group->copies[i].src;
        staging.copies[2 * i + 1] = group->copies[i].dst;
    }
    return KVLEAF_OK;
}

/* Uploads the step, changes the device's block table, makes the pending copies. */
static kvleaf_status enqueue(kvleaf_plan *plan, int32_t num_copies, const kvleaf_exec *exec)
{
    kvleaf_cache *cache = plan->cache;
    const kvl_step step = {
        .seqs = plan->steps, .num_seqs = plan->num_entries, .num_blocks = cache->num_blocks, .table = cache->table};
    kvl_tail_call call;
    kvleaf_status status = kvl_tail_begin(&cache->tail, exec, &call);
    if (status)
        return status;
    status = kvl_engine_submit(plan->engine, &step, &call.chain);
    const kvl_pool_copies copies = {
        .from = cache->pool,
        .to = cache->pool,
        .pairs = kvl_engine_meta(plan->engine),
        .first_int = kvl_engine_copies_at(plan->engine),
        .count = num_copies,
    };
    if (!status)
        status = kvl_pool_copier_chain(plan->copier, &copies, &call.chain);
    return kvl_tail_end(&call, status);
}

/* Stages and enqueues a step that the block manager has opened. Until it returns OK nothing but the device's own state
 * has changed: table entries and copies that were enqueued before a failure count as changed and pending still, and are
 * written and made once more. */
static kvleaf_status submit(kvleaf_plan *plan, const kvleaf_batch_entry *batch, int32_t total_q,
                            const kvleaf_exec *exec)
{
    kvl_counts counts = {0};
    kvl_staging staging = {0};
    kvleaf_status status = count(plan, total_q, &counts);
    if (status)
        return status;
    status = kvl_engine_begin(plan->engine, &counts, &staging);
    if (kvl_engine_failure(plan->engine))
        kvl_tail_fail(&plan->cache->tail, kvl_engine_failure(plan->engine));
    if (status == KVLEAF_BUSY)
        kvl_tail_flush(&plan->cache->tail);
    if (!status)
        status = fill(plan, batch, staging);
    return status ? status : enqueue(plan, counts.num_copies, exec);
}

/* Takes note of what the device knows now. */
static void accept(kvleaf_plan *plan)
{
    kvleaf_cache *cache = plan->cache;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        kvl_sequence *sequence = NULL;
        if (kvl_sequence_find(cache->blocks, plan->seqs[i], &sequence) == KVLEAF_OK &&
            sequence->first_changed[0] < entries_read(cache, sequence))
            kvl_sequence_uploaded(sequence, 0, entries_read(cache, sequence));
    }
    kvleaf_blocks_copies_done(cache->blocks, 0, cache->blocks->groups[0].num_copies);
    plan->state = KVL_PLAN_OPEN;
}

kvleaf_status kvleaf_plan_build(kvleaf_plan *plan, kvleaf_cache *cache, const kvleaf_batch_entry *batch, int32_t n,
                                const kvleaf_exec *exec)
{
    int32_t total_q = 0;
    if (!plan)
        return kvl_fail_null("plan");
    if (!cache)
        return kvl_fail_null("cache");
    if (plan->cache != cache)
        return kvl_fail(KVLEAF_FOREIGN, "cache", 0, 0, "the plan was made for another cache");
    kvleaf_status status = kvl_check_exec(cache->device, exec);
    if (!status)
        status = kvl_tail_check(&cache->tail);
    if (!status)
        status = check_batch(plan, batch, n, &total_q);
    if (status)
        return status;
    for (int32_t i = 0; i < n; i++) {
        plan->seqs[i] = batch[i].seq;
        plan->num_q[i] = batch[i].num_q;
    }
    status = kvleaf_blocks_step_begin(cache->blocks, plan->seqs, plan->num_q, n);
    if (status)
        return status;
    plan->num_entries = n;
    status = submit(plan, batch, total_q, exec);
    if (status)
        kvleaf_blocks_step_rollback(cache->blocks, plan->seqs, n);
    else
        accept(plan);
    return status;
}

static kvleaf_status check_open(const kvleaf_plan *plan)
{
    if (!plan)
        return kvl_fail_null("plan");
    return plan->state == KVL_PLAN_IDLE ? kvl_fail(KVLEAF_INVALID, "plan", 0, 0, "the plan has no open step")
                                        : KVLEAF_OK;
}

kvleaf_status kvleaf_plan_commit(kvleaf_plan *plan, const int32_t *accepted)
{
    kvleaf_status status = check_open(plan);
    if (status)
        return status;
    if (plan->state == KVL_PLAN_FAILED)
        return kvl_fail(KVLEAF_INVALID, "plan", 0, 0,
                        "an append or attend of the step failed: it can only be rolled back");
    status = kvl_tail_check(&plan->cache->tail);
    if (!status)
        status = kvleaf_blocks_step_commit(plan->cache->blocks, plan->seqs, accepted, plan->num_entries);
    if (!status)
        plan->state = KVL_PLAN_IDLE;
    return status;
}

kvleaf_status kvleaf_plan_rollback(kvleaf_plan *plan)
{
    kvleaf_status status = check_open(plan);
    if (!status)
        status = kvleaf_blocks_step_rollback(plan->cache->blocks, plan->seqs, plan->num_entries);
    if (!status)
        plan->state = KVL_PLAN_IDLE;
    return status;
}
