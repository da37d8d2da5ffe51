/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of splits, for a decode kernel that folds neighbouring splits: a work-group takes a run of them, of one row and
 * KV head. Long runs leave few partials, short ones even out the work-groups' shares. Where work-groups take pieces
 * from a queue, rows differ: long runs go out first, as many as fit, and the rows that are left fill up the end in
 * short ones. A few such cuts are tried, by what they would take. */
#include "attention/state.h"

#include "common/plan.h"

#include <string.h>

/* Rows by descending length as far as a run goes: the shortest, which a run takes whole, come last. */
void kvl_runs_order(kvl_engine *engine, int32_t num_rows)
{
    int32_t longest = engine->chosen[KVL_DECODE].variant->longest_run(&engine->params.geometry);
    int32_t next[KVL_LONGEST_RUN + 1] = {0};
    for (int32_t i = 0; i < num_rows; i++) {
        int32_t splits = engine->rows[i].splits;
        next[splits < longest ? splits : longest]++;
    }
    for (int32_t length = longest, before = 0; length > 0; length--) {
        int32_t rows = next[length];
        next[length] = before;
        before += rows;
    }
    for (int32_t i = 0; i < num_rows; i++) {
        int32_t splits = engine->rows[i].splits;
        engine->row_order[next[splits < longest ? splits : longest]++] = i;
    }
}

/* Times are in parts of what a split takes a unit while all are at work and share the memory; alone, it takes it
 * SPLIT_ALONE. Measured on an H200. */
enum { SPLIT_TIME = 20, SPLIT_ALONE = 11 };

/* What a step's rows are cut up for. */
typedef struct run_terms {
    int64_t heads, units, splits; /* splits of all rows and heads */
    int top;                      /* runs have up to 1 << top splits */
    bool queue, folds;            /* units take pieces from a queue; the kernel folds runs */
} run_terms;

/* Pieces for each KV head. */
typedef struct run_pieces {
    int32_t num[KVL_LONGEST_RUN + 1]; /* by length; of 0 where nothing is left over */
    int32_t all, partials;            /* pieces, and those that leave a partial */
} run_pieces;

static run_terms terms_of(const kvl_engine *engine, int32_t num_rows)
{
    const kvl_variant *variant = engine->chosen[KVL_DECODE].variant;
    int32_t longest = variant->longest_run(&engine->params.geometry);
    int64_t groups = variant->unit_groups ? variant->unit_groups : 1;
    run_terms terms = {.heads = engine->params.geometry.num_kv_heads,
                       .units = engine->units * groups,
                       .folds = kvl_folds_itself(engine)};
    terms.queue = terms.folds && !variant->unit_groups;
    for (int32_t i = 0; i < num_rows; i++)
        terms.splits += engine->rows[i].splits * terms.heads;
    while (1 << terms.top < longest)
        terms.top++;
    return terms;
}

/* Gives each row, in their order, the longest run whose level has room for its splits and all before. */
static run_pieces give_runs(const kvl_engine *engine, int32_t num_rows, int level, const int64_t *room)
{
    run_pieces pieces = {0};
    int64_t splits = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        kvl_row *row = &engine->rows[engine->row_order[i]];
        splits += row->splits;
        while (level > 0 && (splits > room[level] || row->splits <= 1 << (level - 1)))
            level--;
        row->run_level = level;
        int32_t count = kvl_row_pieces(row);
        pieces.num[1 << level] += row->splits >> level;
        pieces.num[row->splits & ((1 << level) - 1)]++;
        pieces.all += count;
        pieces.partials += count > 1 ? count : 0;
    }
    return pieces;
}

static bool are_even(const run_pieces *pieces)
{
    int32_t length = KVL_LONGEST_RUN;
    while (length > 0 && !pieces->num[length])
        length--;
    return pieces->num[length] == pieces->all;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The time of a split while so many units are at work, times all units: what their share of the memory allows, or what
 * one takes alone; near both it is a bit more, as measured. */
static int64_t split_time(int64_t at_work, int64_t units)
{
    return larger(larger(SPLIT_TIME * at_work, 15 * at_work + 4 * units), SPLIT_ALONE * units);
}

/* When units that take pieces from a queue, the longest first, are through, times the units: a split at a time, for
 * those that have as many. */
static int64_t queue_time(const run_pieces *pieces, const run_terms *terms)
{
    int64_t all = pieces->all * terms->heads, units = terms->units;
    if (are_even(pieces)) /* no more are started than have as many as the others */
        units = all ? kvl_ceil_div(all, kvl_ceil_div(all, units)) : units;
    const kvl_loads loads = kvl_queue_share(pieces->num, 1 << terms->top, terms->heads, units);
    int64_t time = (loads.alike + loads.least) * split_time(units, terms->units), done = loads.least;
    while ((units -= loads.having[done++ % KVL_QUEUE_PLACES]) > 0)
        time += split_time(units, terms->units);
    return time;
}

/* The same where every piece is a work-group of its own: a unit's share of those of a length and longer. */
static int64_t groups_time(const run_pieces *pieces, const run_terms *terms)
{
    int64_t number = 0, busiest = kvl_ceil_div(terms->splits, terms->units);
    for (int32_t length = KVL_LONGEST_RUN; length > 0; length--) {
        number += pieces->num[length] * terms->heads;
        busiest = larger(busiest, kvl_ceil_div(number, terms->units) * length);
    }
    return SPLIT_TIME * terms->units * busiest;
}

/* What pieces cost beside their splits, times the units: from a queue half a split where one leaves a partial, which
 * the end waits for; as a work-group as much, or twice that where it may have to fold. */
static int64_t beside(const run_pieces *pieces, const run_terms *terms)
{
    int64_t partials = pieces->partials * terms->heads, rounds = kvl_ceil_div(pieces->all * terms->heads, terms->units);
    if (terms->queue)
        return SPLIT_TIME / 2 * (partials ? larger(partials, terms->units) : 0);
    return SPLIT_TIME / (terms->folds ? 1 : 2) * rounds * terms->units;
}

/* Room for runs of each level, in splits of a KV head: for all rows up to that level, or `filled` with longer ones.
 * Runs of 1 << level splits then end as soon as they can, and longer ones by then. (A last round takes less than
 * others, since units are idle.) */
static void make_room(const run_terms *terms, int level, bool filled, int64_t *room)
{
    const int64_t saved = SPLIT_TIME - SPLIT_ALONE;
    int64_t rounds = kvl_ceil_div(terms->splits, terms->units << level);
    int64_t end =
        larger(kvl_ceil_div(SPLIT_TIME * terms->splits, terms->units), (SPLIT_TIME * rounds - saved) * (1 << level));
    for (int i = 0; i <= terms->top; i++) {
        if (filled)
            room[i] = ((end >> i) + saved) / SPLIT_TIME * terms->units / terms->heads << i;
        else
            room[i] = i <= level ? INT64_MAX : 0;
    }
}

/* The cheapest of what the levels give: to all rows, and to the last ones with longer runs before. */
static run_pieces choose(const kvl_engine *engine, int32_t num_rows)
{
    const run_terms terms = terms_of(engine, num_rows);
    int64_t room[KVL_RUN_LEVELS] = {0}, before[KVL_RUN_LEVELS] = {0}, best[KVL_RUN_LEVELS] = {0}, least = INT64_MAX;
    run_pieces pieces = {0};
    int ways = terms.queue ? 2 : 1;
    for (int way = 0; way < ways; way++) {
        for (int level = terms.top; level >= 0; level--) {
            make_room(&terms, level, way == 1, room);
            if (memcmp(room, before, sizeof room) == 0)
                continue;
            memcpy(before, room, sizeof room);
            pieces = give_runs(engine, num_rows, terms.top, room);
            int64_t extra = beside(&pieces, &terms);
            int64_t now = extra + (terms.queue ? queue_time : groups_time)(&pieces, &terms);
            if (now < least) {
                least = now;
                memcpy(best, room, sizeof room);
            }
            if (SPLIT_TIME * terms.splits + extra >= least) /* shorter ones have more beside, however even they are */
                break;
        }
    }
    return memcmp(best, before, sizeof best) == 0 ? pieces : give_runs(engine, num_rows, terms.top, best);
}

void kvl_runs_choose(const kvl_engine *engine, kvl_schedule *at)
{
    const run_pieces pieces = choose(engine, at->num_rows);
    at->num_splits = 0;
    for (int length = KVL_LONGEST_RUN; length > 0; length--) {
        at->first_run[length] = at->num_splits;
        at->num_splits += pieces.num[length];
    }
    at->even_runs = are_even(&pieces);
}

void kvl_runs_write(const kvl_engine *engine, int32_t *meta, const kvl_schedule *at)
{
    int32_t next[KVL_LONGEST_RUN + 1];
    memcpy(next, at->first_run, sizeof next);
    for (int32_t i = 0; i < at->num_rows; i++) {
        const int32_t *row = meta + at->rows_at + ROW_INTS * i;
        int32_t left = engine->rows[engine->row_order[i]].splits, run = row[ROW_RUN];
        for (int32_t index = 0; left > 0; index++, left -= run) {
            const int32_t fields[RUN_INTS] = {
                i, index, row[ROW_Q_TOKEN], row[ROW_VISIBLE], row[ROW_TABLE], row[ROW_PARTIAL], row[ROW_FIRST], run};
            memcpy(meta + at->splits_at + RUN_INTS * next[left < run ? left : run]++, fields, sizeof fields);
        }
    }
}
