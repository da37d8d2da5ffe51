/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of the prefill family: that a step's items cover every query and head once, the heaviest first in bands and a
 * KV head's of a band together, that claims cover the items, and that compute units which take them in that order are
 * done about as early as by any one height. No device is asked. */
#include "attention/state.h"
#include "common/plan.h"
#include "support.h"

#include <string.h>

enum { UNITS = 132, ENTRIES = 300, ITEMS = (16 * 8192 / 8 + ENTRIES) * 32, BEHIND = 16, POISON = -77 };

/* A band's tiles weigh at least this percentage of what the heaviest may weigh that is not in the bands before. Where
 * each unit has MANY times the heaviest to do, an entry has bands of its own. */
enum { BAND = 80, BANDS = 16, MANY = 8 };

/* A step's entries, then its items and claims; and which parts of tiles are covered. */
static int32_t meta[ENTRY_INTS * ENTRIES + (ITEM_INTS + 1) * ITEMS + 1 + BEHIND];
static unsigned char covered[ITEMS];

/* Of a variant's tiles. */
typedef struct shape {
    int32_t group, tile_heads, tile_queries, parts;
    bool persistent;
} shape;

static const shape shapes[] = {
    {4, 4, 48, 3, false}, {1, 1, 192, 3, false}, {8, 8, 24, 3, false}, {6, 4, 32, 0, false},
    {4, 4, 48, 3, true},  {7, 7, 27, 0, true},   {6, 4, 32, 0, true},
};

enum { SHAPES = sizeof shapes / sizeof *shapes, WITH_PARTS = 3 }; /* the first so many choose, and are queued */

typedef struct fake {
    kvl_variant variant;
    int32_t order[ENTRIES];
    kvl_engine engine;
    kvl_schedule at;
} fake;

/* The variant whose tiles have as many parts: its costs are what the test goes by. */
static const kvl_variant *with_parts(void)
{
    int count;
    const kvl_variant *rows = kvl_variants(KVL_PREFILL, &count), *row = rows;
    while (row < rows + count && row->tile_parts != shapes[0].parts)
        row++;
    assert_true(row < rows + count);
    return row;
}

/* As the engine has it of a variant with so many parts. */
static void set_parts(fake *f, int32_t parts)
{
    f->engine.tile_part = f->engine.tile_queries / (parts ? parts : 1);
}

static void make(fake *out, const shape *cut, int32_t kv_heads)
{
    *out = (fake){.variant = {.persistent = cut->persistent, .tile_costs = with_parts()->tile_costs},
                  .engine = {.units = UNITS,
                             .params.geometry = {.num_heads = kv_heads * cut->group, .num_kv_heads = kv_heads},
                             .tile_heads = cut->tile_heads,
                             .tile_queries = cut->tile_queries}};
    set_parts(out, cut->parts);
    out->engine.chosen[KVL_PREFILL].variant = &out->variant;
    out->engine.order = out->order;
}

/* The engine takes no more tokens and sequences than the step has. */
static void add(fake *f, int32_t q_len, int32_t kv_len, kvleaf_mask mask, int32_t window)
{
    const int32_t fields[ENTRY_INTS] = {f->engine.params.max_tokens, q_len, kv_len, 0, mask, window, 0, 0};
    assert_true(f->at.num_entries < ENTRIES);
    memcpy(meta + ENTRY_INTS * f->at.num_entries++, fields, sizeof fields);
    f->engine.params.max_tokens += q_len;
    f->engine.params.max_seqs++;
}

static const int32_t *entry_of(const int32_t *item)
{
    return meta + ENTRY_INTS * item[ITEM_ENTRY];
}

static const int32_t *item_at(const fake *f, int32_t index)
{
    return meta + f->at.items_at + ITEM_INTS * index;
}

static void write_items(fake *f)
{
    int64_t most = kvl_tiles_most(&f->engine);
    assert_in_range(most, 1, ITEMS);
    int32_t *after = meta + ENTRY_INTS * f->at.num_entries;
    int32_t room = (int32_t)((ITEM_INTS + 1) * most) + 1;
    for (int32_t i = 0; i < BEHIND; i++)
        after[room + i] = POISON;
    f->at.used = (int32_t)(after - meta);
    kvl_tiles_write(&f->engine, meta, &f->at);
    for (int32_t i = 0; i < BEHIND; i++)
        assert_int_equal(after[room + i], POISON);
    assert_in_range(f->at.num_items, 1, most);
    assert_int_equal(f->at.items_at, after - meta);
    if (!f->variant.persistent)
        assert_int_equal(f->at.used, f->at.items_at + ITEM_INTS * f->at.num_items);
}

/* Keys that any of an entry's queries first .. first + queries - 1 sees. */
static int64_t keys_seen(const int32_t *entry, int64_t first, int64_t queries)
{
    int64_t window = entry[ENTRY_WINDOW], begin = entry[ENTRY_KV_LEN] - entry[ENTRY_Q_LEN] + first;
    int64_t end = begin + queries, from = window ? begin - window + 1 : 0;
    if (entry[ENTRY_MASK])
        end = window ? end + window - 1 : entry[ENTRY_KV_LEN];
    end = end > entry[ENTRY_KV_LEN] ? entry[ENTRY_KV_LEN] : end;
    from = from > 0 ? from : 0;
    return end > from ? end - from : 0;
}

static int32_t parts_of(int32_t part, int32_t queries)
{
    return (queries + part - 1) / part;
}

/* What the variant's costs, which are of 128 keys, say of an entry's queries first .. first + queries - 1, where a part
 * of a tile is `part` of them. */
static int64_t weight(const fake *f, int32_t part, const int32_t *entry, int32_t first, int32_t queries)
{
    const int32_t *costs = f->variant.tile_costs;
    return costs[0] + keys_seen(entry, first, queries) * costs[parts_of(part, queries)] / 128;
}

static int64_t weight_of(const fake *f, int32_t part, const int32_t *item)
{
    return weight(f, part, entry_of(item), item[ITEM_QUERY], item[ITEM_QUERIES]);
}

/* Tiles are whole parts, but for an entry's end, and cover each of every head once. */
static void check_cover(const fake *f)
{
    const kvl_geometry *geometry = &f->engine.params.geometry;
    int32_t heads = geometry->num_kv_heads, group = geometry->num_heads / heads, tile_heads = f->engine.tile_heads;
    int32_t ranges = (group + tile_heads - 1) / tile_heads, first[ENTRIES], parts = 0, taken = 0;
    for (int32_t i = 0; i < f->at.num_entries; i++) {
        first[i] = parts;
        parts += parts_of(f->engine.tile_part, meta[ENTRY_INTS * i + ENTRY_Q_LEN]);
    }
    assert_in_range(parts * heads * ranges, 1, ITEMS);
    memset(covered, 0, (size_t)parts * (size_t)(heads * ranges));
    for (int32_t i = 0; i < f->at.num_items; i++) {
        const int32_t *item = item_at(f, i);
        assert_in_range(item[ITEM_ENTRY], 0, f->at.num_entries - 1);
        assert_in_range(item[ITEM_QUERY], 0, entry_of(item)[ENTRY_Q_LEN] - 1);
        assert_in_range(item[ITEM_KV_HEAD], 0, heads - 1);
        assert_in_range(item[ITEM_HEAD], 0, group - 1);
        assert_int_equal(item[ITEM_HEAD] % tile_heads, 0);
        int32_t left = entry_of(item)[ENTRY_Q_LEN] - item[ITEM_QUERY];
        assert_in_range(item[ITEM_QUERIES], 1, left < f->engine.tile_queries ? left : f->engine.tile_queries);
        assert_int_equal(item[ITEM_QUERY] % f->engine.tile_part, 0);
        assert_true(item[ITEM_QUERIES] == left || item[ITEM_QUERIES] % f->engine.tile_part == 0);
        int32_t begin = first[item[ITEM_ENTRY]] + item[ITEM_QUERY] / f->engine.tile_part;
        for (int32_t part = begin; part < begin + parts_of(f->engine.tile_part, item[ITEM_QUERIES]); part++, taken++)
            assert_int_equal(covered[(part * heads + item[ITEM_KV_HEAD]) * ranges + item[ITEM_HEAD] / tile_heads]++, 0);
    }
    assert_int_equal(taken, parts * heads * ranges);
}

/* How many items from here on are of one entry and KV head; 0 behind the last. */
static int32_t run_at(const fake *f, int32_t index)
{
    int32_t end = index;
    while (end < f->at.num_items && item_at(f, end)[ITEM_ENTRY] == item_at(f, index)[ITEM_ENTRY] &&
           item_at(f, end)[ITEM_KV_HEAD] == item_at(f, index)[ITEM_KV_HEAD])
        end++;
    return end - index;
}

/* The most that a tile of an entry weighs, or of any where it is NULL. */
static int64_t most_weight(const fake *f, const int32_t *entry)
{
    int64_t most = 0;
    for (int32_t i = 0; i < f->at.num_items; i++) {
        const int32_t *item = item_at(f, i);
        int64_t one = !entry || entry_of(item) == entry ? weight_of(f, f->engine.tile_part, item) : 0;
        most = one > most ? one : most;
    }
    return most;
}

/* Whether entries go out one after the other: each unit has many of the heaviest tiles, were all full. */
static bool is_apart(const fake *f)
{
    const kvl_geometry *geometry = &f->engine.params.geometry;
    int32_t group = geometry->num_heads / geometry->num_kv_heads, full = f->engine.tile_queries;
    int64_t total = 0, most = 0, ranges = (group + f->engine.tile_heads - 1) / f->engine.tile_heads;
    for (const int32_t *entry = meta; entry < meta + ENTRY_INTS * f->at.num_entries; entry += ENTRY_INTS) {
        for (int32_t first = 0; first < entry[ENTRY_Q_LEN]; first += full) {
            int32_t left = entry[ENTRY_Q_LEN] - first;
            int64_t one = weight(f, f->engine.tile_part, entry, first, left < full ? left : full);
            total += one;
            most = one > most ? one : most;
        }
    }
    return (total * geometry->num_kv_heads * ranges + UNITS - 1) / UNITS >= MANY * most;
}

/* The most queries that an item has. */
static int32_t highest(const fake *f)
{
    int32_t most = 0;
    for (int32_t i = 0; i < f->at.num_items; i++) {
        int32_t queries = item_at(f, i)[ITEM_QUERIES];
        most = queries > most ? queries : most;
    }
    return most;
}

/* Which band an item belongs to, where none weighs more than `most` or has more than `high` queries. */
static int band_of(const fake *f, const int32_t *item, int64_t most, int32_t high)
{
    int band = 0, last = f->variant.persistent ? 0 : BANDS - 1;
    while (band < last && weight_of(f, f->engine.tile_part, item) < most * BAND / 100) {
        most = most * BAND / 100;
        band++;
    }
    bool ends = item[ITEM_QUERY] + item[ITEM_QUERIES] == entry_of(item)[ENTRY_Q_LEN];
    return band < last && !ends && item[ITEM_QUERIES] < high ? band + 1 : band;
}

/* Whether an entry has more to do than another, however its keys count. */
static bool does_more(const int32_t *entry, const int32_t *other)
{
    return entry[ENTRY_Q_LEN] > other[ENTRY_Q_LEN] && entry[ENTRY_KV_LEN] > other[ENTRY_KV_LEN];
}

/* Where an item stands in the order, but for its entry. */
typedef struct standing {
    int band;
    int32_t kv_head, query, head;
} standing;

static bool is_behind(const standing *now, const standing *before)
{
    if (now->band != before->band)
        return now->band > before->band;
    if (now->kv_head != before->kv_head)
        return now->kv_head > before->kv_head;
    return now->query != before->query ? now->query < before->query : now->head > before->head;
}

/* Band for band, of each the entries in turn, those with more to do first, of each the KV heads in turn, of each the
 * tiles from the last query backwards; or the entries in turn, and of each its bands. */
static void check_order(const fake *f)
{
    int met[ENTRIES] = {0}; /* the band in which an entry was met last, from 1 on */
    int64_t most[ENTRIES];
    bool apart = is_apart(f);
    int32_t high = highest(f);
    for (int32_t i = 0; i < f->at.num_entries; i++)
        most[i] = most_weight(f, apart ? meta + ENTRY_INTS * i : NULL);
    standing before = {0};
    const int32_t *last = NULL;
    for (int32_t i = 0; i < f->at.num_items; i++) {
        const int32_t *item = item_at(f, i);
        int band = band_of(f, item, most[item[ITEM_ENTRY]], high);
        const standing now = {band, item[ITEM_KV_HEAD], item[ITEM_QUERY], item[ITEM_HEAD]};
        if (!last || item[ITEM_ENTRY] != last[ITEM_ENTRY]) {
            assert_true(met[item[ITEM_ENTRY]] <= (apart ? 0 : band));
            assert_true(!last || apart || band >= before.band);
            if (last && (apart || band == before.band))
                assert_false(does_more(entry_of(item), entry_of(last)));
        } else {
            assert_true(is_behind(&now, &before));
        }
        met[item[ITEM_ENTRY]] = band + 1;
        before = now;
        last = item;
    }
}

/* Claims are of all items once and in order; each has one item or all of an entry and KV head. The latter are first,
 * one a unit at least where there are two. */
static void check_claims(const fake *f)
{
    const kvl_schedule *at = &f->at;
    const int32_t *claims = meta + at->claims_at;
    int32_t pairs = at->num_entries * f->engine.params.geometry.num_kv_heads;
    bool whole = pairs >= 2 * UNITS;
    assert_int_equal(at->claims_at, at->items_at + ITEM_INTS * at->num_items);
    assert_in_range(at->num_claims, 1, at->num_items);
    assert_int_equal(at->used, at->claims_at + at->num_claims + 1);
    assert_int_equal(claims[0], 0);
    assert_int_equal(claims[at->num_claims], at->num_items);
    for (int32_t i = 0; i < at->num_claims; i++) {
        int32_t items = claims[i + 1] - claims[i], run = run_at(f, claims[i]);
        bool begins = i == 0 || run_at(f, claims[i] - 1) == 1;
        assert_in_range(items, 1, run);
        if (whole && i < UNITS)
            assert_true(begins && items == run);
        if (items > 1)
            assert_true(begins && items == run);
        if (i && items > 1)
            assert_int_equal(claims[i] - claims[i - 1], run_at(f, claims[i - 1]));
    }
}

static void check(fake *f)
{
    write_items(f);
    check_cover(f);
    check_order(f);
    if (f->variant.persistent)
        check_claims(f);
}

/* Steps of one sequence several times. */
static const int32_t heads_of[] = {1, 2, 8, 32}, times[] = {1, 2, 4, 16};

static const struct {
    int32_t q_len, kv_len;
} lengths[] = {
    {1, 1},     {16, 16},   {17, 17},    {64, 64},    {256, 256},  {512, 512},   {2048, 2048}, {8192, 8192},
    {64, 4160}, {64, 8256}, {64, 16448}, {512, 4608}, {512, 8704}, {512, 16896}, {64, 0},      {64, 40},
};

static const struct {
    kvleaf_mask mask;
    int32_t window;
} kinds[] = {{KVLEAF_MASK_CAUSAL, 0}, {KVLEAF_MASK_NONE, 0}, {KVLEAF_MASK_CAUSAL, 1000}, {KVLEAF_MASK_NONE, 300}};

enum {
    HEADS = sizeof heads_of / sizeof *heads_of,
    TIMES = sizeof times / sizeof *times,
    LENGTHS = sizeof lengths / sizeof *lengths,
    KINDS = sizeof kinds / sizeof *kinds,
    STEPS = HEADS * TIMES * LENGTHS * KINDS
};

/* Step number `index` of all of these. */
static void make_even(fake *f, const shape *cut, int index)
{
    make(f, cut, heads_of[index % HEADS]);
    int32_t length = index / HEADS / TIMES % LENGTHS, kind = index / HEADS / TIMES / LENGTHS;
    for (int32_t i = 0; i < times[index / HEADS % TIMES]; i++)
        add(f, lengths[length].q_len, lengths[length].kv_len, kinds[kind].mask, kinds[kind].window);
}

static void make_ragged(fake *f, const shape *cut, support_rng *rng)
{
    make(f, cut, heads_of[support_range(rng, 0, HEADS - 1)]);
    int32_t kind = support_range(rng, 0, KINDS - 1), entries = support_range(rng, 1, 64);
    for (int32_t i = 0; i < entries; i++) {
        int32_t q_len = support_range(rng, 1, 1 << support_range(rng, 0, 10));
        int32_t cached = support_range(rng, 0, 3) ? support_range(rng, 0, 1 << support_range(rng, 0, 14)) : 0;
        int32_t kv_len = support_range(rng, 0, 9) ? cached + q_len : support_range(rng, 0, q_len);
        add(f, q_len, kv_len, kinds[kind].mask, kinds[kind].window);
    }
}

/* A chunk behind a long context beside many short prompts. */
static void make_skewed(fake *f, const shape *cut, support_rng *rng)
{
    make(f, cut, heads_of[support_range(rng, 0, HEADS - 1)]);
    int32_t prompts = support_range(rng, 1, ENTRIES - 1), q_len = 1 << support_range(rng, 2, 9);
    add(f, q_len, q_len + (1 << support_range(rng, 10, 16)), KVLEAF_MASK_CAUSAL, 0);
    for (int32_t i = 0; i < prompts; i++) {
        int32_t length = support_range(rng, 1, 64);
        add(f, length, length + support_range(rng, 0, 1) * 256, KVLEAF_MASK_CAUSAL, 0);
    }
}

static void test_items(void **state)
{
    (void)state;
    support_rng rng = {support_seed(22)};
    for (int round = 0; round < SHAPES * STEPS; round++) {
        fake f;
        make_even(&f, &shapes[round % SHAPES], round / SHAPES);
        check(&f);
    }
    for (int round = 0; round < 1000; round++) {
        fake f;
        (round % 2 ? make_ragged : make_skewed)(&f, &shapes[round % SHAPES], &rng);
        check(&f);
    }
}

/* By tiles of 16, 32 or 48 queries: those of the first sequence's first queries, and the highest. */
static const struct {
    const char *what;
    int32_t times, q_len, kv_len, heads, other_times, other_q_len, other_kv_len, window;
    int32_t first, high;
} choices[] = {
    {"few queries behind a long context, most units idle", 1, 64, 4160, 8, 0, 0, 0, 0, 16, 16},
    {"the same behind a longer one", 1, 64, 16448, 32, 0, 0, 0, 0, 16, 16},
    {"behind a window", 1, 64, 16448, 8, 0, 0, 0, 1000, 16, 16},
    {"a lowest tile for nearly each unit", 4, 64, 8256, 8, 0, 0, 0, 0, 16, 16},
    {"more than that, half as many twice as high", 2, 64, 4160, 32, 0, 0, 0, 0, 32, 32},
    {"a prompt that leaves units idle", 1, 256, 256, 2, 0, 0, 0, 0, 16, 16},
    {"a few more full tiles than whole rounds take", 8, 512, 16896, 8, 0, 0, 0, 0, 32, 48},
    {"a prompt whose tiles are few for each unit", 1, 2048, 2048, 8, 0, 0, 0, 0, 32, 48},
    {"prompts by which lower tiles would gain next to nothing", 4, 1024, 1024, 8, 0, 0, 0, 0, 48, 48},
    {"many prompts of a little more than a full tile", 256, 49, 49, 8, 0, 0, 0, 0, 32, 32},
    {"prompts for several rounds", 16, 512, 512, 8, 0, 0, 0, 0, 48, 48},
    {"a large prompt", 1, 8192, 8192, 8, 0, 0, 0, 0, 48, 48},
    {"a large prompt and a large window", 1, 8192, 8192, 8, 0, 0, 0, 4096, 48, 48},
    {"a large prompt beside few queries behind a long context", 1, 8192, 8192, 8, 4, 64, 4160, 0, 48, 48},
    {"short prompts beside a long context", 4, 16, 16, 8, 1, 64, 16448, 0, 16, 16},
};

static void check_heights(const fake *f, const char *what, int32_t first, int32_t high)
{
    int32_t first_now = 0, high_now = highest(f);
    for (int32_t i = 0; i < f->at.num_items; i++) {
        const int32_t *item = item_at(f, i);
        if (item[ITEM_ENTRY] == 0 && item[ITEM_QUERY] == 0)
            first_now = item[ITEM_QUERIES];
    }
    if (first_now != first || high_now != high)
        fail_msg("%s: tiles of %d to %d queries, should be %d to %d", what, first_now, high_now, first, high);
}

static void test_choice(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        fake f;
        make(&f, &shapes[0], choices[i].heads);
        for (int32_t j = 0; j < choices[i].times; j++)
            add(&f, choices[i].q_len, choices[i].kv_len, KVLEAF_MASK_CAUSAL, choices[i].window);
        for (int32_t j = 0; j < choices[i].other_times; j++)
            add(&f, choices[i].other_q_len, choices[i].other_kv_len, KVLEAF_MASK_CAUSAL, choices[i].window);
        write_items(&f);
        check_heights(&f, choices[i].what, choices[i].first, choices[i].high);
        set_parts(&f, 0);
        write_items(&f);
        int32_t q_len = choices[i].q_len, other = choices[i].other_times ? choices[i].other_q_len : 0;
        int32_t full = f.engine.tile_queries, longest = q_len > other ? q_len : other;
        check_heights(&f, choices[i].what, q_len < full ? q_len : full, longest < full ? longest : full);
    }
}

/* When all is done, if each item in its turn goes to the unit that is free first. The units are a heap. */
static int64_t time_of(const fake *f, int32_t part)
{
    int64_t units[UNITS] = {0}, time = 0;
    for (int32_t i = 0; i < f->at.num_items; i++) {
        int64_t done = units[0] + weight_of(f, part, item_at(f, i));
        int32_t place = 0;
        for (int32_t child = 1; child < UNITS; child = 2 * place + 1) {
            child += child + 1 < UNITS && units[child + 1] < units[child];
            if (units[child] >= done)
                break;
            units[place] = units[child];
            place = child;
        }
        units[place] = done;
        time = done > time ? done : time;
    }
    return time;
}

/* How long the step takes by the chosen tiles, in parts of what it takes by the best that have one height. */
static double check_time(fake *f, double allowed)
{
    int32_t part = f->engine.tile_part, full = f->engine.tile_queries, best = 0;
    write_items(f);
    int64_t now = time_of(f, part), least = INT64_MAX;
    for (int32_t queries = part; queries <= full; queries += part) {
        f->engine.tile_queries = queries;
        set_parts(f, 0);
        write_items(f);
        int64_t time = time_of(f, part);
        best = time < least ? queries : best;
        least = time < least ? time : least;
    }
    if ((double)now > (double)least * allowed)
        fail_msg("%d entries, the first of %d queries and %d keys, %d heads: %lld, by tiles of %d %lld",
                 f->at.num_entries, meta[ENTRY_Q_LEN], meta[ENTRY_KV_LEN], f->engine.params.geometry.num_kv_heads,
                 (long long)now, best, (long long)least);
    return (double)now / (double)least;
}

/* The choice goes by what units take that get tiles strictly by weight; in bands a step takes up to a seventh longer,
 * and no longer on average. */
static void test_time(void **state)
{
    enum { RANDOM = 1000 };
    static void (*const makers[])(fake *, const shape *, support_rng *) = {make_ragged, make_skewed};
    const double allowed = 1.15;
    (void)state;
    support_rng rng = {support_seed(23)};
    double even = 0, mean[] = {0, 0};
    for (int32_t i = 0; i < WITH_PARTS * STEPS; i++) {
        fake f;
        make_even(&f, &shapes[i % WITH_PARTS], i / WITH_PARTS);
        even += check_time(&f, f.at.num_entries == 1 ? 1.05 : allowed) / (WITH_PARTS * STEPS);
    }
    for (int32_t i = 0; i < 2 * RANDOM; i++) {
        fake f;
        makers[i % 2](&f, &shapes[i % WITH_PARTS], &rng);
        mean[i % 2] += check_time(&f, allowed) / RANDOM;
    }
    if (even > 1 || mean[0] > 1 || mean[1] > 1)
        fail_msg("on average %.4f of the best height's time, %.4f where sequences differ, %.4f where much", even,
                 mean[0], mean[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_items), cmocka_unit_test(test_choice),
                                       cmocka_unit_test(test_time)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
