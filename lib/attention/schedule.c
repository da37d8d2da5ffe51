/* SPDX-License-Identifier: Apache-2.0 */
/* From a step's lengths to the tables the kernels read (cl_kernels/common/plan.h); rows of the decode family in rows.c.
 */
#include "attention/state.h"

#include "common/plan.h"

#include <limits.h>
#include <string.h>

/* A claim of a persistent kernel takes a whole (sequence, KV head) while this part of them lasts; the rest goes tile by
 * tile, so that the compute units finish together. */
#define WHOLE_NUMERATOR   3
#define WHOLE_DENOMINATOR 4

bool kvl_is_decode(const kvl_step_seq *seq)
{
    return seq->family == KVLEAF_FAMILY_DECODE || (seq->family == KVLEAF_FAMILY_AUTO && seq->q_len <= 1);
}

static int32_t group(const kvl_engine *engine)
{
    return engine->params.geometry.num_heads / engine->params.geometry.num_kv_heads;
}

/* Head ranges a KV head's group is cut into. */
static int32_t head_chunks(const kvl_engine *engine)
{
    return (int32_t)kvl_ceil_div(group(engine), engine->tile_heads);
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
    int64_t tiles = kvl_ceil_div(params->max_tokens, engine->tile_queries) + params->max_seqs;
    at.items = tiles * params->geometry.num_kv_heads * head_chunks(engine);
    at.claims = at.items + 1;
    int64_t row_resolves = params->geometry.window ? 2 : 1;
    at.resolve = params->geometry.device_tables ? row_resolves * at.rows + 2 * (int64_t)params->max_seqs : 0;
    at.ints = 2 * (int64_t)params->max_tokens + UPDATE_INTS * (int64_t)params->max_updates +
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
    at.slots_at = 0; /* first, so that they are aligned as int64 */
    at.updates_at = 2 * counts->num_slots;
    at.copies_at = at.updates_at + UPDATE_INTS * counts->num_updates;
    at.table_at = at.copies_at + 2 * counts->num_copies;
    at.used = at.table_at + (int32_t)counts->num_table;
    *out = at;
    return KVLEAF_OK;
}

/* First pass: counts everything and checks it against the capacities. */
static kvleaf_status count(kvl_engine *engine, const kvl_step *step, kvl_schedule *at)
{
    int64_t total_q = 0, total_k = 0, splits = 0, entries = 0, tiles = 0;
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
        if (!kvl_is_decode(seq) && seq->q_len) {
            entries++;
            tiles += kvl_ceil_div(seq->q_len, engine->tile_queries);
        }
    }
    if (!kvl_rows_collect(engine, step, at, &splits))
        return too_many("max_decode_keys", splits * split_tokens(engine), engine->params.max_decode_keys);
    if (total_k > INT32_MAX)
        return too_many("total_k", total_k, INT32_MAX);
    at->total_q = (int32_t)total_q;
    at->total_k = (int32_t)total_k;
    at->num_entries = (int32_t)entries;
    at->num_items = (int32_t)(tiles * engine->params.geometry.num_kv_heads * head_chunks(engine));
    at->num_seqs = step->num_seqs;
    int64_t row_resolves = engine->params.geometry.window ? 2 : 1;
    at->num_resolve = step->device_lens ? (int32_t)(row_resolves * at->num_rows + entries + step->num_seqs) : 0;
    return KVLEAF_OK;
}

/* Where the sections of known length lie; splits and claims follow and are counted as they are written. */
static void lay_out(kvl_schedule *at)
{
    at->rows_at = at->used;
    at->entries_at = at->rows_at + ROW_INTS * at->num_rows;
    at->gather_at = at->entries_at + ENTRY_INTS * at->num_entries;
    at->items_at = at->gather_at + GATHER_INTS * at->num_seqs;
    at->resolve_at = at->items_at + ITEM_INTS * at->num_items;
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

/* Keys times queries that an entry has to cover, roughly: what the order goes by. */
static int64_t work(const int32_t *entry)
{
    int64_t queries = entry[ENTRY_Q_LEN], keys = entry[ENTRY_KV_LEN], window = entry[ENTRY_WINDOW];
    return queries * (window && keys > queries + window ? queries + window : keys);
}

/* Entries by descending work: Shell's method, in place and without allocation. */
static void sort_by_work(const int32_t *entries, int32_t count, int32_t *order)
{
    for (int32_t i = 0; i < count; i++)
        order[i] = i;
    for (int32_t gap = count / 2; gap > 0; gap /= 2) {
        for (int32_t i = gap; i < count; i++) {
            int32_t moved = order[i], j = i;
            for (; j >= gap && work(entries + order[j - gap] * ENTRY_INTS) < work(entries + moved * ENTRY_INTS);
                 j -= gap)
                order[j] = order[j - gap];
            order[j] = moved;
        }
    }
}

static int32_t *put_item(int32_t *item, int32_t entry, int32_t query, int32_t kv_head, int32_t head)
{
    item[ITEM_ENTRY] = entry;
    item[ITEM_QUERY] = query;
    item[ITEM_KV_HEAD] = kv_head;
    item[ITEM_HEAD] = head;
    return item + ITEM_INTS;
}

/* Tiles, heaviest first. A persistent kernel's tiles of one (sequence, KV head) lie together, since one claim may take
 * them all and find their K and V in cache; others go tile by tile over all heads, so that heads share a tile's
 * queries. */
static int32_t *write_tiles(const kvl_engine *engine, int32_t entry, int32_t q_len, bool by_head, int32_t *item)
{
    int32_t last = (q_len - 1) / engine->tile_queries * engine->tile_queries;
    int32_t heads = engine->params.geometry.num_kv_heads;
    int32_t outer = by_head ? heads : last / engine->tile_queries + 1;
    int32_t inner = by_head ? last / engine->tile_queries + 1 : heads;
    for (int32_t a = 0; a < outer; a++) {
        for (int32_t b = 0; b < inner; b++) {
            int32_t tile = by_head ? b : a, kv_head = by_head ? a : b;
            for (int32_t head = 0; head < group(engine); head += engine->tile_heads)
                item = put_item(item, entry, last - tile * engine->tile_queries, kv_head, head);
        }
    }
    return item;
}

static void write_claims(const kvl_engine *engine, int32_t *meta, kvl_schedule *at)
{
    int32_t heads = engine->params.geometry.num_kv_heads, units = (int32_t)engine->device->caps.compute_units;
    int64_t pairs = (int64_t)at->num_entries * heads;
    int64_t whole = pairs * WHOLE_NUMERATOR / WHOLE_DENOMINATOR / units * units;
    int32_t *claims = meta + at->used, item = 0, num = 0;
    for (int32_t i = 0; i < at->num_entries; i++) {
        int32_t q_len = meta[at->entries_at + engine->order[i] * ENTRY_INTS + ENTRY_Q_LEN];
        int32_t tiles = (int32_t)kvl_ceil_div(q_len, engine->tile_queries) * head_chunks(engine);
        for (int32_t head = 0; head < heads; head++, whole--) {
            int32_t stride = whole > 0 ? tiles : 1;
            for (int32_t tile = 0; tile < tiles; tile += stride, item += stride)
                claims[num++] = item;
        }
    }
    claims[num] = item;
    at->claims_at = at->used;
    at->num_claims = num;
    at->used += num + 1;
}

static void write_items(const kvl_engine *engine, int32_t *meta, kvl_schedule *at)
{
    bool persistent = engine->chosen[KVL_PREFILL].variant->persistent;
    const int32_t *entries = meta + at->entries_at;
    int32_t *item = meta + at->items_at;
    sort_by_work(entries, at->num_entries, engine->order);
    for (int32_t i = 0; i < at->num_entries; i++) {
        int32_t entry = engine->order[i];
        item = write_tiles(engine, entry, entries[entry * ENTRY_INTS + ENTRY_Q_LEN], persistent, item);
    }
    if (persistent)
        write_claims(engine, meta, at);
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
        write_items(engine, meta, &at);
    at.ready = true;
    *schedule = at;
    return KVLEAF_OK;
}
