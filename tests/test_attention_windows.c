/* SPDX-License-Identifier: Apache-2.0 */
/* Protects sliding windows: the keys that rows see at every length where a kernel does something else, the same bits in
 * any company, and that nothing before a window is read or worked on. */
#include "attention_rig.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/state.h"

enum { BLOCK = 16 };

static attention_rig rigs[] = {{"portable", "*.portable.*", PROBLEM_NHD, NULL, NULL},
                               {"default, strided", NULL, PROBLEM_NHD, NULL, NULL},
                               {"default, packed", NULL, PROBLEM_PACKED, NULL, NULL}};

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))
#define EACH_RIG(r)  for (const attention_rig *r = rigs; r < rigs + COUNT(rigs); r++)

/* Around blocks, units, tiles of keys and splits. */
static const int32_t windows[] = {1, 3, 4, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000};

static support_rng rng;

static int set_up(void **state)
{
    (void)state;
    rng.state = support_seed(20261130);
    attention_rig_open(rigs, COUNT(rigs), NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    attention_rig_close(rigs, COUNT(rigs));
    return 0;
}

static problem_geometry geometry_of(const attention_rig *r, int32_t window)
{
    return (problem_geometry){.q_dtype = KVLEAF_F32,
                              .kv_dtype = KVLEAF_F32,
                              .out_dtype = KVLEAF_F32,
                              .view = r->view,
                              .layout = KVLEAF_LAYOUT_CPU16,
                              .num_heads = 4,
                              .num_kv_heads = 2,
                              .head_dim = 16,
                              .block_size = BLOCK,
                              .window = window};
}

/* A row's bits alone, in other blocks, and as the last of a shorter chunk, are its bits in the batch. */
static void check_bits(const attention_rig *r, kvleaf_attention *attention, const problem *whole, int32_t index)
{
    problem_seq alone = whole->seqs[index], chunk = alone;
    const problem_options elsewhere = {.seed = whole->options.seed, .placement = whole->options.placement + 1};
    problem other;
    attention_rig_solve(r, attention, &whole->geometry, &alone, 1, &elsewhere, &other);
    if (!problem_same_rows(whole, whole->cu_q[index], &other, 0, alone.q_len))
        fail_msg("%s, window %d: sequence %d has other bits alone", r->name, whole->geometry.window, index);
    problem_destroy(&other);
    if (alone.mask != KVLEAF_MASK_CAUSAL || alone.q_len < 2 || alone.kv_len < alone.q_len)
        return;
    int32_t row = support_range(&rng, 1, alone.q_len - 1);
    chunk.q_len = support_range(&rng, 1, row);
    chunk.kv_len = alone.kv_len - alone.q_len + row;
    attention_rig_solve(r, attention, &whole->geometry, &chunk, 1, &elsewhere, &other);
    if (!problem_same_rows(whole, whole->cu_q[index] + row - chunk.q_len, &other, 0, chunk.q_len))
        fail_msg("%s, window %d: sequence %d (q %d, kv %d), %d rows to row %d have other bits as a chunk", r->name,
                 whole->geometry.window, index, alone.q_len, alone.kv_len, chunk.q_len, row);
    problem_destroy(&other);
}

/* Lengths on both sides of the window and of what kernels take at once, windows that begin on every side of those. */
static int32_t draw_seqs(int32_t window, kvleaf_family family, problem_seq *seqs)
{
    const int32_t lengths[] = {1,
                               window - 1,
                               window,
                               window + 1,
                               window + 16,
                               255,
                               256,
                               257,
                               window + 255,
                               window + 256,
                               window + 257,
                               511,
                               window + 513,
                               1027,
                               window + 7,
                               0};
    int32_t count = 0;
    for (int32_t i = 0; i < COUNT(lengths); i++) {
        int32_t longest = family == KVLEAF_FAMILY_DECODE ? 3 : i == 10 ? 130 : 23; /* 130 are several tiles */
        seqs[count++] = (problem_seq){.id = (uint32_t)i + 1,
                                      .q_len = i % 3 ? support_range(&rng, 1, longest) : 1,
                                      .kv_len = lengths[i],
                                      .family = family,
                                      .mask = i % 4 == 3 ? KVLEAF_MASK_NONE : KVLEAF_MASK_CAUSAL};
    }
    return count;
}

static void test_every_window(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        for (int32_t w = 0; w < COUNT(windows); w++) {
            problem_geometry g = geometry_of(r, windows[w]);
            kvleaf_attention *attention = attention_rig_make(r, &g, 0);
            for (int family = KVLEAF_FAMILY_PREFILL; family <= KVLEAF_FAMILY_DECODE; family++) {
                static problem made;
                problem_seq seqs[ATTENTION_RIG_SEQS];
                int32_t count = draw_seqs(windows[w], (kvleaf_family)family, seqs);
                const problem_options options = {
                    .seed = support_next(&rng), .placement = support_next(&rng), .poison = (problem_poison)(w % 2)};
                attention_rig_solve(r, attention, &g, seqs, count, &options, &made);
                check_bits(r, attention, &made, support_range(&rng, 0, count - 1));
                check_bits(r, attention, &made, support_range(&rng, 0, count - 1));
                problem_destroy(&made);
            }
            kvleaf_attention_destroy(&attention);
        }
    }
}

static float powers_of_two(problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim)
{
    (void)id, (void)head, (void)dim;
    return what == PROBLEM_Q ? 0 : what == PROBLEM_V ? ldexpf(1, (int)position) : 1;
}

/* Equal scores: the mean of the last four powers of two, of fewer at the start of a prompt longer than the window. */
static void test_the_mean_of_a_window(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = geometry_of(r, 4);
        const problem_options options = {.placement = 5, .value = powers_of_two};
        const problem_seq seqs[] = {{.id = 1, .q_len = 1, .kv_len = 8, .family = KVLEAF_FAMILY_DECODE},
                                    {.id = 2, .q_len = 8, .kv_len = 8, .family = KVLEAF_FAMILY_PREFILL}};
        static const float means[] = {1, 1.5f, 7.0f / 3, 3.75f, 7.5f, 15, 30, 60};
        kvleaf_attention *attention = attention_rig_make(r, &g, 0);
        problem made;
        attention_rig_solve(r, attention, &g, seqs, 2, &options, &made);
        for (int32_t row = 0; row < 9; row++) {
            float expected = means[row ? row - 1 : 7];
            int32_t keys = row && row < 4 ? row : 4;
            for (int32_t head = 0; head < 4; head++) {
                assert_true(fabsf(problem_out(&made, row, head, 3) - expected) <= 1e-6f * expected);
                assert_true(fabs(problem_lse(&made, row, head) - log(keys)) <= 1e-6);
            }
        }
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

/* A window as long as the context hides nothing: the bits are those without one. */
static void test_a_window_of_all_keys(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry with = geometry_of(r, ATTENTION_RIG_CONTEXT), without = geometry_of(r, 0);
        const problem_options options = {.seed = support_next(&rng), .placement = 3};
        kvleaf_attention *narrow = attention_rig_make(r, &with, 0), *wide = attention_rig_make(r, &without, 0);
        for (int family = KVLEAF_FAMILY_PREFILL; family <= KVLEAF_FAMILY_DECODE; family++) {
            problem_seq seq = {.id = 4, .q_len = 3, .kv_len = 1100, .family = (kvleaf_family)family};
            problem a, b;
            attention_rig_solve(r, narrow, &with, &seq, 1, &options, &a);
            attention_rig_solve(r, wide, &without, &seq, 1, &options, &b);
            assert_true(problem_same_rows(&a, 0, &b, 0, 3));
            problem_destroy(&a);
            problem_destroy(&b);
        }
        kvleaf_attention_destroy(&narrow);
        kvleaf_attention_destroy(&wide);
    }
}

static cl_mem upload(const attention_rig *r, const void *data, size_t size)
{
    cl_mem buffer = support_buffer(r->device, r->queue, size, 0xff);
    assert_int_equal(clEnqueueWriteBuffer(r->queue, buffer, CL_TRUE, 0, size, data, 0, NULL, NULL), CL_SUCCESS);
    return buffer;
}

/* The problem's table in rows of `stride` entries, on the device. */
static cl_mem widen_table(const attention_rig *r, const problem *made, int32_t stride)
{
    size_t entries = (size_t)made->num_seqs * (size_t)stride;
    int32_t *table = malloc(entries * sizeof(*table));
    assert_non_null(table);
    for (size_t i = 0; i < entries; i++)
        table[i] = INT_MIN;
    for (int32_t i = 0; i < made->num_seqs; i++)
        memcpy(table + i * stride, made->table + i * made->columns, (size_t)made->columns * sizeof(*table));
    cl_mem buffer = upload(r, table, entries * sizeof(*table));
    free(table);
    return buffer;
}

/* The host knows bounds, the device the lengths: windows move down with them, over every edge of a split. */
static void test_lengths_on_the_device(void **state)
{
    static const int32_t some[] = {1, 5, 255, 256, 257, 300}, lens[] = {1, 4, 250, 256, 257, 511, 512, 513, 600, 0};
    const attention_rig *r = &rigs[1];
    (void)state;
    for (int32_t w = 0; w < COUNT(some); w++) {
        static problem made;
        problem_geometry g = geometry_of(r, some[w]);
        problem_seq seqs[COUNT(lens)];
        int32_t bounds[COUNT(lens)], stride = 1000 / BLOCK;
        problem_report report;
        for (int32_t i = 0; i < COUNT(lens); i++) {
            bounds[i] = lens[i] + support_range(&rng, 0, 300);
            seqs[i] = (problem_seq){.id = (uint32_t)i,
                                    .q_len = i % 4 != 3 ? 1 + i % 2 : 9,
                                    .kv_len = lens[i],
                                    .family = i % 4 != 3 ? KVLEAF_FAMILY_DECODE : KVLEAF_FAMILY_PREFILL,
                                    .mask = i % 5 == 4 ? KVLEAF_MASK_NONE : KVLEAF_MASK_CAUSAL};
        }
        const problem_options options = {.seed = support_next(&rng), .placement = support_next(&rng)};
        attention_rig_problem(r, &g, seqs, COUNT(lens), &options, &made);
        kvleaf_attention *attention = attention_rig_make(r, &g, 1);
        kvleaf_batch batch = problem_batch(&made);
        batch.block_table = NULL;
        batch.device_block_table = widen_table(r, &made, stride);
        batch.block_table_stride = stride;
        batch.seq_lens_k = bounds;
        batch.device_seq_lens_k = upload(r, made.lens, sizeof(bounds));
        kvleaf_exec exec = problem_exec(&made);
        kvleaf_kv_view view = problem_kv_view(&made);
        kvleaf_tensor q = problem_tensor(&made.q), out = problem_tensor(&made.out), lse = problem_tensor(&made.lse);
        assert_true(problem_upload_outputs(&made));
        ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
        ASSERT_OK(kvleaf_attention_attend(attention, &q, &view, &out, &lse, &exec));
        assert_int_equal(clFinish(r->queue), CL_SUCCESS);
        if (!problem_collect(&made))
            fail_msg("%s", made.fault);
        if (!problem_verify(&made, &report))
            fail_msg("window %d: %s", some[w], report.text);
        clReleaseMemObject(batch.device_block_table);
        clReleaseMemObject(batch.device_seq_lens_k);
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

/* Ids count from the first block that a row sees, and there they are checked. */
static void test_ids_before_the_window_are_free(void **state)
{
    const attention_rig *r = &rigs[1];
    problem_geometry g = geometry_of(r, 36);
    const problem_options options = {.placement = 2};
    const problem_seq seq = {.id = 1, .q_len = 2, .kv_len = 120}; /* sees 83 .. 119, blocks 5 to 7 */
    kvleaf_attention *attention = attention_rig_make(r, &g, 0);
    problem made;
    (void)state;
    attention_rig_solve(r, attention, &g, &seq, 1, &options, &made);
    kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    for (int32_t c = 0; c < 8; c++) {
        int32_t id = made.table[c];
        made.table[c] = -1;
        if (c < 5)
            ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
        else
            ASSERT_FAILS(KVLEAF_INVALID, "block_table", kvleaf_attention_plan(attention, &batch, &exec));
        made.table[c] = id;
        assert_int_equal(clFinish(r->queue), CL_SUCCESS);
    }
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
}

/* Decode has no more splits, and no more workspace, than windows reach, whatever lies before them. */
static void test_work_goes_with_the_window(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry narrow = geometry_of(r, 100), all = geometry_of(r, 0);
        const problem_options options = {.placement = 2};
        const problem_seq seq = {.id = 1, .q_len = 1, .kv_len = 2000};
        kvleaf_attention_params params =
            problem_attention_params(&all, ATTENTION_RIG_SEQS, ATTENTION_RIG_TOKENS, ATTENTION_RIG_CONTEXT);
        uint64_t bytes[2] = {0, 0}, host = 0;
        problem made;
        ASSERT_OK(kvleaf_attention_size(r->device, &params, &bytes[0], &host));
        params.window = 100;
        ASSERT_OK(kvleaf_attention_size(r->device, &params, &bytes[1], &host));
        assert_true(bytes[1] < bytes[0]);
        kvleaf_attention *attention = attention_rig_make(r, &narrow, 0);
        attention_rig_solve(r, attention, &narrow, &seq, 1, &options, &made);
        assert_in_range(attention->engine->now.num_splits, 1, 2);
        assert_non_null(strstr(kvleaf_attention_variant(attention, "decode"), ".w100"));
        assert_non_null(strstr(kvleaf_attention_variant(attention, "prefill"), ".w100"));
        assert_null(strstr(kvleaf_attention_variant(attention, "append"), ".w"));
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_window),
        cmocka_unit_test(test_the_mean_of_a_window),
        cmocka_unit_test(test_a_window_of_all_keys),
        cmocka_unit_test(test_lengths_on_the_device),
        cmocka_unit_test(test_ids_before_the_window_are_free),
        cmocka_unit_test(test_work_goes_with_the_window),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
