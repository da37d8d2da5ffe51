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
#define BAND      80
#define BANDS     16
#define MANY      8   /* of the heaviest tiles: with as much for each compute unit it does not matter which is last */
#define COST_KEYS 128 /* that the costs of a variant are for */
#define LOW_PARTS 8   /* of an entry's queries, so many of which may be in lower tiles */
#define LOW_GAIN  32  /* what they must save, since they read more: one part of so many */

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

int64_t kvl_tiles_most(const kvl_engine *engine)
{
    const kvl_engine_params *params = &engine->params;
    return items_of(engine, kvl_ceil_div(params->max_tokens, engine->tile_part) + params->max_seqs);
}

/* How a step's queries are cut: low_parts of LOW_PARTS of each entry's, the first ones, into tiles of `low`, the rest
 * into tiles of `high`. */
typedef struct cut {
    int32_t high, low, low_parts;
} cut;

/* The same of one entry: its first tiles are low. */
typedef struct tiling {
    int32_t high, low, num_low, num;
} tiling;

static tiling cut_entry(const cut *how, const int32_t *entry)
{
    int64_t q_len = entry[ENTRY_Q_LEN];
    tiling tiles = {.high = how->high, .low = how->low};
    tiles.num_low = (int32_t)kvl_ceil_div(q_len * how->low_parts, (int64_t)LOW_PARTS * how->low);
    int64_t rest = q_len - (int64_t)tiles.num_low * how->low;
    tiles.num = tiles.num_low + (rest > 0 ? (int32_t)kvl_ceil_div(rest, how->high) : 0);
    return tiles;
}

/* The queries of tile `index` of an entry. */
typedef struct span {
    int32_t first, num;
} span;

static span span_of(const tiling *tiles, const int32_t *entry, int32_t index)
{
    int32_t low = index < tiles->num_low ? index : tiles->num_low,
            most = index < tiles->num_low ? tiles->low : tiles->high;
    int32_t first = low * tiles->low + (index - low) * tiles->high, left = entry[ENTRY_Q_LEN] - first;
    return (span){first, left < most ? left : most};
}

/* Keys that any query of a tile sees. */
static int64_t keys_seen(const int32_t *entry, span queries)
{
    int64_t keys = entry[ENTRY_KV_LEN], window = entry[ENTRY_WINDOW];
    int64_t position = keys - entry[ENTRY_Q_LEN] + queries.first, first = window ? position - window + 1 : 0;
    int64_t end = position + queries.num;
    if (entry[ENTRY_MASK])
        end = window ? end + window - 1 : keys;
    end = end < keys ? end : keys;
    first = first > 0 ? first : 0;
    return end > first ? end - first : 0;
}

/* How long a tile takes about, in what the variant's costs are in; without costs, its keys. */
static int64_t weigh(const kvl_engine *engine, const int32_t *entry, span queries)
{
    const int32_t *costs = engine->chosen[KVL_PREFILL].variant->tile_costs;
    int64_t keys = keys_seen(entry, queries);
    int32_t parts = (queries.num + engine->tile_part - 1) / engine->tile_part;
    return costs ? costs[0] + keys * costs[parts] / COST_KEYS : keys;
}

/* Some entries' tiles of a KV head and head range: what the heaviest weighs, and all. */
typedef struct weights {
    int64_t most, total;
} weights;

static weights weigh_tiles(const kvl_engine *engine, const int32_t *entries, const int32_t *order, int32_t num_entries,
                           const cut *how)
{
    weights all = {.most = 1};
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + order[i] * ENTRY_INTS;
        const tiling cuts = cut_entry(how, entry);
        for (int32_t tile = 0; tile < cuts.num; tile++) {
            int64_t one = weigh(engine, entry, span_of(&cuts, entry, tile));
            all.most = one > all.most ? one : all.most;
            all.total += one;
        }
    }
    return all;
}

/* What the compute units have to do on average. */
static int64_t average(const kvl_engine *engine, const weights *all)
{
    return kvl_ceil_div(items_of(engine, all->total), engine->units);
}

/* When the compute units are done that take a step's tiles, the heaviest first. Weights are in parts of the heaviest
 * for it, `most`; what rounding leaves of one goes to the next. */
static int64_t deal_out(const kvl_engine *engine, const int32_t *entries, int32_t num_entries, const cut *how,
                        int64_t most)
{
    int32_t tiles[KVL_QUEUE_LONGEST + 1] = {0};
    int64_t left = 0;
    for (int32_t i = 0; i < num_entries; i++) {
        const int32_t *entry = entries + i * ENTRY_INTS;
        const tiling cuts = cut_entry(how, entry);
        for (int32_t tile = 0; tile < cuts.num; tile++) {
            left += weigh(engine, entry, span_of(&cuts, entry, tile)) * KVL_QUEUE_LONGEST;
            int64_t length = left / most;
            left -= length * most;
            tiles[length]++;
        }
    }
    const kvl_loads loads = kvl_queue_share(tiles, KVL_QUEUE_LONGEST, items_of(engine, 1), engine->units);
    return kvl_queue_last(&loads) * most / KVL_QUEUE_LONGEST;
}

/* The cut by which the compute units are done first: full tiles, or lower ones, or full and the next lower ones. Where
 * each unit has *many, it does not matter which is last: tiles of one height then, by the average. */
static cut choose_cut(const kvl_engine *engine, const int32_t *entries, int32_t num_entries, bool *many)
{
    int32_t high = engine->tile_queries, part = engine->tile_part;
    cut best = {high, high, 0};
    const weights full = weigh_tiles(engine, entries, engine->order, num_entries, &best);
    int64_t least = average(engine, &full);
    *many = least >= MANY * full.most;
    if (part == high)
        return best;
    if (!*many)
        least = deal_out(engine, entries, num_entries, &best, full.most);
    least -= least / LOW_GAIN;
    for (int32_t low = part; low < high; low += part) {
        int32_t fewest = *many || low + part < high ? LOW_PARTS : 1;
        for (int32_t parts = LOW_PARTS; parts >= fewest; parts--) {
            const cut now = {parts == LOW_PARTS ? low : high, low, parts};
            const weights all = weigh_tiles(engine, entries, engine->order, num_entries, &now);
            int64_t time = average(engine, &all);
            if (time < least && !*many) /* dealt out, they take no less */
                time = deal_out(engine, entries, num_entries, &now, all.most);
            if (time < least) {
                least = time;
                best = now;
            }
        }
    }
    return best;
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

static void put_item(int32_t *item, int32_t entry, span queries, int32_t kv_head, int32_t head)
{
    item[ITEM_ENTRY] = entry;
    item[ITEM_QUERY] = queries.first;
    item[ITEM_KV_HEAD] = kv_head;
    item[ITEM_HEAD] = head;
    item[ITEM_QUERIES] = queries.num;
}

/* The least weight of each band; a persistent kernel's tiles are all one, since one claim may take those of a head. */
static void make_bands(const kvl_engine *engine, int64_t most, int64_t *least)
{
    for (int band = 0; band < BANDS; band++)
        least[band] = most = most * BAND / 100;
    least[engine->chosen[KVL_PREFILL].variant->persistent ? 0 : BANDS - 1] = 0;
}

/* The band that a tile belongs to. A lower one fills up what the high ones leave, a band later. */
static int band_of(const kvl_engine *engine, const int32_t *entry, span queries, const cut *how, const int64_t *least)
{
    int64_t weighs = weigh(engine, entry, queries);
    int band = 0;
    while (weighs < least[band])
        band++;
    bool later = queries.num < how->high && queries.first + queries.num < entry[ENTRY_Q_LEN];
    return later && least[band] > 0 ? band + 1 : band;
}

/* Adds an entry's tiles to the bands they belong to. */
static void count_bands(const kvl_engine *engine, const int32_t *entry, const cut *how, const int64_t *least,
                        int32_t *tiles)
{
    const tiling cuts = cut_entry(how, entry);
    for (int32_t tile = 0; tile < cuts.num; tile++)
        tiles[band_of(engine, entry, span_of(&cuts, entry, tile), how, least)]++;
}

/* The tiles of an entry, the last first: each band's from where `next` says, KV head for KV head. */
static void write_entry(const kvl_engine *engine, const int32_t *entry, int32_t index, const cut *how,
                        const int64_t *least, int32_t *next, int32_t *items)
{
    const tiling cuts = cut_entry(how, entry);
    int32_t heads = engine->params.geometry.num_kv_heads, chunks = head_chunks(engine);
    int32_t tiles[BANDS] = {0}, before[BANDS] = {0};
    count_bands(engine, entry, how, least, tiles);
    for (int32_t tile = cuts.num - 1; tile >= 0; tile--) {
        const span queries = span_of(&cuts, entry, tile);
        int band = band_of(engine, entry, queries, how, least);
        for (int32_t kv_head = 0; kv_head < heads; kv_head++) {
            int32_t at = next[band] + (kv_head * tiles[band] + before[band]) * chunks;
            for (int32_t chunk = 0; chunk < chunks; chunk++)
                put_item(items + (ptrdiff_t)ITEM_INTS * (at + chunk), index, queries, kv_head,
                         chunk * engine->tile_heads);
        }
        before[band]++;
    }
    for (int band = 0; band < BANDS; band++)
        next[band] += tiles[band] * heads * chunks;
}

/* The tiles of some entries: the heaviest first, in bands of about equal weight, and within a band those of an entry
 * and a KV head together. Returns how many items they are. */
static int32_t write_tiles(const kvl_engine *engine, const int32_t *entries, const int32_t *order, int32_t num_entries,
                           const cut *how, int32_t *items)
{
    int64_t least[BANDS];
    int32_t next[BANDS] = {0}, number = 0;
    make_bands(engine, weigh_tiles(engine, entries, order, num_entries, how).most, least);
    for (int32_t i = 0; i < num_entries; i++)
        count_bands(engine, entries + order[i] * ENTRY_INTS, how, least, next);
    for (int band = 0; band < BANDS; band++) {
        int32_t before = number;
        number += (int32_t)items_of(engine, next[band]);
        next[band] = before;
    }
    for (int32_t i = 0; i < num_entries; i++)
        write_entry(engine, entries + order[i] * ENTRY_INTS, order[i], how, least, next, items);
    return number;
}

static void write_claims(const kvl_engine *engine, const cut *how, int32_t *meta, kvl_schedule *at)
{
    int32_t heads = engine->params.geometry.num_kv_heads, units = (int32_t)engine->units;
    int64_t pairs = (int64_t)at->num_entries * heads;
    int64_t whole = pairs * WHOLE_NUMERATOR / WHOLE_DENOMINATOR / units * units;
    int32_t *claims = meta + at->used, item = 0, num = 0;
    for (int32_t i = 0; i < at->num_entries; i++) {
        int32_t tiles = cut_entry(how, meta + at->entries_at + engine->order[i] * ENTRY_INTS).num * head_chunks(engine);
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

/* Where each unit has many tiles, sequences go out one after the other, whose K and V then stay in cache; else in bands
 * of all sequences. */
void kvl_tiles_write(const kvl_engine *engine, int32_t *meta, kvl_schedule *at)
{
    const int32_t *entries = meta + at->entries_at, *order = engine->order;
    int32_t num_entries = at->num_entries, *items = meta + at->used;
    bool many;
    sort_by_work(entries, num_entries, engine->order);
    const cut how = choose_cut(engine, entries, num_entries, &many);
    at->items_at = at->used;
    at->num_items = 0;
    for (int32_t i = 0, each = many ? 1 : num_entries; i < num_entries; i += each)
        at->num_items += write_tiles(engine, entries, order + i, each, &how, items + ITEM_INTS * at->num_items);
    at->used += ITEM_INTS * at->num_items;
    if (engine->chosen[KVL_PREFILL].variant->persistent)
        write_claims(engine, &how, meta, at);
}
