/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of the prefill family: how many queries they have, and in which order they go out. */
#include "attention/state.h"

#include "common/plan.h"

/* A claim of a persistent kernel takes a whole (sequence, KV head) while this part of them lasts; the rest goes tile by
 * tile, so that the compute units finish together. */
#define WHOLE_NUMERATOR   3
#define WHOLE_DENOMINATOR 4
/* Tiles with at least this percentage of the keys of the heaviest go out together: as well balanced as tile by tile. */
#define BAND        80
#define COST_KEYS   128 /* that the costs of a variant are for */
#define COST_LEVELS 16

static int32_t group(const kvl_engine *engine)
{
    return engine->params.geometry.num_heads / engine->params.geometry.num_kv_heads;
}

/* Head ranges a KV head's group is cut into. */
static int32_t head_chunks(const kvl_engine *engine)
{
    return (int32_t)kvl_ceil_div(group(engine), engine->tile_heads);
}

/* Items of so many tiles of a KV head. */
static int64_t items_of(const kvl_engine *engine, int64_t tiles)
{
    return tiles * engine->params.geometry.num_kv_heads * head_chunks(engine);
}

/* Queries of the lowest tile. */
static int32_t part_queries(const kvl_engine *engine)
{
    int32_t parts = engine->chosen[KVL_PREFILL].variant->tile_parts;
    return engine->tile_queries / (parts ? parts : 1);
}

int64_t kvl_tiles_most(const kvl_engine *engine)
{
    const kvl_engine_params *params = &engine->params;
    return items_of(engine, kvl_ceil_div(params->max_tokens, part_queries(engine)) + params->max_seqs);
}

/* Keys that the query of an entry sees which lies behind `end` - 1 others. */
static int64_t keys_seen(const int32_t *entry, int64_t end)
{
    int64_t window = entry[ENTRY_WINDOW];
    int64_t keys = entry[ENTRY_MASK] ? entry[ENTRY_KV_LEN] : entry[ENTRY_KV_LEN] - entry[ENTRY_Q_LEN] + end;
    return window && keys > window ? window : keys;
}

/* What a step takes about, in what the variant's costs are in, if its tiles had `parts` parts: the compute units'
 * average, or their share of the tiles of some weight or more, one of which they can't have less than whole. */
static int64_t cost(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at, int32_t parts)
{
    const int32_t *costs = engine->chosen[KVL_PREFILL].variant->tile_costs;
    int64_t units = engine->device->caps.compute_units, queries = (int64_t)parts * part_queries(engine);
    int64_t most = 1, total = 0, tiles[COST_LEVELS + 1] = {0};
    for (int32_t i = 0; i < at->num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        int64_t longest = costs[0] + keys_seen(entry, entry[ENTRY_Q_LEN]) * costs[parts] / COST_KEYS;
        most = longest > most ? longest : most;
    }
    for (int32_t i = 0; i < at->num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        for (int64_t left = entry[ENTRY_Q_LEN]; left > 0; left -= queries) {
            int64_t used = left < queries ? kvl_ceil_div(left, part_queries(engine)) : parts;
            int64_t keys = keys_seen(entry, entry[ENTRY_Q_LEN] - left + (left < queries ? left : queries));
            int64_t one = costs[0] + (keys > 0 ? keys * costs[used] / COST_KEYS : 0);
            total += one;
            tiles[one * COST_LEVELS / most]++;
        }
    }
    int64_t busiest = kvl_ceil_div(items_of(engine, total), units), above = 0;
    for (int level = COST_LEVELS; level > 0; level--) {
        above += tiles[level];
        int64_t share = kvl_ceil_div(items_of(engine, above), units) * (most * level / COST_LEVELS);
        busiest = share > busiest ? share : busiest;
    }
    return busiest;
}

/* How many queries the step's tiles have: the most, or fewer where that makes the compute units finish sooner. */
static int32_t choose_queries(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at)
{
    int32_t chosen = engine->chosen[KVL_PREFILL].variant->tile_parts;
    if (!chosen)
        return engine->tile_queries;
    int64_t least = cost(engine, entries, at, chosen);
    for (int32_t parts = chosen - 1; parts > 0; parts--) {
        int64_t now = cost(engine, entries, at, parts);
        if (now < least) {
            least = now;
            chosen = parts;
        }
    }
    return chosen * part_queries(engine);
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

/* Heaviest first, in bands of about equal work, and a band KV head for KV head: so those that run at the same time find
 * their K and V in cache. All of a persistent kernel's are one band, since one claim may take a head's. */
static int32_t *write_tiles(const kvl_engine *engine, const int32_t *entries, int32_t index, int32_t queries,
                            int32_t *item)
{
    const int32_t *entry = entries + index * ENTRY_INTS;
    bool one_band = engine->chosen[KVL_PREFILL].variant->persistent;
    for (int32_t tile = (entry[ENTRY_Q_LEN] - 1) / queries, end; tile >= 0; tile = end) {
        int64_t least = keys_seen(entry, (tile + 1) * (int64_t)queries) * BAND / 100;
        end = tile - 1;
        while (end >= 0 && (one_band || keys_seen(entry, (end + 1) * (int64_t)queries) >= least))
            end--;
        for (int32_t kv_head = 0; kv_head < engine->params.geometry.num_kv_heads; kv_head++) {
            for (int32_t i = tile; i > end; i--) {
                for (int32_t head = 0; head < group(engine); head += engine->tile_heads)
                    item = put_item(item, index, i * queries, kv_head, head);
            }
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
        int32_t tiles = (int32_t)kvl_ceil_div(q_len, at->tile_queries) * head_chunks(engine);
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

void kvl_tiles_write(const kvl_engine *engine, int32_t *meta, kvl_schedule *at)
{
    const int32_t *entries = meta + at->entries_at;
    at->tile_queries = choose_queries(engine, entries, at);
    at->items_at = at->used;
    int32_t *item = meta + at->items_at;
    sort_by_work(entries, at->num_entries, engine->order);
    for (int32_t i = 0; i < at->num_entries; i++)
        item = write_tiles(engine, entries, engine->order[i], at->tile_queries, item);
    at->num_items = (int32_t)(item - (meta + at->items_at)) / ITEM_INTS;
    at->used += ITEM_INTS * at->num_items;
    if (engine->chosen[KVL_PREFILL].variant->persistent)
        write_claims(engine, meta, at);
}
