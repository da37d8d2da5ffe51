/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of the prefill family: how many queries they have, and in which order they go out. */
#include "attention/state.h"

#include "common/plan.h"

#include <stddef.h>

/* A claim of a persistent kernel takes a whole (sequence, KV head) while this part of them lasts; the rest goes tile by
 * tile, so that the compute units finish together. */
#define WHOLE_NUMERATOR   3
#define WHOLE_DENOMINATOR 4
/* Tiles that weigh at least this percentage of the heaviest go out together, then those of the rest that do, and so on:
 * nearly as well balanced as tile by tile. */
#define BAND        65
#define BANDS       16
#define MANY        8   /* of the heaviest tiles: with as much for each compute unit it does not matter which is last */
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

/* What no tile of an entry weighs more than. */
static int64_t most_weight(const kvl_engine *engine, const int32_t *entry, int64_t queries)
{
    return weight(engine, keys_seen(entry, entry[ENTRY_Q_LEN]), kvl_ceil_div(queries, part_queries(engine)));
}

/* How a step's tiles weigh. */
typedef struct weights {
    int64_t most, total;            /* of one; of those of a KV head and head range */
    int64_t tiles[COST_LEVELS + 1]; /* by their share of the most */
} weights;

static weights weigh_tiles(const kvl_engine *engine, const int32_t *entries, int32_t num_entries, int64_t queries)
{
    weights all = {.most = 1};
    for (int32_t i = 0; i < num_entries; i++) {
        int64_t one = most_weight(engine, entries + i * ENTRY_INTS, queries);
        all.most = one > all.most ? one : all.most;
    }
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        for (int64_t first = 0; first < entry[ENTRY_Q_LEN]; first += queries) {
            int64_t one = weigh_tile(engine, entry, first, queries);
            all.total += one;
            all.tiles[one * COST_LEVELS / all.most]++;
        }
    }
    return all;
}

/* What the compute units have to do on average. */
static int64_t average(const kvl_engine *engine, const weights *all)
{
    return kvl_ceil_div(items_of(engine, all->total), engine->device->caps.compute_units);
}

/* What a step takes about: the compute units' average, or their share of the tiles of some weight or more, one of which
 * they can't have less than whole. */
static int64_t cost(const kvl_engine *engine, const weights *all)
{
    int64_t busiest = average(engine, all), above = 0;
    for (int level = COST_LEVELS; level > 0; level--) {
        above += all->tiles[level];
        int64_t share = kvl_ceil_div(items_of(engine, above), engine->device->caps.compute_units);
        int64_t time = share * (all->most * level / COST_LEVELS);
        busiest = time > busiest ? time : busiest;
    }
    return busiest;
}

/* How many queries the step's tiles have: the most, or fewer where that makes the compute units finish sooner. */
static weights choose_queries(const kvl_engine *engine, const int32_t *entries, kvl_schedule *at)
{
    weights chosen = {0};
    int64_t least = INT64_MAX;
    for (int32_t queries = engine->tile_queries; queries > 0; queries -= part_queries(engine)) {
        const weights now = weigh_tiles(engine, entries, at->num_entries, queries);
        int64_t time = cost(engine, &now);
        if (time < least) {
            least = time;
            chosen = now;
            at->tile_queries = queries;
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
static void make_bands(const kvl_engine *engine, int64_t most, int64_t *least)
{
    for (int band = 0; band < BANDS; band++)
        least[band] = most = most * BAND / 100;
    least[engine->chosen[KVL_PREFILL].variant->persistent ? 0 : BANDS - 1] = 0;
}

static int band_of(const int64_t *least, int64_t weight)
{
    int band = 0;
    while (weight < least[band])
        band++;
    return band;
}

/* The tiles of some entries, none of which weighs more than `most`: the heaviest first, in bands of about equal weight,
 * and within a band those of an entry and a KV head together. Returns how many items they are. */
static int32_t write_tiles(const kvl_engine *engine, const int32_t *entries, const int32_t *order, int32_t num_entries,
                           int32_t queries, int64_t most, int32_t *items)
{
    int64_t least[BANDS];
    int32_t next[BANDS] = {0}, number = 0;
    make_bands(engine, most, least);
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + order[i] * ENTRY_INTS;
        for (int32_t first = 0; first < entry[ENTRY_Q_LEN]; first += queries)
            next[band_of(least, weigh_tile(engine, entry, first, queries))] += (int32_t)items_of(engine, 1);
    }
    for (int32_t band = 0; band < BANDS; band++) {
        int32_t before = number;
        number += next[band];
        next[band] = before;
    }
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + order[i] * ENTRY_INTS, last = (entry[ENTRY_Q_LEN] - 1) / queries * queries;
        for (int32_t kv_head = 0; kv_head < engine->params.geometry.num_kv_heads; kv_head++)
            for (int32_t first = last; first >= 0; first -= queries) {
                int32_t *to = &next[band_of(least, weigh_tile(engine, entry, first, queries))];
                for (int32_t head = 0; head < group(engine); head += engine->tile_heads)
                    put_item(items + ITEM_INTS * (*to)++, order[i], first, kv_head, head);
            }
    }
    return number;
}

/* Where each unit has many, sequence for sequence, whose K and V then stay in cache; else bands of all, so that no
 * heavy tile comes last. */
static int32_t write_items(const kvl_engine *engine, const int32_t *entries, const kvl_schedule *at, const weights *all,
                           int32_t *items)
{
    int32_t number = 0;
    if (average(engine, all) < MANY * all->most)
        return write_tiles(engine, entries, engine->order, at->num_entries, at->tile_queries, all->most, items);
    for (int32_t i = 0; i < at->num_entries; i++) {
        int64_t most = most_weight(engine, entries + engine->order[i] * ENTRY_INTS, at->tile_queries);
        number += write_tiles(engine, entries, engine->order + i, 1, at->tile_queries, most,
                              items + (ptrdiff_t)ITEM_INTS * number);
    }
    return number;
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
    const weights all = choose_queries(engine, entries, at);
    sort_by_work(entries, at->num_entries, engine->order);
    at->items_at = at->used;
    at->num_items = write_items(engine, entries, at, &all, meta + at->items_at);
    at->used += ITEM_INTS * at->num_items;
    if (engine->chosen[KVL_PREFILL].variant->persistent)
        write_claims(engine, meta, at);
}
