/* SPDX-License-Identifier: Apache-2.0 */
/* From a step's lengths to the tables the kernels read (cl_kernels/common/plan.h); rows of the decode family in rows.c.
 */
#include "attention/state.h"

#include "common/plan.h"

#include <limits.h>
#include <string.h>

bool kvl_is_decode(const kvl_step_seq *seq)
{
    return seq->family == KVLEAF_FAMILY_DECODE || (seq->family == KVLEAF_FAMILY_AUTO && seq->q_len <= 1);
}

static int32_t split_tokens(const kvl_engine *engine)
{
    return engine->chosen[KVL_DECODE].variant->split_tokens;
}

kvleaf_status kvl_schedule_capacity(const kvl_engine *engine, kvl_capacity *out)
{
    const kvl_engine_params *params = &engine->params;
    kvl_capacity at = {0};
    at.splits = params->max_decode_keys / split_tokens(engine) + params->max_seqs;
    at.rows = at.splits < params->max_tokens ? at.splits : params->max_tokens;
    at.items = kvl_tiles_most(engine);
    at.claims = at.items + 1;
    int64_t row_resolves = params->geometry.window ? 2 : 1;
    at.resolve = params->geometry.device_tables ? row_resolves * at.rows + 2 * (int64_t)params->max_seqs : 0;
    at.ints = QUEUE_INTS + 2 * (int64_t)params->max_tokens + UPDATE_INTS * (int64_t)params->max_updates +
              2 * (int64_t)params->max_copies + params->max_table + ROW_INTS * at.rows +
              kvl_rows_item_ints(engine) * at.splits + (int64_t)(ENTRY_INTS + GATHER_INTS) * params->max_seqs +
              ITEM_INTS * at.items + at.claims + KVL_RESOLVE_INTS * at.resolve;
    if (at.ints > INT32_MAX)
        return kvl_fail(KVLEAF_INVALID, "max_tokens", at.ints, INT32_MAX,
                        "the plan's tables take %lld ints, the limit is %d", (long long)at.ints, INT32_MAX);
    *out = at;
    return KVLEAF_OK;
}

static kvleaf_status too_many(const char *field, int64_t value, int64_t limit)
{
    return kvl_fail(KVLEAF_TOO_SMALL, field, value, limit, "the step needs %lld, %s allows %lld", (long long)value,
                    field, (long long)limit);
}

kvleaf_status kvl_schedule_begin(const kvl_engine *engine, const kvl_counts *counts, kvl_schedule *out)
{
    const kvl_engine_params *params = &engine->params;
    if (counts->num_slots > params->max_tokens)
        return too_many("max_tokens", counts->num_slots, params->max_tokens);
    if (counts->num_updates > params->max_updates)
        return too_many("max_updates", counts->num_updates, params->max_updates);
    if (counts->num_copies > params->max_copies)
        return too_many("max_copies", counts->num_copies, params->max_copies);
    if (counts->num_table > params->max_table)
        return too_many("max_table", counts->num_table, params->max_table);
    kvl_schedule at = {.counts = *counts};
    at.slots_at = QUEUE_INTS; /* first, so that they are aligned as int64 */
    at.updates_at = at.slots_at + 2 * counts->num_slots;
    at.copies_at = at.updates_at + UPDATE_INTS * counts->num_updates;
    at.table_at = at.copies_at + 2 * counts->num_copies;
    at.used = at.table_at + (int32_t)counts->num_table;
    *out = at;
    return KVLEAF_OK;
}

/* First pass: counts everything and checks it against the capacities. */
static kvleaf_status count(kvl_engine *engine, const kvl_step *step, kvl_schedule *at)
{
    int64_t total_q = 0, total_k = 0, splits = 0, entries = 0;
    if (step->num_seqs > engine->params.max_seqs)
        return too_many("max_seqs", step->num_seqs, engine->params.max_seqs);
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[i];
        if (seq->kv_len > engine->params.max_context)
            return too_many("max_context", seq->kv_len, engine->params.max_context);
        total_q += seq->q_len;
        total_k += seq->kv_len;
        if (total_q > engine->params.max_tokens)
            return too_many("max_tokens", total_q, engine->params.max_tokens);
        if (!kvl_is_decode(seq) && seq->q_len)
            entries++;
    }
    if (!kvl_rows_collect(engine, step, at, &splits))
        return too_many("max_decode_keys", splits * split_tokens(engine), engine->params.max_decode_keys);
    if (total_k > INT32_MAX)
        return too_many("total_k", total_k, INT32_MAX);
    at->total_q = (int32_t)total_q;
    at->total_k = (int32_t)total_k;
    at->num_entries = (int32_t)entries;
    at->num_seqs = step->num_seqs;
    int64_t row_resolves = engine->params.geometry.window ? 2 : 1;
    at->num_resolve = step->device_lens ? (int32_t)(row_resolves * at->num_rows + entries + step->num_seqs) : 0;
    return KVLEAF_OK;
}

/* Where the sections of known length lie; splits, items and claims follow and are counted as they are written. */
static void lay_out(kvl_schedule *at)
{
    at->rows_at = at->used;
    at->entries_at = at->rows_at + ROW_INTS * at->num_rows;
    at->gather_at = at->entries_at + ENTRY_INTS * at->num_entries;
    at->resolve_at = at->gather_at + GATHER_INTS * at->num_seqs;
    at->splits_at = at->resolve_at + KVL_RESOLVE_INTS * at->num_resolve;
}

int32_t kvl_table_start(const kvl_engine *engine, const kvl_step *step, const kvl_schedule *at, const kvl_step_seq *seq)
{
    bool staged = !step->table && engine->params.geometry.block_size;
    return staged ? at->table_at + seq->table : seq->table;
}

/* The prefill family's sequences, and what gather reads. Returns where further resolve records go. */
static int32_t *write_sequences(const kvl_engine *engine, const kvl_step *step, int32_t *meta, const kvl_schedule *at)
{
    int32_t *entry = meta + at->entries_at, *gather = meta + at->gather_at, *resolve = meta + at->resolve_at;
    int32_t q_token = 0, k_token = 0, window = engine->params.geometry.window;
    for (int32_t i = 0; i < step->num_seqs; i++, gather += GATHER_INTS) {
        const kvl_step_seq *seq = &step->seqs[i];
        int32_t table = kvl_table_start(engine, step, at, seq);
        const int32_t wanted[GATHER_INTS] = {seq->kv_len, table, k_token, 0};
        memcpy(gather, wanted, sizeof wanted);
        if (step->device_lens)
            resolve = kvl_put_resolve(resolve, (int32_t)(gather - meta) + GATHER_KV_LEN, i, 0);
        if (!kvl_is_decode(seq) && seq->q_len) {
            const int32_t fields[ENTRY_INTS] = {q_token, seq->q_len, seq->kv_len, table, seq->mask, window, 0, 0};
            memcpy(entry, fields, sizeof fields);
            if (step->device_lens)
                resolve = kvl_put_resolve(resolve, (int32_t)(entry - meta) + ENTRY_KV_LEN, i, 0);
            entry += ENTRY_INTS;
        }
        q_token += seq->q_len;
        k_token += seq->kv_len;
    }
    return resolve;
}

kvleaf_status kvl_schedule_build(kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *schedule)
{
    kvl_schedule at = *schedule;
    kvleaf_status status = count(engine, step, &at);
    if (status)
        return status;
    at.num_blocks = step->num_blocks;
    at.table = step->table;
    lay_out(&at);
    int32_t *resolve = write_sequences(engine, step, meta, &at);
    kvl_rows_order(engine, at.num_rows);
    kvl_rows_write(engine, step, meta, &at, resolve);
    if (at.num_entries)
        kvl_tiles_write(engine, meta, &at);
    at.ready = true;
    *schedule = at;
    return KVLEAF_OK;
}
