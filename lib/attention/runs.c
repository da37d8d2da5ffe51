/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of splits, for a decode kernel that folds neighbouring splits: a work-group takes a run of them, of one row and
 * KV head. Long runs leave few partials, short ones even out the work-groups' shares. */
#include "attention/state.h"

#include "common/plan.h"

#include <string.h>

/* Pieces that the rows of a step come in, by the run and by their length. */
typedef struct run_counts {
    int64_t splits;
    int32_t longest; /* row, in splits */
    int64_t pieces[KVL_RUN_LEVELS][KVL_LONGEST_RUN + 1];
} run_counts;

static void add_row(run_counts *counts, int32_t splits)
{
    for (int level = 0; level < KVL_RUN_LEVELS; level++) {
        counts->pieces[level][1 << level] += splits >> level;
        counts->pieces[level][splits & ((1 << level) - 1)] += 1; /* of length 0 where nothing is left over */
    }
    counts->splits += splits;
    if (splits > counts->longest)
        counts->longest = splits;
}

/* Twice the time of a step in splits, about: work-groups that take the longest pieces first have a pigeonhole's share
 * of those of any length or more, or else the average; and a piece costs `beside` halves of a split beside its own. */
static int64_t cost(const run_counts *counts, int level, int64_t heads, int64_t units, int64_t beside)
{
    int64_t pieces = 0, busiest = kvl_ceil_div(counts->splits * heads, units);
    for (int length = 1 << level; length > 0; length--) {
        pieces += counts->pieces[level][length];
        int64_t share = kvl_ceil_div(pieces * heads, units) * length;
        busiest = share > busiest ? share : busiest;
    }
    return 2 * busiest + beside * kvl_ceil_div(pieces * heads, units);
}

void kvl_runs_choose(const kvl_engine *engine, kvl_schedule *at)
{
    const kvl_variant *variant = engine->chosen[KVL_DECODE].variant;
    int64_t heads = engine->params.geometry.num_kv_heads, least = INT64_MAX;
    int64_t units = (int64_t)engine->device->caps.compute_units * (variant->unit_groups ? variant->unit_groups : 1);
    int64_t beside = kvl_folds_itself(engine) && variant->unit_groups ? 2 : 1; /* it starts and ends a work-group */
    int32_t longest = variant->longest_run(&engine->params.geometry);
    run_counts counts = {0};
    int chosen = 0;
    for (int32_t i = 0; i < at->num_rows; i++)
        add_row(&counts, engine->rows[i].splits);
    for (int level = 0; level < KVL_RUN_LEVELS && 1 << level <= longest; level++) {
        if (level > 0 && 1 << (level - 1) >= counts.longest)
            break;
        int64_t now = cost(&counts, level, heads, units, beside);
        if (now <= least) {
            least = now;
            chosen = level;
        }
    }
    int32_t items = 0;
    for (int length = 1 << chosen; length > 0; length--) {
        at->first_run[length] = items;
        items += (int32_t)counts.pieces[chosen][length];
    }
    at->run_splits = 1 << chosen;
    at->num_splits = items;
    at->even_runs = counts.pieces[chosen][1 << chosen] == items;
}

void kvl_runs_write(const kvl_engine *engine, int32_t *meta, const kvl_schedule *at)
{
    int32_t next[KVL_LONGEST_RUN + 1];
    memcpy(next, at->first_run, sizeof next);
    for (int32_t i = 0; i < at->num_rows; i++) {
        const int32_t *row = meta + at->rows_at + ROW_INTS * i;
        int32_t left = engine->rows[engine->row_order[i]].splits, run = at->run_splits;
        for (int32_t index = 0; left > 0; index++, left -= run) {
            const int32_t fields[RUN_INTS] = {
                i, index, row[ROW_Q_TOKEN], row[ROW_VISIBLE], row[ROW_TABLE], row[ROW_PARTIAL], row[ROW_FIRST], run};
            memcpy(meta + at->splits_at + RUN_INTS * next[left < run ? left : run]++, fields, sizeof fields);
        }
    }
}
