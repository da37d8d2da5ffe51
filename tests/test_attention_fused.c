/* SPDX-License-Identifier: Apache-2.0 */
/* Protects append and attend in one call, over the caller's buffers: K and V byte for byte and the same bits as one
 * after the other, in every family, layout and mix of dtypes; one launch less exactly where nothing depends on the
 * order of two rows; and all checks before the first command. */
#include "attention_rig.h"

#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/state.h"
#include "shim.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

static int64_t launches(void)
{
    return shim.calls_of[SHIM_EnqueueNDRangeKernel];
}

/* Runs a problem both ways and returns how many launches the one call has beyond those of attend. */
static int64_t extra_launches(problem *made, kvleaf_attention *attention, kvleaf_dtype source, bool some_negative,
                              const char *name)
{
    problem_report report;
    int64_t start = launches();
    ASSERT_OK(problem_append_attend(made, attention, source, some_negative, &report));
    if (!report.passed)
        fail_msg("%s: %s", name, report.text);
    int64_t all = launches() - start; /* the one call, an attend, the one call twice in fewer buffers */
    ASSERT_OK(problem_attend(made, attention));
    int64_t thrice = all - 4 * (launches() - start - all);
    assert_int_equal(thrice % 3, 0);
    return thrice / 3;
}

static const struct {
    const char *name;
    int rig;
    problem_geometry geometry;
} families[] = {
    {"portable, strided", 0, {KVLEAF_F32, KVLEAF_F16, KVLEAF_F32, PROBLEM_NHD, 0, 6, 2, 20, 5, 0, 0, 0, true}},
    {"portable, heads first, windows",
     0,
     {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_HND, 0, 4, 2, 16, 16, 70, 0, 0, 0}},
    {"portable, cpu16",
     0,
     {KVLEAF_F16, KVLEAF_BF16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 4, 2, 17, 16, 0, 0, 0, 0}},
    {"portable_vector, dim8",
     1,
     {KVLEAF_F16, KVLEAF_F16, KVLEAF_F16, PROBLEM_PACKED, KVLEAF_LAYOUT_DIM8, 4, 2, 24, 16, 0, 0, 0, 0}},
    {"portable_fixed, swizzle8",
     1,
     {KVLEAF_BF16, KVLEAF_BF16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_SWIZZLE8, 2, 2, 72, 8, 0, 0, 0, true}},
    {"cpu, cpu16",
     1,
     {KVLEAF_F32, KVLEAF_F16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 6, 2, 80, 32, 0, 0, 0, 0}},
    {"cpu, cpu16, windows",
     1,
     {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 4, 2, 16, 16, 70, 0, 0, 0}},
    {"cpu, rows",
     1,
     {KVLEAF_F32, KVLEAF_BF16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_ROWS, 4, 1, 17, 7, 0, 0, 0, true}},
    {"cpu, strided", 1, {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_NHD, 0, 4, 2, 16, 16, 0, 0, 0, true}},
};

/* One token a sequence, around blocks and splits, from the model's dtype, the cache's and f32. */
static void test_every_family(void **state)
{
    static const int32_t lengths[] = {1, 16, 255, 256, 257, 511, 512, 513, 700, 5, 0, 1025};
    const attention_rig *rigs = *state;
    for (int32_t i = 0; i < COUNT(families); i++) {
        const problem_geometry *g = &families[i].geometry;
        const attention_rig *r = &rigs[families[i].rig];
        kvleaf_attention *attention = attention_rig_make(r, g, 0);
        const kvleaf_dtype sources[] = {g->q_dtype, g->kv_dtype, KVLEAF_F32};
        problem_seq seqs[COUNT(lengths)];
        for (int32_t s = 0; s < COUNT(lengths); s++)
            seqs[s] = (problem_seq){.id = (uint32_t)s, .q_len = 1, .kv_len = lengths[s], .mask = s % 2};
        for (int32_t k = 0; k < 3; k++) {
            problem made;
            attention_rig_problem(
                r, g, seqs, COUNT(lengths),
                &(problem_options){.seed = 3, .placement = (uint64_t)(7 + k), .poison = (problem_poison)(k % 2)},
                &made);
            assert_int_equal(extra_launches(&made, attention, sources[k], k == 1, families[i].name), 0);
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

static const problem_geometry plain = {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_NHD, 0, 4,    2,
                                       16,         16,         0,          0,           0, false};

/* What is no step of one decode row a sequence: append, then attend. */
static void test_other_steps(void **state)
{
    static const struct {
        const char *name;
        problem_seq seqs[3];
    } cases[] = {
        {"prefill", {{1, 1, 40, KVLEAF_FAMILY_PREFILL, 0}, {2, 1, 50, KVLEAF_FAMILY_DECODE, 0}, {3, 0, 5, 0, 0}}},
        {"a prompt", {{1, 1, 300, 0, 0}, {2, 30, 44, 0, 0}, {3, 1, 7, 0, 0}}},
        {"drafts", {{1, 1, 300, 0, 0}, {2, 3, 44, KVLEAF_FAMILY_DECODE, 0}, {3, 1, 7, 0, 0}}},
        {"more queries than keys", {{1, 1, 300, 0, 0}, {2, 3, 1, KVLEAF_FAMILY_DECODE, 0}, {3, 1, 7, 0, 0}}},
    };
    const attention_rig *rigs = *state;
    for (int32_t k = 0; k < ATTENTION_RIGS; k++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[k], &plain, 0);
        for (int32_t i = 0; i < COUNT(cases); i++) {
            problem made;
            attention_rig_problem(&rigs[k], &plain, cases[i].seqs, 3, &(problem_options){.seed = 4}, &made);
            assert_int_equal(extra_launches(&made, attention, KVLEAF_F32, false, cases[i].name), 1);
            assert_int_equal(extra_launches(&made, attention, KVLEAF_F32, true, cases[i].name), 1);
            problem_destroy(&made);
        }
        const problem_seq none[] = {{1, 0, 40, 0, 0}, {2, 0, 0, 0, 0}};
        problem made;
        attention_rig_problem(&rigs[k], &plain, none, 2, &(problem_options){.seed = 4}, &made);
        assert_int_equal(extra_launches(&made, attention, KVLEAF_F32, false, "no rows"), 0);
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

/* Sequences of one text whose tables have blocks in common: where one reads what another writes, the order counts. */
static void test_blocks_in_common(void **state)
{
    static const struct {
        const char *name;
        int32_t lengths[3], common; /* columns of the first that the second has too */
        int64_t extra;
    } cases[] = {
        {"the whole of the other", {48, 48, 9}, 3, 1},
        {"the other goes on", {512, 600, 9}, 32, 1},
        {"only what is there already", {48, 100, 9}, 2, 0},
        {"whole splits", {1040, 1100, 9}, 64, 0},
    };
    const attention_rig *rigs = *state;
    for (int32_t k = 0; k < ATTENTION_RIGS; k++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[k], &plain, 0);
        for (int32_t i = 0; i < COUNT(cases); i++) {
            problem made;
            const int32_t *lengths = cases[i].lengths;
            const problem_seq seqs[] = {{1, 1, lengths[0], 0, 0}, {1, 1, lengths[1], 0, 0}, {2, 1, lengths[2], 0, 0}};
            attention_rig_problem(&rigs[k], &plain, seqs, 3, &(problem_options){.seed = 5, .placement = (uint64_t)i},
                                  &made);
            memcpy(made.table + made.columns, made.table, (size_t)cases[i].common * sizeof(int32_t));
            assert_int_equal(extra_launches(&made, attention, KVLEAF_F32, false, cases[i].name), cases[i].extra);
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

static kvleaf_status call_at_once(const problem *made, kvleaf_attention *attention, const problem_array *source)
{
    kvleaf_kv_view view = problem_kv_view(made);
    kvleaf_exec exec = problem_exec(made);
    kvleaf_tensor k = problem_tensor(source), q = problem_tensor(&made->q);
    kvleaf_tensor out = problem_tensor(&made->out), lse = problem_tensor(&made->lse);
    return kvleaf_attention_append_attend(attention, &k, &k, &q, &view, &out, &lse, &exec);
}

/* New tokens that go to a block beside the sequences': what is attended to is what stands in the tables. */
static void test_slots_elsewhere(void **state)
{
    const problem_seq seqs[] = {{1, 1, 40, 0, 0}, {2, 1, 33, 0, 0}};
    const attention_rig *rigs = *state;
    for (int32_t i = 0; i < ATTENTION_RIGS; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[i], &plain, 0);
        problem made;
        problem_array source = {0};
        problem_report report;
        attention_rig_problem(&rigs[i], &plain, seqs, 2, &(problem_options){.seed = 6}, &made);
        int32_t unused = 0;
        for (int32_t c = 0; c < 6; c++) /* three blocks each */
            unused = made.table[c / 3 * made.columns + c % 3] == unused ? c = -1, unused + 1 : unused;
        const int64_t slots[] = {unused * 16, unused * 16 + 1};
        kvleaf_batch batch = problem_batch(&made);
        kvleaf_exec exec = problem_exec(&made);
        batch.slot_mapping = slots;
        assert_true(problem_array_create(&source, made.context, KVLEAF_F32, 2, 2, 16, false));
        problem_array_guard(&source);
        assert_true(problem_array_upload(&source, made.queue) && problem_upload_outputs(&made));
        int64_t start = launches();
        ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
        ASSERT_OK(call_at_once(&made, attention, &source));
        assert_int_equal(launches() - start, 3); /* append, decode, fold */
        assert_true(problem_collect(&made));
        if (!problem_verify(&made, &report))
            fail_msg("%s", report.text);
        problem_array_destroy(&source);
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

/* Lengths and tables that only the device knows. */
static void test_device_tables(void **state)
{
    const problem_seq seqs[] = {{1, 1, 40, 0, 0}, {2, 1, 33, 0, 0}};
    const attention_rig *rigs = *state;
    kvleaf_attention *attention = attention_rig_make(&rigs[1], &plain, 1);
    problem made;
    problem_report report;
    attention_rig_problem(&rigs[1], &plain, seqs, 2, &(problem_options){.seed = 6}, &made);
    int64_t slots[2];
    for (int32_t i = 0; i < 2; i++)
        slots[i] = (int64_t)made.table[i * made.columns + 2] * 16 + (i ? 0 : 7);
    problem_array source = {0};
    assert_true(problem_array_create(&source, made.context, KVLEAF_F32, 2, 2, 16, false));
    for (int32_t i = 0; i < 2; i++)
        for (int32_t h = 0; h < 2; h++)
            for (int32_t d = 0; d < 16; d++) {
                float x = problem_value(&made, PROBLEM_K, seqs[i].id, seqs[i].kv_len - 1, h, d);
                reference_seq seq = problem_reference_seq(&made, i);
                reference_store(KVLEAF_F32, source.host, problem_array_at(&source, i, h, d), x);
                reference_store(KVLEAF_F32, made.v.host,
                                reference_seq_index(&made.kv, &seq, true, seqs[i].kv_len - 1, h, d), x);
            }
    cl_int error = 0;
    size_t bytes = (size_t)(2 * made.columns) * sizeof(int32_t);
    kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    batch.slot_mapping = slots;
    batch.block_table = NULL;
    batch.device_block_table =
        clCreateBuffer(made.context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, bytes, made.table, &error);
    assert_int_equal(error, CL_SUCCESS);
    assert_true(problem_array_upload(&source, made.queue) && problem_upload_outputs(&made));
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    int64_t start = launches();
    ASSERT_OK(call_at_once(&made, attention, &source)); /* the same rows as keys and as values */
    assert_int_equal(launches() - start, 3);
    assert_true(problem_collect(&made));
    if (!problem_verify(&made, &report))
        fail_msg("%s", report.text);
    clReleaseMemObject(batch.device_block_table);
    problem_array_destroy(&source);
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
}

/* One wrong argument each: named, and nothing is launched. */
typedef struct call {
    kvleaf_tensor k, v, q, out, lse;
    kvleaf_kv_view view;
    bool null[6]; /* k, v, q, out, view, attention */
} call;

static void no_k(call *c)
{
    c->null[0] = true;
}
static void no_v(call *c)
{
    c->null[1] = true;
}
static void no_q(call *c)
{
    c->null[2] = true;
}
static void no_out(call *c)
{
    c->null[3] = true;
}
static void no_view(call *c)
{
    c->null[4] = true;
}
static void no_attention(call *c)
{
    c->null[5] = true;
}
static void no_handle(call *c)
{
    c->v.handle = NULL;
}
static void no_dtype(call *c)
{
    c->k.dtype = (kvleaf_dtype)9;
}
static void other_q(call *c)
{
    c->q.dtype = KVLEAF_F16;
}
static void other_out(call *c)
{
    c->out.dtype = KVLEAF_F16;
}
static void other_lse(call *c)
{
    c->lse.dtype = KVLEAF_BF16;
}
static void backwards(call *c)
{
    c->k.token_stride = -32;
}
static void far_apart(call *c)
{
    c->v.token_stride = 1 << 20;
}
static void odd_offset(call *c)
{
    c->v.offset = 2;
}
static void on_top(call *c)
{
    c->out.token_stride = 8;
}
static void other_layout(call *c)
{
    c->view.layout = KVLEAF_LAYOUT_DIM8;
}
static void few_blocks(call *c)
{
    c->view.num_blocks = 1;
}

static const struct {
    kvleaf_status status;
    const char *named;
    void (*spoil)(call *);
} wrong[] = {
    {KVLEAF_INVALID, "k", no_k},
    {KVLEAF_INVALID, "v", no_v},
    {KVLEAF_INVALID, "q", no_q},
    {KVLEAF_INVALID, "out", no_out},
    {KVLEAF_INVALID, "view", no_view},
    {KVLEAF_INVALID, "attention", no_attention},
    {KVLEAF_INVALID, "v", no_handle},
    {KVLEAF_INVALID, "k", no_dtype},
    {KVLEAF_INVALID, "q", other_q},
    {KVLEAF_INVALID, "out", other_out},
    {KVLEAF_INVALID, "lse", other_lse},
    {KVLEAF_INVALID, "k", backwards},
    {KVLEAF_TOO_SMALL, "v", far_apart},
    {KVLEAF_INVALID, "v", odd_offset},
    {KVLEAF_INVALID, "out", on_top},
    {KVLEAF_INVALID, "view.layout", other_layout},
    {KVLEAF_INVALID, "view.num_blocks", few_blocks},
};

static kvleaf_status run_call(kvleaf_attention *attention, const call *c, const kvleaf_exec *exec)
{
    return kvleaf_attention_append_attend(c->null[5] ? NULL : attention, c->null[0] ? NULL : &c->k,
                                          c->null[1] ? NULL : &c->v, c->null[2] ? NULL : &c->q,
                                          c->null[4] ? NULL : &c->view, c->null[3] ? NULL : &c->out, &c->lse, exec);
}

/* A step of two sequences, with keys and values of guard bytes to append; or one that is a mixed batch. */
typedef struct scenery {
    problem made;
    problem_array source;
    call right;
    kvleaf_exec exec;
} scenery;

static void open_scenery(scenery *s, const attention_rig *r, const problem_seq seqs[2])
{
    memset(s, 0, sizeof(*s));
    attention_rig_problem(r, &plain, seqs, 2, &(problem_options){.seed = 6}, &s->made);
    assert_true(problem_array_create(&s->source, s->made.context, KVLEAF_F32, s->made.total_q, 2, 16, false));
    problem_array_guard(&s->source);
    assert_true(problem_array_upload(&s->source, r->queue) && problem_upload_outputs(&s->made));
    s->right = (call){.k = problem_tensor(&s->source),
                      .v = problem_tensor(&s->source),
                      .q = problem_tensor(&s->made.q),
                      .out = problem_tensor(&s->made.out),
                      .lse = problem_tensor(&s->made.lse),
                      .view = problem_kv_view(&s->made)};
    s->exec = problem_exec(&s->made);
}

static void close_scenery(scenery *s)
{
    problem_array_destroy(&s->source);
    problem_destroy(&s->made);
}

/* Neither K and V nor the outputs have changed. */
static void assert_as_made(const scenery *s)
{
    problem_report report = {.passed = true};
    const problem_array *arrays[] = {&s->made.k, &s->made.v, &s->made.out, &s->made.lse};
    for (int i = 0; i < 4; i++)
        problem_compare_bytes(s->made.queue, arrays[i], arrays[i]->host, "a buffer", &report);
    if (!report.passed)
        fail_msg("%s", report.text);
}

static const problem_seq two_rows[] = {{1, 1, 40, 0, 0}, {2, 1, 33, 0, 0}};
static const problem_seq mixed_rows[] = {{1, 3, 40, 0, 0}, {2, 1, 33, 0, 0}};

static void test_wrong_arguments(void **state)
{
    const attention_rig *rigs = *state;
    const problem_seq *batches[] = {two_rows, mixed_rows};
    for (int32_t i = 0; i < ATTENTION_RIGS * 2; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[i / 2], &plain, 0);
        scenery s;
        open_scenery(&s, &rigs[i / 2], batches[i % 2]);
        int64_t start = launches();
        ASSERT_FAILS(KVLEAF_INVALID, "plan", run_call(attention, &s.right, &s.exec));
        kvleaf_batch batch = problem_batch(&s.made);
        ASSERT_OK(kvleaf_attention_plan(attention, &batch, &s.exec));
        for (int32_t w = 0; w < COUNT(wrong); w++) {
            call spoilt = s.right;
            wrong[w].spoil(&spoilt);
            print_message("case %d: %s\n", w, wrong[w].named);
            ASSERT_FAILS(wrong[w].status, wrong[w].named, run_call(attention, &spoilt, &s.exec));
        }
        ASSERT_FAILS(KVLEAF_INVALID, "exec", run_call(attention, &s.right, NULL));
        assert_int_equal(launches(), start);
        assert_as_made(&s);
        ASSERT_OK(run_call(attention, &s.right, &s.exec));
        close_scenery(&s);
        kvleaf_attention_destroy(&attention);
    }
}

/* Each OpenCL call failing in turn: DEVICE, and the same call works afterwards. */
static void test_calls_fail(void **state)
{
    const attention_rig *rigs = *state;
    const problem_seq *batches[] = {two_rows, mixed_rows};
    for (int32_t i = 0; i < 2; i++) {
        kvleaf_attention *attention = attention_rig_make(&rigs[1], &plain, 0);
        scenery s;
        open_scenery(&s, &rigs[1], batches[i]);
        kvleaf_batch batch = problem_batch(&s.made);
        ASSERT_OK(kvleaf_attention_plan(attention, &batch, &s.exec));
        int64_t failed = 0;
        for (int64_t k = 1; k < 500; k++) {
            shim.calls = 0;
            shim.failed_entry = -1;
            shim.fail_at = k;
            kvleaf_status status = run_call(attention, &s.right, &s.exec);
            int hit = shim.failed_entry;
            shim.fail_at = 0;
            assert_int_equal(status, hit < 0 ? KVLEAF_OK : KVLEAF_DEVICE);
            if (hit < 0)
                break;
            failed++;
        }
        assert_true(failed > 20);
        assert_int_equal(clFinish(rigs[1].queue), CL_SUCCESS);
        close_scenery(&s);
        kvleaf_attention_destroy(&attention);
    }
}

/* Host only: tables at random, and whether some row has a block that another row's token goes to. */
enum { ROWS = 9, COLUMNS = 6, BLOCK = 4 };

typedef struct scene {
    kvl_engine engine;
    kvl_row rows[ROWS];
    int32_t keys[ROWS], buckets[4 * ROWS];
    int32_t meta[2 * ROWS + ROWS * COLUMNS];
} scene;

static void draw_scene(scene *s, support_rng *rng)
{
    int32_t blocks = support_range(rng, 20, 400), tables = 2 * ROWS;
    memset(s, 0, sizeof(*s));
    s->engine.params.geometry.block_size = BLOCK;
    s->engine.rows = s->rows;
    s->engine.keys = s->keys;
    s->engine.buckets = s->buckets;
    s->engine.now =
        (kvl_schedule){.slots = KVL_SLOTS_IN_PLACE, .num_rows = support_range(rng, 1, ROWS), .host = s->meta};
    for (int32_t i = 0; i < s->engine.now.num_rows; i++) {
        int32_t end = support_range(rng, 0, COLUMNS * BLOCK), first = end - support_range(rng, 1, COLUMNS * BLOCK);
        int32_t at = tables + i * COLUMNS;
        s->rows[i] = (kvl_row){.q_token = i, .table = at, .first = first, .end = end};
        for (int32_t c = 0; c < COLUMNS; c++)
            s->meta[at + c] = c < (first > 0 ? first / BLOCK : 0) ? -1 : support_range(rng, 0, blocks);
        int64_t slot =
            end && support_range(rng, 0, 4) ? s->meta[at + (end - 1) / BLOCK] * BLOCK + (end - 1) % BLOCK : -1;
        memcpy(s->meta + 2 * i, &slot, sizeof(slot));
    }
}

static bool conflicts(const scene *s)
{
    const int64_t *slots = (const int64_t *)(const void *)s->meta;
    for (int32_t w = 0; w < s->engine.now.num_rows; w++)
        for (int32_t r = 0; slots[w] >= 0 && r < s->engine.now.num_rows; r++)
            for (int32_t key = s->rows[r].first > 0 ? s->rows[r].first : 0; key < s->rows[r].end; key++) {
                bool own = w == r && key / BLOCK == (s->rows[r].end - 1) / BLOCK;
                if (!own && s->meta[s->rows[r].table + key / BLOCK] == slots[w] / BLOCK)
                    return true;
            }
    return false;
}

static void test_search_of_tables(void **state)
{
    static scene s;
    support_rng rng = {.state = support_seed(20261212)};
    int32_t found = 0;
    (void)state;
    for (int32_t i = 0; i < 20000; i++) {
        draw_scene(&s, &rng);
        bool wanted = !conflicts(&s);
        assert_true(kvl_fuse_now(&s.engine) == wanted);
        assert_true(s.engine.now.slots == (wanted ? KVL_SLOTS_OWN : KVL_SLOTS_ANYWHERE));
        found += !wanted;
    }
    assert_true(found > 2000 && found < 18000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_search_of_tables), cmocka_unit_test(test_every_family),
        cmocka_unit_test(test_other_steps),      cmocka_unit_test(test_blocks_in_common),
        cmocka_unit_test(test_slots_elsewhere),  cmocka_unit_test(test_device_tables),
        cmocka_unit_test(test_wrong_arguments),  cmocka_unit_test(test_calls_fail),
    };
    return cmocka_run_group_tests(tests, attention_rigs_set_up, attention_rigs_tear_down);
}
