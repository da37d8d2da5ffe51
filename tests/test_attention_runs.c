/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of splits, for decode kernels that fold their splits themselves: how long they are, and that the items cover
 * every split once, the longest first. No device is asked. */
#include "attention/state.h"
#include "common/plan.h"
#include "support.h"

#include <string.h>

enum { UNITS = 132, TOKENS = 256, ROWS = 400, ITEMS = 20000 };

static int32_t sixteen(const kvl_geometry *geometry)
{
    (void)geometry;
    return 16;
}

static int32_t four(const kvl_geometry *geometry)
{
    (void)geometry;
    return 4;
}

typedef struct fake {
    kvleaf_device device;
    kvl_variant variant;
    kvl_row rows[ROWS];
    int32_t order[ROWS];
    kvl_engine engine;
    kvl_schedule at;
} fake;

static void make(fake *out, int32_t (*longest_run)(const kvl_geometry *), int32_t heads)
{
    *out = (fake){.device.caps.compute_units = UNITS,
                  .variant = {.split_tokens = TOKENS, .longest_run = longest_run},
                  .engine.params.geometry.num_kv_heads = heads};
    out->engine.device = &out->device;
    out->engine.chosen[KVL_DECODE].variant = &out->variant;
    out->engine.rows = out->rows;
    out->engine.row_order = out->order;
}

static void add_rows(fake *f, int32_t count, int32_t splits)
{
    for (int32_t i = 0; i < count; i++, f->at.num_rows++) {
        f->rows[f->at.num_rows].splits = splits;
        f->order[f->at.num_rows] = f->at.num_rows;
    }
}

static const struct {
    const char *what;
    int32_t rows, splits, other_rows, other_splits, heads;
    int32_t (*longest)(const kvl_geometry *);
    int32_t run, items;
    bool even;
} choices[] = {
    {"a row, a split for each unit at most", 1, 16, 0, 0, 8, sixteen, 1, 16, true},
    {"a long row: a run for each unit", 1, 128, 0, 0, 8, sixteen, 8, 16, true},
    {"a run for each row and head", 16, 16, 0, 0, 8, sixteen, 16, 16, true},
    {"several rows for each unit", 64, 16, 0, 0, 8, sixteen, 16, 64, true},
    {"the variant's limit", 64, 16, 0, 0, 8, four, 4, 256, true},
    {"no longer than the rows", 128, 8, 0, 0, 8, sixteen, 8, 128, true},
    {"runs that would leave units idle are cut", 20, 16, 0, 0, 8, sixteen, 4, 80, true},
    {"short rows fill up beside long ones", 60, 33, 300, 3, 8, sixteen, 16, 480, false},
    {"rows that see nothing", 5, 1, 0, 0, 2, sixteen, 1, 5, true},
    {"no rows", 0, 0, 0, 0, 8, sixteen, 1, 0, true},
};

static void test_choice(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        fake f;
        make(&f, choices[i].longest, choices[i].heads);
        add_rows(&f, choices[i].rows, choices[i].splits);
        add_rows(&f, choices[i].other_rows, choices[i].other_splits);
        kvl_runs_choose(&f.engine, &f.at);
        if (f.at.run_splits != choices[i].run || f.at.num_splits != choices[i].items ||
            f.at.even_runs != choices[i].even)
            fail_msg("%s: run %d, %d items%s; should be %d, %d%s", choices[i].what, f.at.run_splits, f.at.num_splits,
                     f.at.even_runs ? ", even" : "", choices[i].run, choices[i].items, choices[i].even ? ", even" : "");
    }
}

static void check_items(const fake *f, const int32_t *meta)
{
    const kvl_schedule *at = &f->at;
    static unsigned char covered[ROWS][64];
    int32_t last = KVL_LONGEST_RUN;
    memset(covered, 0, sizeof covered);
    for (int32_t i = 0; i < at->num_splits; i++) {
        const int32_t *item = meta + at->splits_at + RUN_INTS * i, *row = meta + ROW_INTS * item[RUN_ROW];
        int32_t splits = f->rows[f->order[item[RUN_ROW]]].splits, first = item[RUN_INDEX] * at->run_splits;
        int32_t length = splits - first < at->run_splits ? splits - first : at->run_splits;
        assert_in_range(item[RUN_ROW], 0, at->num_rows - 1);
        assert_in_range(length, 1, last);
        assert_int_equal(item[RUN_VISIBLE], row[ROW_VISIBLE]);
        assert_int_equal(item[RUN_TABLE], row[ROW_TABLE]);
        assert_int_equal(item[RUN_Q_TOKEN], row[ROW_Q_TOKEN]);
        assert_int_equal(item[RUN_PARTIAL], row[ROW_PARTIAL]);
        for (int32_t split = first; split < first + length; split++)
            assert_int_equal(covered[item[RUN_ROW]][split]++, 0);
        last = length;
    }
    for (int32_t i = 0; i < at->num_rows; i++) {
        for (int32_t split = 0; split < f->rows[f->order[i]].splits; split++)
            assert_int_equal(covered[i][split], 1);
    }
}

static void test_items(void **state)
{
    (void)state;
    static int32_t meta[ROW_INTS * ROWS + RUN_INTS * ITEMS];
    support_rng rng = {support_seed(20)};
    for (int round = 0; round < 200; round++) {
        fake f;
        make(&f, round % 3 ? sixteen : four, 1 + round % 8);
        int32_t rows = support_range(&rng, 1, ROWS);
        for (int32_t i = 0; i < rows; i++) {
            const int32_t row[ROW_INTS] = {3 * i, 1000 + i, 100 + i, 7 * i, 0};
            memcpy(meta + ROW_INTS * i, row, sizeof row);
            add_rows(&f, 1, support_range(&rng, 1, i % 4 ? 60 : 3));
        }
        for (int32_t i = 0; i < rows; i++) /* as sharing orders them */
            f.order[i] = rows - 1 - i;
        kvl_runs_choose(&f.engine, &f.at);
        f.at.splits_at = ROW_INTS * rows;
        assert_in_range(f.at.num_splits, 1, ITEMS);
        kvl_runs_write(&f.engine, meta, &f.at);
        check_items(&f, meta);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_choice), cmocka_unit_test(test_items)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
