/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of splits, for decode kernels that fold their splits themselves: how long each row's are, that the items cover
 * every split once, the longest first, and that compute units which take them in that order are done early. No device
 * is asked. */
#include "attention/state.h"
#include "common/plan.h"
#include "support.h"

#include <math.h>
#include <string.h>

enum { UNITS = 132, TOKENS = 256, ROWS = 400, ITEMS = 40000, MOST_SPLITS = 256 };

static int32_t sixteen(const kvl_geometry *geometry)
{
    (void)geometry;
    return 16;
}

static int32_t sixty_four(const kvl_geometry *geometry)
{
    (void)geometry;
    return 64;
}

static int32_t four(const kvl_geometry *geometry)
{
    (void)geometry;
    return 4;
}

typedef struct fake {
    kvl_variant variant;
    kvl_row rows[ROWS];
    int32_t order[ROWS];
    kvl_engine engine;
    kvl_schedule at;
} fake;

static void make(fake *out, int32_t (*longest_run)(const kvl_geometry *), int32_t heads)
{
    *out = (fake){.engine.units = UNITS,
                  .variant = {.split_tokens = TOKENS, .longest_run = longest_run},
                  .engine.params.geometry.num_kv_heads = heads};
    out->engine.chosen[KVL_DECODE].variant = &out->variant;
    out->engine.rows = out->rows;
    out->engine.row_order = out->order;
}

static void add_rows(fake *f, int32_t count, int32_t splits)
{
    for (int32_t i = 0; i < count; i++)
        f->rows[f->at.num_rows++].splits = splits;
}

static void choose(fake *f)
{
    kvl_runs_order(&f->engine, f->at.num_rows);
    kvl_runs_choose(&f->engine, &f->at);
}

static const struct {
    const char *what;
    int32_t rows, splits, other_rows, other_splits, heads;
    int32_t (*longest)(const kvl_geometry *);
    int32_t first_run, last_run, items; /* of the rows in their order */
    bool even;
} choices[] = {
    {"a row, a split for each unit at most", 1, 16, 0, 0, 8, sixteen, 1, 1, 16, true},
    {"a long row: a run for each unit", 1, 128, 0, 0, 8, sixteen, 8, 8, 16, true},
    {"a run for each row and head", 16, 16, 0, 0, 8, sixteen, 16, 16, 16, true},
    {"several rows for each unit", 64, 16, 0, 0, 8, sixteen, 16, 16, 64, true},
    {"the variant's limit", 66, 16, 0, 0, 8, four, 4, 4, 264, true},
    {"no longer than the rows", 128, 8, 0, 0, 8, sixteen, 8, 8, 128, true},
    {"runs of several rows for each unit", 8, 128, 0, 0, 8, sixteen, 16, 16, 64, true},
    {"whole rows, the longer the fewer", 16, 64, 0, 0, 8, sixty_four, 64, 64, 16, true},
    {"half a row for each unit", 8, 128, 0, 0, 8, sixty_four, 64, 64, 16, true},
    {"whole rows in two rounds", 32, 32, 0, 0, 8, sixty_four, 32, 32, 32, true},
    {"rows that would leave units idle are cut", 20, 16, 0, 0, 8, sixteen, 16, 4, 32, false},
    {"into no more than that takes", 24, 16, 0, 0, 8, sixteen, 16, 8, 32, false},
    {"most units are enough for the device's bandwidth", 13, 16, 0, 0, 8, sixteen, 16, 16, 13, true},
    {"so in several rounds", 100, 4, 0, 0, 8, sixteen, 4, 4, 100, true},
    {"short rows fill up beside long ones", 300, 3, 60, 33, 8, sixteen, 16, 4, 480, false},
    {"rows that see nothing", 5, 1, 0, 0, 2, sixteen, 1, 1, 5, true},
    {"no rows", 0, 0, 0, 0, 8, sixteen, 0, 0, 0, true},
};

/* Splits of a run of the row that stands at `place`; 0 without rows. */
static int32_t run_of(const fake *f, int32_t place)
{
    return f->at.num_rows ? 1 << f->rows[f->order[place]].run_level : 0;
}

static void test_choice(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        fake f;
        make(&f, choices[i].longest, choices[i].heads);
        add_rows(&f, choices[i].rows, choices[i].splits);
        add_rows(&f, choices[i].other_rows, choices[i].other_splits);
        choose(&f);
        int32_t first = run_of(&f, 0), last = run_of(&f, f.at.num_rows - 1);
        if (first != choices[i].first_run || last != choices[i].last_run || f.at.num_splits != choices[i].items ||
            f.at.even_runs != choices[i].even)
            fail_msg("%s: runs of %d to %d, %d items%s; should be %d to %d, %d%s", choices[i].what, first, last,
                     f.at.num_splits, f.at.even_runs ? ", even" : "", choices[i].first_run, choices[i].last_run,
                     choices[i].items, choices[i].even ? ", even" : "");
    }
}

static void write_items(fake *f, int32_t *meta)
{
    for (int32_t i = 0; i < f->at.num_rows; i++) {
        const int32_t row[ROW_INTS] = {3 * i, 1000 + i, 100 + i, 7 * i, 0, run_of(f, i)};
        memcpy(meta + ROW_INTS * i, row, sizeof row);
    }
    f->at.splits_at = ROW_INTS * f->at.num_rows;
    assert_in_range(f->at.num_splits, 1, ITEMS);
    kvl_runs_write(&f->engine, meta, &f->at);
}

static void check_items(const fake *f, const int32_t *meta)
{
    const kvl_schedule *at = &f->at;
    static unsigned char covered[ROWS][MOST_SPLITS];
    int32_t last = KVL_LONGEST_RUN;
    memset(covered, 0, sizeof covered);
    for (int32_t i = 0; i < at->num_splits; i++) {
        const int32_t *item = meta + at->splits_at + RUN_INTS * i, *row = meta + ROW_INTS * item[RUN_ROW];
        int32_t splits = f->rows[f->order[item[RUN_ROW]]].splits, run = row[ROW_RUN], first = item[RUN_INDEX] * run;
        int32_t length = splits - first < run ? splits - first : run;
        assert_in_range(item[RUN_ROW], 0, at->num_rows - 1);
        assert_in_range(length, 1, last);
        assert_int_equal(item[RUN_VISIBLE], row[ROW_VISIBLE]);
        assert_int_equal(item[RUN_TABLE], row[ROW_TABLE]);
        assert_int_equal(item[RUN_Q_TOKEN], row[ROW_Q_TOKEN]);
        assert_int_equal(item[RUN_PARTIAL], row[ROW_PARTIAL]);
        assert_int_equal(item[RUN_SPLITS], run);
        for (int32_t split = first; split < first + length; split++)
            assert_int_equal(covered[item[RUN_ROW]][split]++, 0);
        last = length;
    }
    for (int32_t i = 0; i < at->num_rows; i++) {
        for (int32_t split = 0; split < f->rows[f->order[i]].splits; split++)
            assert_int_equal(covered[i][split], 1);
    }
}

static int32_t meta[ROW_INTS * ROWS + RUN_INTS * ITEMS];

static void test_items(void **state)
{
    (void)state;
    support_rng rng = {support_seed(20)};
    for (int round = 0; round < 200; round++) {
        fake f;
        int32_t (*const longest[])(const kvl_geometry *) = {four, sixteen, sixty_four};
        make(&f, longest[round % 3], 1 + round % 8);
        int32_t rows = support_range(&rng, 1, ROWS), most = round % 3 == 2 ? MOST_SPLITS : 60;
        for (int32_t i = 0; i < rows; i++)
            add_rows(&f, 1, support_range(&rng, 1, i % 4 ? most : 3));
        choose(&f);
        write_items(&f, meta);
        check_items(&f, meta);
    }
}

/* A device whose units share a bandwidth: a split takes one alone ALONE of what it takes while all are at work, and
 * in between a bit more than either limit, as an H200 does. A piece that leaves a partial takes PARTIAL more. Pieces go
 * out in their order to the units that are free. */
#define ALONE   0.53
#define PARTIAL 0.5

typedef struct work {
    double reading, writing;
} work;

/* Of a piece; none behind the last. */
static work work_of(const fake *f, int32_t piece)
{
    int32_t heads = f->engine.params.geometry.num_kv_heads;
    if (piece >= f->at.num_splits * heads)
        return (work){0};
    const int32_t *item = meta + f->at.splits_at + RUN_INTS * (piece / heads);
    int32_t splits = f->rows[f->order[item[RUN_ROW]]].splits, left = splits - item[RUN_INDEX] * item[RUN_SPLITS];
    return (work){left < item[RUN_SPLITS] ? left : item[RUN_SPLITS], splits > item[RUN_SPLITS] ? PARTIAL : 0};
}

/* Works until a unit is through with what it does; the time of it, 0 where none has any work. */
static double advance(work *units, int32_t count)
{
    const double nothing = 1e-9;
    double reading = 0, step = 0;
    for (int32_t i = 0; i < count; i++)
        reading += units[i].reading > 0;
    double rate = 1 / pow(pow(reading / UNITS, 6) + pow(ALONE, 6), 1.0 / 6);
    for (int32_t i = 0; i < count; i++) {
        double left = units[i].reading > 0 ? units[i].reading / rate : units[i].writing;
        if (left > 0 && (step == 0 || left < step))
            step = left;
    }
    for (int32_t i = 0; i < count; i++) {
        double *left = units[i].reading > 0 ? &units[i].reading : &units[i].writing;
        *left -= units[i].reading > 0 ? step * rate : step;
        *left = *left < nothing ? 0 : *left;
    }
    return step;
}

static double time_of(const fake *f)
{
    work units[UNITS] = {{0}};
    int64_t pieces = (int64_t)f->at.num_splits * f->engine.params.geometry.num_kv_heads;
    int32_t next = 0, count = UNITS;
    double time = 0, step;
    if (f->at.even_runs) /* as many as have the same number of them */
        count = (int32_t)kvl_ceil_div(pieces, kvl_ceil_div(pieces, UNITS));
    do {
        for (int32_t i = 0; i < count; i++) {
            if (units[i].reading + units[i].writing <= 0)
                units[i] = work_of(f, next++);
        }
        step = advance(units, count);
        time += step;
    } while (step > 0);
    return time;
}

/* The least time if all rows had runs of one length. */
static double best_of_one_length(fake *f)
{
    double least = INFINITY;
    for (int32_t level = 0; 1 << level <= f->variant.longest_run(NULL); level++) {
        int32_t count[KVL_LONGEST_RUN + 1] = {0}, run = 1 << level, lengths = 0;
        f->at.num_splits = 0;
        for (int32_t i = 0; i < f->at.num_rows; i++) {
            f->rows[i].run_level = level;
            count[run] += f->rows[i].splits / run;
            count[f->rows[i].splits % run]++;
        }
        for (int32_t length = KVL_LONGEST_RUN; length > 0; length--) {
            f->at.first_run[length] = f->at.num_splits;
            f->at.num_splits += count[length];
            lengths += count[length] > 0;
        }
        f->at.even_runs = lengths <= 1;
        write_items(f, meta);
        least = fmin(least, time_of(f));
    }
    return least;
}

static void check_time(fake *f, double allowed)
{
    choose(f);
    write_items(f, meta);
    double now = time_of(f), one = best_of_one_length(f);
    if (now > one * allowed)
        fail_msg("%d rows, the first of %d splits, %d heads: %.2f splits, runs of one length take %.2f", f->at.num_rows,
                 f->rows[f->order[0]].splits, f->engine.params.geometry.num_kv_heads, now, one);
}

/* Runs of several lengths must be as good as runs of any one. */
static void test_time(void **state)
{
    static const int32_t heads[] = {1, 2, 4, 8, 32}, splits[] = {4, 8, 16, 128};
    (void)state;
    support_rng rng = {support_seed(21)};
    for (int32_t rows = 1; rows <= 140; rows++) {
        fake f;
        for (size_t i = 0; i < 20; i++) {
            make(&f, rows % 3 ? sixteen : sixty_four, heads[i % 5]);
            add_rows(&f, rows, splits[i / 5]);
            if (rows * splits[i / 5] <= ITEMS / 8)
                check_time(&f, 1.05);
        }
        make(&f, rows % 3 ? sixty_four : sixteen, heads[rows % 5]);
        for (int32_t i = 0; i < rows; i++)
            add_rows(&f, 1, support_range(&rng, 1, i % 4 ? rows % 4 ? 60 : MOST_SPLITS : 3));
        check_time(&f, 1.08);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_choice), cmocka_unit_test(test_items),
                                       cmocka_unit_test(test_time)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
