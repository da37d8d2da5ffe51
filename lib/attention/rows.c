/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of the decode family: which keys each sees, in which order they stand, and the pieces of work they make.
 *
 * Splits lie at fixed positions, so a row's partial over a split is the same whoever computes it. Rows that have a
 * split in the same blocks may therefore share a piece, which reads it once. They are found by sorting: rows that share
 * their first splits come to stand next to each other, and of each row it is known how many it shares with the next. */
#include "attention/state.h"

#include "common/plan.h"

#include <string.h>

static const kvl_variant *variant_of(const kvl_engine *engine)
{
    return engine->chosen[KVL_DECODE].variant;
}

static bool takes_runs(const kvl_engine *engine)
{
    return variant_of(engine)->longest_run != NULL;
}

int32_t kvl_rows_item_ints(const kvl_engine *engine)
{
    return takes_runs(engine) ? RUN_INTS : SPLIT_INTS;
}

/* Rows from which a split is shared; 0 = never. */
static int32_t share_from(const kvl_engine *engine)
{
    const kvl_variant *variant = variant_of(engine);
    if (engine->params.sharing == KVLEAF_SHARING_OFF || !variant->shared_pairs || !engine->params.geometry.block_size)
        return 0;
    if (variant->shared_pairs(&engine->params.geometry) < 2)
        return 0;
    return engine->params.sharing == KVLEAF_SHARING_ALWAYS ? 2 : variant->share_from;
}

/* Row `query` of a sequence. Where its length is a bound that the device will lower, the range of keys moves down with
 * it, and may then touch a split more. */
static kvl_row make_row(const kvl_engine *engine, const kvl_step *step, int32_t index, int32_t query)
{
    const kvl_step_seq *seq = &step->seqs[index];
    int32_t window = engine->params.geometry.window, tokens = variant_of(engine)->split_tokens;
    int32_t position = seq->kv_len - seq->q_len + query;
    kvl_row row = {.seq = index, .end = position + 1, .splits = 1};
    if (window)
        row.first = position - window + 1;
    if (seq->mask == KVLEAF_MASK_NONE)
        row.end = window && window < seq->kv_len - position ? position + window : seq->kv_len;
    if (row.end <= 0)
        return row;
    row.splits = (row.end - 1) / tokens + 1;
    if (window && step->device_lens) {
        int64_t most = ((int64_t)row.end - row.first + tokens - 2) / tokens + 1; /* that so many keys touch anywhere */
        row.splits = row.splits < most ? row.splits : (int32_t)most;
    } else if (row.first > 0) {
        row.splits -= row.first / tokens;
    }
    if (row.first <= 0)
        row.blocks = seq->blocks;
    return row;
}

bool kvl_rows_collect(kvl_engine *engine, const kvl_step *step, kvl_schedule *at, int64_t *splits)
{
    int32_t q_token = 0, rows = 0;
    *splits = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const kvl_step_seq *seq = &step->seqs[i];
        for (int32_t query = 0; kvl_is_decode(seq) && query < seq->q_len; query++) {
            kvl_row row = make_row(engine, step, i, query);
            *splits += row.splits;
            if (*splits > engine->capacity.splits)
                return false;
            row.q_token = q_token + query;
            row.table = kvl_table_start(engine, step, at, seq);
            engine->rows[rows++] = row;
        }
        q_token += seq->q_len;
    }
    at->num_rows = rows;
    return true;
}

/* What share_split looks at: a split, where it ends, and its first table entry and their number. */
typedef struct split_place {
    int32_t split, end, first, count;
} split_place;

static split_place find_split(const kvl_engine *engine, int32_t split)
{
    int32_t tokens = variant_of(engine)->split_tokens, block_size = engine->params.geometry.block_size;
    split_place at = {.split = split, .end = (split + 1) * tokens, .first = split * tokens / block_size};
    at.count = (at.end - 1) / block_size + 1 - at.first;
    return at;
}

/* What rows that share a split have in common: its last block. Negative where the row doesn't see all of it. */
static int32_t key_of(const kvl_row *row, const split_place *at)
{
    return row->blocks && row->end >= at->end ? row->blocks[at->first + at->count - 1] : -1;
}

static bool same_blocks(const kvl_row *a, const kvl_row *b, const split_place *at)
{
    return memcmp(a->blocks + at->first, b->blocks + at->first, (size_t)at->count * sizeof(int32_t)) == 0;
}

/* Whether a key that is not negative comes twice: what costs little where nothing is shared. */
static bool repeats(const kvl_engine *engine, int32_t count)
{
    uint32_t size = kvl_hash_size(count);
    memset(engine->buckets, 0xff, size * sizeof *engine->buckets);
    for (int32_t i = 0; i < count; i++) {
        int32_t key = engine->keys[i];
        uint32_t at = kvl_hash_place(key, size);
        for (; key >= 0 && engine->buckets[at] >= 0; at = (at + 1) & (size - 1)) {
            if (engine->buckets[at] == key)
                return true;
        }
        if (key >= 0)
            engine->buckets[at] = key;
    }
    return false;
}

/* Sorts rows by their keys: Shell's method, in place and without allocation. */
static void sort_by_key(int32_t *keys, int32_t *order, int32_t count)
{
    for (int32_t gap = count / 2; gap > 0; gap /= 2) {
        for (int32_t i = gap; i < count; i++) {
            int32_t key = keys[i], moved = order[i], j = i;
            for (; j >= gap && keys[j - gap] > key; j -= gap) {
                keys[j] = keys[j - gap];
                order[j] = order[j - gap];
            }
            keys[j] = key;
            order[j] = moved;
        }
    }
}

/* Of `count` rows from `begin` on that share all splits before this one: finds those that share it too. */
static bool share_split(const kvl_engine *engine, int32_t begin, int32_t count, const split_place *at)
{
    const kvl_row *rows = engine->rows;
    int32_t *order = engine->row_order + begin, *keys = engine->keys;
    bool found = false;
    for (int32_t i = 0; i < count; i++)
        keys[i] = key_of(&rows[order[i]], at);
    if (!repeats(engine, count))
        return false;
    sort_by_key(keys, order, count);
    for (int32_t i = 0; i + 1 < count; i++) {
        if (keys[i] < 0 || keys[i] != keys[i + 1] || !same_blocks(&rows[order[i]], &rows[order[i + 1]], at))
            continue;
        engine->shared[begin + i] = at->split + 1;
        found = true;
    }
    return found;
}

void kvl_rows_order(kvl_engine *engine, int32_t num_rows)
{
    if (takes_runs(engine)) {
        kvl_runs_order(engine, num_rows);
        return;
    }
    for (int32_t i = 0; i < num_rows; i++) {
        engine->row_order[i] = i;
        engine->shared[i] = 0;
    }
    int32_t least = share_from(engine);
    bool more = least && num_rows >= least;
    for (int32_t split = 0; more; split++) {
        const split_place at = find_split(engine, split);
        more = false;
        for (int32_t begin = 0, end; begin < num_rows; begin = end) {
            end = begin + 1;
            while (end < num_rows && engine->shared[end - 1] >= split)
                end++;
            if (end - begin >= least && share_split(engine, begin, end - begin, &at))
                more = true;
        }
    }
}

static int32_t *put_split(int32_t *item, int32_t index, int32_t split, int32_t rows, int32_t kv_head, int32_t kv_heads)
{
    const int32_t fields[SPLIT_INTS] = {index, split, rows, kv_head, kv_heads};
    memcpy(item, fields, sizeof fields);
    return item + SPLIT_INTS;
}

/* The pieces of a split that `count` rows from `index` on share. A piece has room for so many pairs of a row and a KV
 * head: where the rows take it up, the KV heads go to several pieces. They are never more than the rows were. */
static int32_t *put_shared(const kvl_engine *engine, int32_t *item, int32_t index, int32_t split, int32_t count)
{
    int32_t heads = engine->params.geometry.num_kv_heads, least = share_from(engine);
    int32_t pairs = variant_of(engine)->shared_pairs(&engine->params.geometry);
    for (int32_t chunks = (int32_t)kvl_ceil_div(count, pairs), rows; count > 0;
         count -= rows, index += rows, chunks--) {
        rows = (int32_t)kvl_ceil_div(count, chunks);
        int32_t pieces = (int32_t)kvl_ceil_div(heads, pairs / rows);
        int32_t each = (int32_t)kvl_ceil_div(heads, pieces);
        if (rows < least || pieces > rows) {
            for (int32_t i = 0; i < rows; i++)
                item = put_split(item, index + i, split, 1, 0, heads);
            continue;
        }
        for (int32_t head = 0; head < heads; head += each)
            item = put_split(item, index, split, rows, head, head + each < heads ? each : heads - head);
    }
    return item;
}

static int32_t *write_items(const kvl_engine *engine, const kvl_schedule *at, int32_t *item)
{
    int32_t heads = engine->params.geometry.num_kv_heads;
    for (int32_t i = 0; i < at->num_rows; i++) {
        const kvl_row *row = &engine->rows[engine->row_order[i]];
        for (int32_t s = i ? engine->shared[i - 1] : 0; s < row->splits; s++) { /* those before are the row's before */
            int32_t count = 1;
            while (i + count < at->num_rows && engine->shared[i + count - 1] > s)
                count++;
            if (count > 1)
                item = put_shared(engine, item, i, s, count);
            else
                item = put_split(item, i, s, 1, 0, heads);
        }
    }
    return item;
}

void kvl_rows_write(const kvl_engine *engine, const kvl_step *step, int32_t *meta, kvl_schedule *at, int32_t *resolve)
{
    int32_t *at_row = meta + at->rows_at, partial = 0;
    if (takes_runs(engine))
        kvl_runs_choose(engine, at);
    for (int32_t i = 0; i < at->num_rows; i++, at_row += ROW_INTS) {
        const kvl_row *row = &engine->rows[engine->row_order[i]];
        const int32_t fields[ROW_INTS] = {row->q_token, row->end, row->table, partial, row->first, 1 << row->run_level};
        int32_t kv_len = step->seqs[row->seq].kv_len, target = (int32_t)(at_row - meta);
        memcpy(at_row, fields, sizeof fields);
        partial += kvl_row_pieces(row);
        if (!step->device_lens)
            continue;
        resolve = kvl_put_resolve(resolve, target + ROW_VISIBLE, row->seq, kv_len - row->end);
        if (engine->params.geometry.window)
            resolve = kvl_put_resolve(resolve, target + ROW_FIRST, row->seq, kv_len - row->first);
    }
    if (at->num_rows)
        memcpy(at->first_row, meta + at->rows_at, sizeof at->first_row);
    int32_t *items = meta + at->splits_at;
    if (takes_runs(engine))
        kvl_runs_write(engine, meta, at);
    else
        at->num_splits = (int32_t)((write_items(engine, at, items) - items) / SPLIT_INTS);
    at->used = at->splits_at + at->num_splits * kvl_rows_item_ints(engine);
}
