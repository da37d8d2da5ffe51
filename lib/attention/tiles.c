/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of the prefill family: how many queries they have, and in which order they go out. */
#include "attention/state.h"

#include "common/plan.h"

/* A claim of a persistent kernel takes a whole (sequence, KV head) while this part of them lasts; the rest goes tile by
 * tile, so that the compute units finish together. */
#define WHOLE_NUMERATOR   3
#define WHOLE_DENOMINATOR 4
/* Tiles that weigh at least this percentage of the heaviest go out together, then those of the rest that do, and so on:
 * nearly as well balanced as tile by tile. */
#define BAND        65
#define BANDS       16
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

/* How long a tile of `parts` parts takes about, in what the variant's costs are in; without costs, its keys. */
static int64_t weight(const kvl_engine *engine, int64_t keys, int64_t parts)
{
    const int32_t *costs = engine->chosen[KVL_PREFILL].variant->tile_costs;
    keys = keys > 0 ? keys : 0;
    return costs ? costs[0] + keys * costs[parts] / COST_KEYS : keys;
}

/* The same of the tile of an entry that begins with query `first`, where tiles have `queries`. */
static int64_t weigh_tile(const kvl_engine *engine, const int32_t *entry, int64_t first, int64_t queries)
{
    int64_t left = entry[ENTRY_Q_LEN] - first, used = left < queries ? left : queries;
    return weight(engine, keys_seen(entry, first + used), kvl_ceil_div(used, part_queries(engine)));
}

/* What no tile of a step weighs more than. */
static int64_t most_weight(const kvl_engine *engine, const int32_t *entries, int32_t num_entries, int64_t queries)
{
    int64_t most = 1, parts = kvl_ceil_div(queries, part_queries(engine));
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        int64_t one = weight(engine, keys_seen(entry, entry[ENTRY_Q_LEN]), parts);
        most = one > most ? one : most;
    }
    return most;
}

/* What a step takes about if its tiles have so many queries: the compute units' average, or their share of the tiles of
 * some weight or more, one of which they can't have less than whole. */
static int64_t cost(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at, int64_t queries)
{
    int64_t units = engine->device->caps.compute_units, total = 0, above = 0, tiles[COST_LEVELS + 1] = {0};
    int64_t most = most_weight(engine, entries, at->num_entries, queries);
    for (int32_t i = 0; i < at->num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        for (int64_t first = 0; first < entry[ENTRY_Q_LEN]; first += queries) {
            int64_t one = weigh_tile(engine, entry, first, queries);
            total += one;
            tiles[one * COST_LEVELS / most]++;
        }
    }
    int64_t busiest = kvl_ceil_div(items_of(engine, total), units);
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
    int32_t part = part_queries(engine), chosen = engine->tile_queries;
    if (chosen == part)
        return chosen;
    int64_t least = INT64_MAX;
    for (int32_t queries = engine->tile_queries; queries > 0; queries -= part) {
        int64_t now = cost(engine, entries, at, queries);
        if (now < least) {
            least = now;
            chosen = queries;
        }
    }
    return chosen;
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

static void put_item(int32_t *item, int32_t entry, int32_t query, int32_t kv_head, int32_t head)
{
    item[ITEM_ENTRY] = entry;
    item[ITEM_QUERY] = query;
    item[ITEM_KV_HEAD] = kv_head;
    item[ITEM_HEAD] = head;
}

/* The least weight of each band; a persistent kernel's tiles are all one, since one claim may take those of a head. */
static void make_bands(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at, int64_t *least)
{
    int64_t limit = most_weight(engine, entries, at->num_entries, at->tile_queries);
    for (int band = 0; band < BANDS; band++) {
        limit = limit * BAND / 100;
        least[band] = limit;
    }
    least[engine->chosen[KVL_PREFILL].variant->persistent ? 0 : BANDS - 1] = 0;
}

static int band_of(const int64_t *least, int64_t weight)
{
    int band = 0;
    while (weight < least[band])
        band++;
    return band;
}

/* The heaviest first, in bands of about equal weight; within a band those of an entry and a KV head together, so that
 * they find their K and V in cache. */
static void write_tiles(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at, int32_t *items)
{
    const int32_t queries = at->tile_queries;
    int64_t least[BANDS];
    int32_t next[BANDS] = {0};
    make_bands(engine, entries, at, least);
    for (int32_t i = 0; i < at->num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        for (int32_t first = 0; first < entry[ENTRY_Q_LEN]; first += queries)
            next[band_of(least, weigh_tile(engine, entry, first, queries))] += (int32_t)items_of(engine, 1);
    }
    for (int32_t band = 0, before = 0; band < BANDS; band++) {
        int32_t number = next[band];
        next[band] = before;
        before += number;
    }
    for (int32_t i = 0; i < at->num_entries; i++) {
        const int32_t index = engine->order[i], *entry = entries + index * ENTRY_INTS;
        const int32_t last = (entry[ENTRY_Q_LEN] - 1) / queries * queries;
        for (int32_t kv_head = 0; kv_head < engine->params.geometry.num_kv_heads; kv_head++)
            for (int32_t first = last; first >= 0; first -= queries) {
                int32_t *to = &next[band_of(least, weigh_tile(engine, entry, first, queries))];
                for (int32_t head = 0; head < group(engine); head += engine->tile_heads)
                    put_item(items + ITEM_INTS * (*to)++, index, first, kv_head, head);
            }
    }
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
    int64_t tiles = 0;
    at->tile_queries = choose_queries(engine, entries, at);
    at->items_at = at->used;
    for (int32_t i = 0; i < at->num_entries; i++)
        tiles += kvl_ceil_div(entries[i * ENTRY_INTS + ENTRY_Q_LEN], at->tile_queries);
    at->num_items = (int32_t)items_of(engine, tiles);
    at->used += ITEM_INTS * at->num_items;
    sort_by_work(entries, at->num_entries, engine->order);
    write_tiles(engine, entries, at, meta + at->items_at);
    if (engine->chosen[KVL_PREFILL].variant->persistent)
        write_claims(engine, meta, at);
}
