/* SPDX-License-Identifier: Apache-2.0 */
/* From a step's lengths to the tables the kernels read (cl_kernels/common/plan.h). */
#include "attention/state.h"

#include "common/plan.h"

#include <limits.h>
#include <stddef.h>

/* A claim of a persistent kernel takes a whole (sequence, KV head) while this part of them lasts; the rest goes tile by
 * tile, so that the compute units finish together. */
#define WHOLE_NUMERATOR   3
#define WHOLE_DENOMINATOR 4

#define RESOLVE_INTS 3 /* target int, sequence, keys to subtract: portable/resolve.cl */

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

static bool folds(const kvl_engine *engine)
{
    return engine->chosen[KVL_DECODE].variant->longest_run != NULL;
}

static int32_t item_ints(const kvl_engine *engine)
{
    return folds(engine) ? RUN_INTS : SPLIT_INTS;
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
              2 * (int64_t)params->max_copies + params->max_table + ROW_INTS * at.rows + item_ints(engine) * at.splits +
              (int64_t)(ENTRY_INTS + GATHER_INTS) * params->max_seqs + ITEM_INTS * at.items + at.claims +
              RESOLVE_INTS * at.resolve;
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

/* The keys first .. end-1 that a decode row sees (end not positive: none; first may be negative) and its splits. */
typedef struct row_range {
    int32_t first, end, splits;
} row_range;

/* Row `query` of a sequence. Where its length is a bound that the device will lower, the range moves down with it, and
 * may then touch a split more. */
static row_range range_of(const kvl_engine *engine, const kvl_step *step, const kvl_step_seq *seq, int32_t query)
{
    int32_t window = engine->params.geometry.window, tokens = split_tokens(engine);
    int32_t position = seq->kv_len - seq->q_len + query;
    row_range range = {.end = position + 1};
    if (window)
        range.first = position - window + 1;
    if (seq->mask == KVLEAF_MASK_NONE)
        range.end = window && window < seq->kv_len - position ? position + window : seq->kv_len;
    if (range.end <= 0) {
        range.splits = 1;
        return range;
    }
    int32_t whole = (int32_t)kvl_ceil_div(range.end, tokens), before = range.first > 0 ? range.first / tokens : 0;
    int32_t most = (int32_t)kvl_ceil_div(range.end - range.first - 1, tokens) + 1;
    if (step->device_lens && window)
        before = whole > most ? whole - most : 0;
    range.splits = whole - before;
    return range;
}

/* Decode items at `run` splits each. */
static int64_t count_items(const kvl_engine *engine, const kvl_step *step, int32_t run)
{
    int64_t items = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[i];
        for (int32_t query = 0; kvl_is_decode(seq) && query < seq->q_len; query++)
            items += kvl_ceil_div(range_of(engine, step, seq, query).splits, run);
    }
    return items;
}

/* The longest run of splits that still leaves each compute unit a task: long runs write fewer partials. */
static int32_t choose_run(const kvl_engine *engine, const kvl_step *step)
{
    const kvl_variant *variant = engine->chosen[KVL_DECODE].variant;
    int64_t heads = engine->params.geometry.num_kv_heads, units = engine->device->caps.compute_units;
    int32_t run = variant->longest_run ? variant->longest_run(&engine->params.geometry) : 1;
    while (run > 1 && count_items(engine, step, run) * heads * 32 < units * 31)
        run /= 2;
    return run;
}

/* First pass: counts everything and checks it against the capacities. */
static kvleaf_status count(const kvl_engine *engine, const kvl_step *step, kvl_schedule *at)
{
    int64_t total_q = 0, total_k = 0, rows = 0, splits = 0, entries = 0, tiles = 0;
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
        if (kvl_is_decode(seq)) {
            rows += seq->q_len;
            for (int32_t query = 0; query < seq->q_len; query++)
                splits += range_of(engine, step, seq, query).splits;
        } else if (seq->q_len) {
            entries++;
            tiles += kvl_ceil_div(seq->q_len, engine->tile_queries);
        }
    }
    if (splits > engine->capacity.splits)
        return too_many("max_decode_keys", splits * split_tokens(engine), engine->params.max_decode_keys);
    if (total_k > INT32_MAX)
        return too_many("total_k", total_k, INT32_MAX);
    at->total_q = (int32_t)total_q;
    at->total_k = (int32_t)total_k;
    at->num_rows = (int32_t)rows;
    at->run_splits = rows ? choose_run(engine, step) : 1;
    at->num_splits = at->run_splits == 1 ? (int32_t)splits : (int32_t)count_items(engine, step, at->run_splits);
    at->num_entries = (int32_t)entries;
    at->num_items = (int32_t)(tiles * engine->params.geometry.num_kv_heads * head_chunks(engine));
    at->num_seqs = step->num_seqs;
    int64_t row_resolves = engine->params.geometry.window ? 2 : 1;
    at->num_resolve = step->device_lens ? (int32_t)(row_resolves * rows + entries + step->num_seqs) : 0;
    return KVLEAF_OK;
}

static void lay_out(const kvl_engine *engine, kvl_schedule *at)
{
    at->rows_at = at->used;
    at->splits_at = at->rows_at + ROW_INTS * at->num_rows;
    at->entries_at = at->splits_at + item_ints(engine) * at->num_splits;
    at->gather_at = at->entries_at + ENTRY_INTS * at->num_entries;
    at->items_at = at->gather_at + GATHER_INTS * at->num_seqs;
    at->resolve_at = at->items_at + ITEM_INTS * at->num_items;
    at->claims_at = at->resolve_at + RESOLVE_INTS * at->num_resolve;
    at->used = at->claims_at; /* claims are counted as they are written */
}

static void put_resolve(int32_t **cursor, bool wanted, int32_t target, int32_t seq, int32_t subtract)
{
    if (!wanted)
        return;
    (*cursor)[0] = target;
    (*cursor)[1] = seq;
    (*cursor)[2] = subtract;
    *cursor += RESOLVE_INTS;
}

static int32_t *put_split(int32_t *split, bool run, int32_t row_index, int32_t index, const int32_t *row)
{
    split[SPLIT_ROW] = row_index;
    split[SPLIT_INDEX] = index;
    if (!run)
        return split + SPLIT_INTS;
    split[RUN_Q_TOKEN] = row[ROW_Q_TOKEN];
    split[RUN_VISIBLE] = row[ROW_VISIBLE];
    split[RUN_TABLE] = row[ROW_TABLE];
    split[RUN_PARTIAL] = row[ROW_PARTIAL];
    split[RUN_FIRST] = row[ROW_FIRST];
    return split + RUN_INTS;
}

/* Rows and splits of the decode family, and what gather reads. */
static void write_sequences(const kvl_engine *engine, const kvl_step *step, int32_t *meta, const kvl_schedule *at)
{
    int32_t *row = meta + at->rows_at, *split = meta + at->splits_at, *entry = meta + at->entries_at;
    int32_t *gather = meta + at->gather_at, *resolve = meta + at->resolve_at;
    int32_t q_token = 0, k_token = 0, partial = 0, rows = 0;
    bool resolved = step->device_lens != NULL;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[i];
        int32_t table = step->table || !engine->params.geometry.block_size ? seq->table : at->table_at + seq->table;
        int32_t wanted[GATHER_INTS] = {seq->kv_len, table, k_token, 0};
        for (int32_t k = 0; k < GATHER_INTS; k++)
            gather[k] = wanted[k];
        put_resolve(&resolve, resolved, (int32_t)(gather - meta) + GATHER_KV_LEN, i, 0);
        gather += GATHER_INTS;
        if (!kvl_is_decode(seq) && seq->q_len) {
            int32_t window = engine->params.geometry.window;
            int32_t fields[ENTRY_INTS] = {q_token, seq->q_len, seq->kv_len, table, seq->mask, window, 0, 0};
            for (int32_t k = 0; k < ENTRY_INTS; k++)
                entry[k] = fields[k];
            put_resolve(&resolve, resolved, (int32_t)(entry - meta) + ENTRY_KV_LEN, i, 0);
            entry += ENTRY_INTS;
        }
        for (int32_t query = 0; kvl_is_decode(seq) && query < seq->q_len; query++, rows++, row += ROW_INTS) {
            row_range range = range_of(engine, step, seq, query);
            int32_t pieces = (int32_t)kvl_ceil_div(range.splits, at->run_splits);
            int32_t fields[ROW_INTS] = {q_token + query, range.end, table, partial, range.first};
            for (int32_t k = 0; k < ROW_INTS; k++)
                row[k] = fields[k];
            put_resolve(&resolve, resolved, (int32_t)(row - meta) + ROW_VISIBLE, i, seq->kv_len - range.end);
            put_resolve(&resolve, resolved && engine->params.geometry.window, (int32_t)(row - meta) + ROW_FIRST, i,
                        seq->kv_len - range.first);
            for (int32_t s = 0; s < pieces; s++)
                split = put_split(split, folds(engine), rows, s, row);
            partial += pieces;
        }
        q_token += seq->q_len;
        k_token += seq->kv_len;
    }
}

/* Keys times queries a sequence's prefill has to cover, roughly: what the order goes by. */
static int64_t work(const kvl_engine *engine, const kvl_step_seq *seq)
{
    int64_t window = engine->params.geometry.window, keys = seq->kv_len;
    if (window && keys > seq->q_len + window)
        keys = seq->q_len + window;
    return kvl_is_decode(seq) ? 0 : seq->q_len * keys;
}

/* Sequences by descending work: Shell's method, in place and without allocation. */
static void sort_by_work(const kvl_engine *engine, const kvl_step *step, int32_t *order)
{
    for (int32_t i = 0; i < step->num_seqs; i++)
        order[i] = i;
    for (int32_t gap = step->num_seqs / 2; gap > 0; gap /= 2) {
        for (int32_t i = gap; i < step->num_seqs; i++) {
            int32_t moved = order[i], j = i;
            for (; j >= gap && work(engine, &step->seqs[order[j - gap]]) < work(engine, &step->seqs[moved]); j -= gap)
                order[j] = order[j - gap];
            order[j] = moved;
        }
    }
}

/* Which entry of the prefill section a sequence became. */
static int32_t entry_index(const kvl_step *step, int32_t seq)
{
    int32_t index = 0;
    for (int32_t i = 0; i < seq; i++)
        index += !kvl_is_decode(&step->seqs[i]) && step->seqs[i].q_len > 0;
    return index;
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
static int32_t *write_tiles(const kvl_engine *engine, const kvl_step_seq *seq, int32_t entry, bool by_head,
                            int32_t *item)
{
    int32_t last = (seq->q_len - 1) / engine->tile_queries * engine->tile_queries;
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

static void write_claims(const kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *at)
{
    int32_t heads = engine->params.geometry.num_kv_heads, units = (int32_t)engine->device->caps.compute_units;
    int64_t pairs = (int64_t)at->num_entries * heads;
    int64_t whole = pairs * WHOLE_NUMERATOR / WHOLE_DENOMINATOR / units * units;
    int32_t *claims = meta + at->claims_at, item = 0, num = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[engine->order[i]];
        if (kvl_is_decode(seq) || !seq->q_len)
            continue;
        int32_t tiles = (int32_t)kvl_ceil_div(seq->q_len, engine->tile_queries) * head_chunks(engine);
        for (int32_t head = 0; head < heads; head++, whole--) {
            int32_t stride = whole > 0 ? tiles : 1;
            for (int32_t tile = 0; tile < tiles; tile += stride, item += stride)
                claims[num++] = item;
        }
    }
    claims[num] = item;
    at->num_claims = num;
    at->used += num + 1;
}

static void write_items(const kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *at)
{
    bool persistent = engine->chosen[KVL_PREFILL].variant->persistent;
    int32_t *item = meta + at->items_at;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[engine->order[i]];
        if (!kvl_is_decode(seq) && seq->q_len)
            item = write_tiles(engine, seq, entry_index(step, engine->order[i]), persistent, item);
    }
    if (persistent)
        write_claims(engine, step, meta, at);
}

kvleaf_status kvl_schedule_build(const kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *schedule)
{
    kvl_schedule at = *schedule;
    kvleaf_status status = count(engine, step, &at);
    if (status)
        return status;
    at.num_blocks = step->num_blocks;
    at.table = step->table;
    lay_out(engine, &at);
    write_sequences(engine, step, meta, &at);
    if (at.num_entries) {
        sort_by_work(engine, step, engine->order);
        write_items(engine, step, meta, &at);
    }
    at.ready = true;
    *schedule = at;
    return KVLEAF_OK;
}
