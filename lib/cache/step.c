/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the steps of a plan. */
#include "cache/cache.h"

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

/* Entries of the sequence's tables that a step reads. */
static int32_t entries_read(const kvleaf_cache *cache, const kvl_sequence *sequence)
{
    return (int32_t)kvl_ceil_div(sequence->planned, cache->block_size);
}

/* How many entries of a group's tables the device does not know yet. */
static int64_t count_updates(const kvleaf_plan *plan, int32_t group)
{
    int64_t updates = 0;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        const kvl_sequence *sequence = plan->sequences[i];
        int32_t changed = entries_read(plan->cache, sequence) - sequence->first_changed[group];
        updates += changed > 0 ? changed : 0;
    }
    return updates;
}

/* Writes the first `limit` of them. */
static void put_updates(const kvleaf_plan *plan, int32_t group, int64_t limit, int32_t *updates)
{
    const kvleaf_cache *cache = plan->cache;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        const kvl_sequence *sequence = plan->sequences[i];
        const int32_t *table = kvl_sequence_table(sequence, group);
        int32_t row = kvl_sequence_slot(cache->blocks, sequence) * cache->columns;
        int32_t end = entries_read(cache, sequence);
        for (int32_t entry = sequence->first_changed[group]; entry < end && limit > 0; entry++, limit--) {
            *updates++ = row + entry;
            *updates++ = table[entry];
        }
    }
}

/* Notes that the device knows them. */
static void note_updates(const kvleaf_plan *plan, int32_t group, int64_t limit)
{
    for (int32_t i = 0; i < plan->num_entries && limit > 0; i++) {
        kvl_sequence *sequence = plan->sequences[i];
        int64_t changed = entries_read(plan->cache, sequence) - sequence->first_changed[group];
        if (changed <= 0)
            continue;
        int64_t known = changed < limit ? changed : limit;
        kvl_sequence_uploaded(sequence, group, sequence->first_changed[group] + (int32_t)known);
        limit -= known;
    }
}

/* Room in a staging slot of a group. */
static kvleaf_status begin_group(kvleaf_plan *plan, int32_t group, const kvl_counts *counts, kvl_staging *staging)
{
    kvl_engine *engine = plan->groups[group].engine;
    kvl_tail *tail = &plan->cache->tail;
    kvleaf_status status = kvl_engine_begin(engine, counts, staging);
    if (kvl_engine_failure(engine))
        kvl_tail_fail(tail, kvl_engine_failure(engine));
    if (status == KVLEAF_BUSY)
        kvl_tail_flush(tail);
    return status;
}

static kvl_step step_of(const kvleaf_plan *plan, int32_t group, int32_t num_seqs)
{
    const kvl_cache_group *at = &plan->cache->groups[group];
    return (kvl_step){.seqs = plan->steps,
                      .num_seqs = num_seqs,
                      .num_blocks = at->num_blocks,
                      .table = at->table,
                      .slots = KVL_SLOTS_OWN}; /* extend copies a block that others hold */
}

/* Where more table entries changed than a staging slot takes, as when many long sequences are new to the device, the
 * surplus goes before the step, a slot at a time. BUSY leaves what has gone, so that asking again goes on from there.
 */
static kvleaf_status upload_surplus(kvleaf_plan *plan, int32_t group, const kvleaf_exec *exec)
{
    const kvl_counts counts = {.num_updates = plan->groups[group].max_updates};
    kvleaf_exec own = *exec;
    own.event_out = NULL;
    while (count_updates(plan, group) > counts.num_updates) {
        kvl_staging staging = {0};
        kvl_tail_call call;
        kvleaf_status status = begin_group(plan, group, &counts, &staging);
        if (status)
            return status;
        put_updates(plan, group, counts.num_updates, staging.updates);
        status = kvl_tail_begin(&plan->cache->tail, &own, &call);
        if (status)
            return status;
        const kvl_step step = step_of(plan, group, 0);
        status = kvl_tail_end(&call, kvl_engine_submit(plan->groups[group].engine, &step, &call.chain));
        if (status)
            return status;
        note_updates(plan, group, counts.num_updates);
    }
    return KVLEAF_OK;
}

static void put_slots(const kvleaf_plan *plan, int32_t group, int64_t *slots)
{
    int32_t block_size = plan->cache->block_size;
    for (int32_t i = 0; i < plan->num_entries; i++) {
        const kvl_sequence *sequence = plan->sequences[i];
        const int32_t *table = kvl_sequence_table(sequence, group);
        for (int64_t position = sequence->committed; position < sequence->planned; position++) {
            int64_t block = table[position / block_size];
            *slots++ = block * block_size + position % block_size;
        }
    }
}

/* Whether blocks of a sequence left the group's window. */
static bool any_gone(const kvleaf_plan *plan, int32_t group)
{
    for (int32_t i = 0; i < plan->num_entries; i++)
        if (kvl_sequence_table(plan->sequences[i], group)[0] == KVLEAF_NO_BLOCK)
            return true;
    return false;
}

/* Stages what the step brings to a group; the schedule is added when it is submitted. */
static kvleaf_status stage_group(kvleaf_plan *plan, int32_t group, int32_t total_q)
{
    const kvleaf_block_copy *copies = NULL;
    kvl_counts counts = {.num_slots = total_q, .num_updates = (int32_t)count_updates(plan, group)};
    kvl_staging staging = {0};
    kvleaf_status status = kvleaf_blocks_copies(plan->cache->blocks, group, &copies, &counts.num_copies);
    if (!status)
        status = begin_group(plan, group, &counts, &staging);
    if (status)
        return status;
    put_slots(plan, group, staging.slots);
    put_updates(plan, group, counts.num_updates, staging.updates);
    for (int32_t i = 0; i < counts.num_copies; i++) {
        staging.copies[2 * i] = copies[i].src;
        staging.copies[2 * i + 1] = copies[i].dst;
    }
    plan->groups[group].num_copies = counts.num_copies;
    plan->groups[group].gone = any_gone(plan, group);
    return KVLEAF_OK;
}

/* Uploads a group's step, changes the device's block table, makes the pending copies. */
static kvleaf_status submit_group(kvleaf_plan *plan, int32_t group, kvl_chain *chain)
{
    const kvl_cache_group *at = &plan->cache->groups[group];
    kvl_engine *engine = plan->groups[group].engine;
    for (int32_t i = 0; i < plan->num_entries; i++)
        plan->steps[i].blocks = kvl_sequence_table(plan->sequences[i], group);
    const kvl_step step = step_of(plan, group, plan->num_entries);
    kvleaf_status status = kvl_engine_submit(engine, &step, chain);
    if (status)
        return status;
    const kvl_pool_copies copies = {
        .pairs = kvl_engine_meta(engine),
        .first_int = kvl_engine_copies_at(engine),
        .count = plan->groups[group].num_copies,
    };
    return kvl_pool_copier_chain(at->copier, &copies, chain);
}

static kvleaf_status find_sequences(kvleaf_plan *plan, const kvleaf_batch_entry *batch)
{
    const kvleaf_cache *cache = plan->cache;
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < plan->num_entries; i++) {
        status = kvl_sequence_find(cache->blocks, plan->seqs[i], &plan->sequences[i]);
        if (status)
            return status;
        plan->steps[i] = (kvl_step_seq){
            .q_len = plan->num_q[i],
            .kv_len = (int32_t)plan->sequences[i]->planned,
            .table = kvl_sequence_slot(cache->blocks, plan->sequences[i]) * cache->columns,
            .family = batch[i].family,
            .mask = batch[i].mask,
        };
    }
    return status;
}

/* Stages and enqueues a step that the block manager has opened. Until it returns OK nothing but the device's own state
 * has changed: table entries and copies that were enqueued before a failure count as changed and pending still, and are
 * written and made once more. */
static kvleaf_status submit(kvleaf_plan *plan, const kvleaf_batch_entry *batch, int32_t total_q,
                            const kvleaf_exec *exec)
{
    kvleaf_cache *cache = plan->cache;
    kvl_tail_call call;
    kvleaf_status status = find_sequences(plan, batch);
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = upload_surplus(plan, i, exec);
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = stage_group(plan, i, total_q);
    if (!status)
        status = kvl_tail_begin(&cache->tail, exec, &call);
    if (status)
        return status;
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = submit_group(plan, i, &call.chain);
    return kvl_tail_end(&call, status);
}

/* Takes note of what the device knows now. */
static void accept(kvleaf_plan *plan)
{
    for (int32_t i = 0; i < plan->cache->num_groups; i++) {
        note_updates(plan, i, INT64_MAX);
        kvleaf_blocks_copies_done(plan->cache->blocks, i, plan->groups[i].num_copies);
    }
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
