/* SPDX-License-Identifier: Apache-2.0 */
/* Protects against faults that systems of this kind have had: each test is one kind, with the right value, run on the
 * portable kernels and on the ones the device takes by itself. */
#include "support.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

typedef struct rig {
    const char *name;
    kvleaf_device *device;
    cl_command_queue queue;
} rig;

static rig rigs[2];

#define EACH_RIG(r)  for (const rig *r = rigs; r < rigs + 2; r++)
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

static int set_up(void **state)
{
    kvleaf_device_params params = support_params();
    (void)state;
    params.variants = "*.portable.*";
    rigs[0].name = "portable";
    ASSERT_OK(kvleaf_device_open(&params, &rigs[0].device));
    rigs[1].name = "default";
    rigs[1].device = support_device();
    for (int i = 0; i < 2; i++)
        rigs[i].queue = support_queue(rigs[i].device);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        clReleaseCommandQueue(rigs[i].queue);
        kvleaf_device_destroy(&rigs[i].device);
    }
    return 0;
}

/* Where the geometry is not what a test is about it is one of the first two, f32 and with an f16 cache. The others are
 * those of `pairs`: a ratio of heads with a block size, since kernels with both as constants are a program for each
 * pair. */
static problem_geometry geometry_of(kvleaf_dtype kv_dtype, int32_t heads, int32_t kv_heads, int32_t block_size)
{
    return (problem_geometry){.q_dtype = KVLEAF_F32,
                              .kv_dtype = kv_dtype,
                              .out_dtype = KVLEAF_F32,
                              .view = PROBLEM_NHD,
                              .num_heads = heads,
                              .num_kv_heads = kv_heads,
                              .head_dim = 16,
                              .block_size = block_size};
}

/* PoCL takes longest over the portable kernels; those have an f16 cache in test_attention_far.c and kvleaf-check. */
static problem_geometry usual(const rig *r, kvleaf_dtype kv_dtype)
{
    return geometry_of(r == rigs ? KVLEAF_F32 : kv_dtype, 4, 2, 16);
}

/* The portable kernels take both as arguments, so they have every ratio with every block size in turn. */
static const struct {
    int32_t ratio, block_size;
    bool portable_only;
} pairs[] = {{1, 1, false},   {3, 4, false},  {2, 32, false}, {6, 5, false}, {7, 128, false},
             {12, 16, false}, {5, 256, true}, {2, 64, true},  {7, 8, true},  {3, 2, true}};

static kvleaf_attention *make_attention(const rig *r, const problem_geometry *geometry, int32_t max_seqs,
                                        int32_t max_tokens, int32_t max_context)
{
    kvleaf_attention_params params = problem_attention_params(geometry, max_seqs, max_tokens, max_context);
    kvleaf_attention *attention = NULL;
    ASSERT_OK(kvleaf_attention_create(r->device, &params, &attention));
    return attention;
}

/* Attends and compares with the reference; the problem stays for more questions. */
static void solve(const rig *r, kvleaf_attention *attention, const problem_geometry *geometry, const problem_seq *seqs,
                  int32_t num_seqs, const problem_options *options, problem *out)
{
    problem_report report;
    if (!problem_create(out, r->device, r->queue, geometry, seqs, num_seqs, options))
        fail_msg("%s", out->fault);
    ASSERT_OK(problem_attend(out, attention));
    if (!problem_verify(out, &report))
        fail_msg("%s: %s", r->name, report.text);
}

static float value_one(problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim)
{
    (void)id, (void)head;
    if (what == PROBLEM_V)
        return 1;
    return (float)((position * 7 + dim * 3 + (what == PROBLEM_Q)) % 11 - 5) / 4;
}

static float no_query(problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim)
{
    (void)id;
    return what == PROBLEM_Q ? 0 : what == PROBLEM_V ? 1 : (float)((position * 5 + head + dim) % 13) - 6;
}

static float head_number(problem_what what, uint32_t id, int64_t position, int32_t head, int32_t dim)
{
    if (what == PROBLEM_V)
        return (float)(head + 1);
    return value_one(what, id, position, head, dim);
}

/* A pool full of NaN or infinity, of which only the valid slots were written. */
static void test_poison_in_unused_slots(void **state)
{
    static const int32_t lengths[] = {1, 15, 16, 17, 33};
    (void)state;
    EACH_RIG(r)
    {
        for (int dtype = r == rigs ? KVLEAF_F32 : KVLEAF_F16; dtype <= KVLEAF_F32; dtype += 2) {
            problem_geometry g = usual(r, (kvleaf_dtype)dtype);
            kvleaf_attention *attention = make_attention(r, &g, 16, 64, 64);
            for (int poison = 0; poison < 2; poison++) {
                problem_seq seqs[2 * COUNT(lengths)];
                problem made;
                for (int32_t i = 0; i < COUNT(seqs); i++)
                    seqs[i] = (problem_seq){.id = (uint32_t)i,
                                            .q_len = 1 + i % 3,
                                            .kv_len = lengths[i / 2],
                                            .family = i % 2 ? KVLEAF_FAMILY_DECODE : KVLEAF_FAMILY_PREFILL};
                problem_options options = {.seed = 1, .placement = 3, .poison = (problem_poison)poison};
                solve(r, attention, &g, seqs, COUNT(seqs), &options, &made);
                problem_destroy(&made);
            }
            kvleaf_attention_destroy(&attention);
        }
    }
}

/* Eight queries over five keys, causal: the first three see nothing. */
static void test_more_queries_than_keys(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F32);
        problem_options options = {.value = value_one};
        kvleaf_attention *attention = make_attention(r, &g, 16, 64, 64);
        for (int family = KVLEAF_FAMILY_PREFILL; family <= KVLEAF_FAMILY_DECODE; family++) {
            problem_seq seq = {.q_len = 8, .kv_len = 5, .family = (kvleaf_family)family};
            problem made;
            solve(r, attention, &g, &seq, 1, &options, &made);
            for (int32_t row = 0; row < 8; row++) {
                for (int32_t head = 0; head < 4; head++) {
                    assert_true((problem_lse(&made, row, head) == -INFINITY) == (row < 3));
                    for (int32_t d = 0; d < 16; d++)
                        assert_true(fabsf(problem_out(&made, row, head, d) - (row < 3 ? 0.0f : 1.0f)) <= 1e-6f);
                }
            }
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

/* A prompt of 37 whole and in three ways of chunks: the same bits. */
static void test_a_prompt_in_chunks(void **state)
{
    static const int32_t chunkings[3][40] = {{16, 16, 5}, {15, 1, 21}, {0}};
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F16);
        problem_options options = {.seed = 9, .placement = 4}, elsewhere = {.seed = 9, .placement = 5};
        problem_seq seq = {.id = 3, .q_len = 37, .kv_len = 37, .family = KVLEAF_FAMILY_PREFILL};
        kvleaf_attention *attention = make_attention(r, &g, 4, 64, 64);
        problem whole;
        solve(r, attention, &g, &seq, 1, &options, &whole);
        for (int way = 0; way < 3; way++) {
            for (int32_t done = 0, i = 0; done < 37; i++) {
                problem_seq chunk = seq;
                problem part;
                chunk.q_len = chunkings[way][0] ? chunkings[way][i] : 1;
                chunk.kv_len = done + chunk.q_len;
                solve(r, attention, &g, &chunk, 1, &elsewhere, &part);
                if (!problem_same_rows(&whole, done, &part, 0, chunk.q_len))
                    fail_msg("%s: way %d, rows from %d differ", r->name, way, done);
                problem_destroy(&part);
                done += chunk.q_len;
            }
        }
        problem_destroy(&whole);
        kvleaf_attention_destroy(&attention);
    }
}

/* Equal scores over L = 1 .. 300 keys: the mean, and LSE = ln L. */
static void test_equal_scores_at_every_length(void **state)
{
    static problem_seq seqs[300];
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F32);
        problem_options options = {.value = no_query};
        kvleaf_attention *attention = make_attention(r, &g, 300, 600, 300);
        for (int family = KVLEAF_FAMILY_PREFILL; family <= KVLEAF_FAMILY_DECODE; family++) {
            static problem made;
            for (int32_t i = 0; i < 300; i++)
                seqs[i] = (problem_seq){
                    .q_len = 1, .kv_len = i + 1, .family = (kvleaf_family)family, .mask = KVLEAF_MASK_NONE};
            solve(r, attention, &g, seqs, 300, &options, &made);
            for (int32_t i = 0; i < 300; i++) {
                assert_true(fabs(problem_lse(&made, i, 0) - log(i + 1)) <= 1e-5 * fmax(1, log(i + 1)));
                assert_true(fabsf(problem_out(&made, i, 0, i % 8) - 1) <= 2e-6f);
            }
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

/* Scores under a cap of 1, which bends nearly all: the mean of equal ones, causal and not, and sharp ones. */
static void test_capped_scores(void **state)
{
    static const int32_t lengths[] = {65, 1, 300, 9, 0};
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F16);
        problem_seq seqs[4 * COUNT(lengths)];
        g.softcap = 1;
        kvleaf_attention *attention = make_attention(r, &g, COUNT(seqs), 2 * COUNT(seqs), 512);
        for (int32_t i = 0; i < COUNT(seqs); i++)
            seqs[i] = (problem_seq){.id = (uint32_t)i,
                                    .q_len = 1 + i / 2 % 2,
                                    .kv_len = lengths[i / 4],
                                    .family = i % 2 ? KVLEAF_FAMILY_DECODE : KVLEAF_FAMILY_PREFILL,
                                    .mask = i / 2 % 2 ? KVLEAF_MASK_CAUSAL : KVLEAF_MASK_NONE};
        for (int sharp = 0; sharp < 2; sharp++) {
            problem_options options = {.seed = 5, .value = sharp ? NULL : no_query};
            problem made;
            solve(r, attention, &g, seqs, COUNT(seqs), &options, &made);
            for (int32_t i = 0; !sharp && i < 4 * 4; i++)
                assert_true(fabsf(problem_out(&made, made.cu_q[i + 1] - 1, 3, i % 8) - 1) <= 2e-6f);
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

/* Sequences without queries, without keys, without both; whole batches of them; a batch of nothing. */
static void test_empty_sequences_and_batches(void **state)
{
    static const int32_t queries[] = {0, 1, 0, 1}, keys[] = {0, 3, 0, 5};
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = geometry_of(KVLEAF_F32, 9, 3, 4);
        problem_options options = {.seed = 2};
        kvleaf_attention *attention = make_attention(r, &g, 4, 16, 32);
        for (int family = KVLEAF_FAMILY_AUTO; family <= KVLEAF_FAMILY_DECODE; family++) {
            problem_seq seqs[4], none[4];
            problem made;
            for (uint32_t i = 0; i < 4; i++) {
                seqs[i] =
                    (problem_seq){.id = i, .q_len = queries[i], .kv_len = keys[i], .family = (kvleaf_family)family};
                none[i] = (problem_seq){.id = i, .kv_len = keys[i], .family = (kvleaf_family)family};
            }
            solve(r, attention, &g, seqs, 4, &options, &made);
            problem_destroy(&made);
            solve(r, attention, &g, none, 4, &options, &made);
            assert_true(problem_untouched(&made));
            problem_destroy(&made);
            for (uint32_t i = 0; i < 4; i++)
                seqs[i].kv_len = 0;
            solve(r, attention, &g, seqs, 4, &options, &made);
            assert_true(problem_lse(&made, 1, 8) == -INFINITY && problem_out(&made, 1, 8, 7) == 0);
            problem_destroy(&made);
            solve(r, attention, &g, seqs, 0, &options, &made);
            assert_true(problem_untouched(&made));
            problem_destroy(&made);
        }
        kvleaf_attention_destroy(&attention);
    }
}

/* Query head h reads KV head h / ratio and no other: values say which head they are of. */
static void check_heads(const rig *r, kvleaf_attention *attention, const problem_geometry *g)
{
    problem_options options = {.value = head_number};
    problem_seq seqs[] = {{.q_len = 1, .kv_len = 20, .family = KVLEAF_FAMILY_DECODE},
                          {.q_len = 3, .kv_len = 19, .family = KVLEAF_FAMILY_PREFILL}};
    problem made;
    solve(r, attention, g, seqs, 2, &options, &made);
    for (int32_t row = 0; row < 4; row++)
        for (int32_t head = 0; head < g->num_heads; head++)
            assert_true(fabsf(problem_out(&made, row, head, 5) - (float)(head * 2 / g->num_heads + 1)) <= 1e-5f);
    problem_destroy(&made);
}

/* Lengths about a block, the blocks shuffled. */
static void check_blocks(const rig *r, kvleaf_attention *attention, const problem_geometry *g, uint64_t placement)
{
    problem_options options = {.seed = 21, .placement = placement};
    problem_seq seqs[] = {{.id = 1, .q_len = 1, .kv_len = 300, .family = KVLEAF_FAMILY_DECODE},
                          {.id = 2, .q_len = 20, .kv_len = 77, .family = KVLEAF_FAMILY_PREFILL},
                          {.id = 3, .q_len = 1, .kv_len = g->block_size, .family = KVLEAF_FAMILY_DECODE},
                          {.id = 4, .q_len = 2, .kv_len = g->block_size + 1, .family = KVLEAF_FAMILY_PREFILL}};
    problem made;
    solve(r, attention, g, seqs, 4, &options, &made);
    problem_destroy(&made);
}

static void test_every_ratio_and_block_size(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        for (int32_t i = 0; i < COUNT(pairs); i++) {
            if (pairs[i].portable_only && r != rigs)
                continue;
            problem_geometry g = geometry_of(KVLEAF_F32, 2 * pairs[i].ratio, 2, pairs[i].block_size);
            kvleaf_attention *attention = make_attention(r, &g, 8, 64, 512);
            check_heads(r, attention, &g);
            check_blocks(r, attention, &g, (uint64_t)i);
            kvleaf_attention_destroy(&attention);
        }
    }
}

/* Four sequences, then two of the same table, as when requests finish; a slot of -1; an id that is needed and wrong. */
static void test_a_batch_that_shrinks_on_one_table(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F32);
        problem_options options = {.seed = 4, .placement = 8};
        kvleaf_attention *attention = make_attention(r, &g, 4, 16, 64);
        problem_seq seqs[4];
        problem made;
        problem_report report;
        for (uint32_t i = 0; i < 4; i++)
            seqs[i] = (problem_seq){.id = i, .q_len = 1, .kv_len = 50 - (int32_t)i * 9};
        solve(r, attention, &g, seqs, 4, &options, &made);
        made.num_seqs = 2;
        made.total_q = 2;
        for (int32_t i = 0; i < made.columns * 2; i++) /* rows that are no longer of the batch */
            made.table[2 * made.columns + i] = i % 2 ? INT_MAX : -1;
        ASSERT_OK(problem_attend(&made, attention));
        if (!problem_verify(&made, &report))
            fail_msg("%s: %s", r->name, report.text);
        int32_t good = made.table[made.columns + 1];
        made.table[made.columns + 1] = made.num_blocks;
        assert_true(problem_upload_outputs(&made));
        ASSERT_STATUS(KVLEAF_INVALID, problem_attend(&made, attention));
        assert_true(problem_untouched(&made));
        made.table[made.columns + 1] = good;
        ASSERT_OK(problem_append(&made, attention, KVLEAF_F32, false, &report));
        if (!report.passed)
            fail_msg("%s: %s", r->name, report.text);
        problem_destroy(&made);
        kvleaf_attention_destroy(&attention);
    }
}

/* Lengths from 1 to 131072 in one batch, and each alone: the same bits. */
static void test_long_lengths_mixed(void **state)
{
    static const int32_t lengths[] = {131072, 1, 70001, 4097, 512, 513, 16, 255};
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = geometry_of(KVLEAF_F32, 2, 1, 16);
        problem_options options = {.seed = 31, .placement = 1}, elsewhere = {.seed = 31, .placement = 2};
        kvleaf_attention *attention = make_attention(r, &g, COUNT(lengths), 32, 131072);
        problem_seq seqs[COUNT(lengths)];
        problem whole, alone;
        for (int32_t i = 0; i < COUNT(lengths); i++)
            seqs[i] =
                (problem_seq){.id = (uint32_t)i, .q_len = 1, .kv_len = lengths[i], .family = KVLEAF_FAMILY_DECODE};
        solve(r, attention, &g, seqs, COUNT(lengths), &options, &whole);
        for (int32_t i = 0; i < COUNT(lengths); i += 2) {
            solve(r, attention, &g, &seqs[i], 1, &elsewhere, &alone);
            if (!problem_same_rows(&whole, i, &alone, 0, 1))
                fail_msg("%s: length %d has other bits alone", r->name, lengths[i]);
            problem_destroy(&alone);
        }
        problem_destroy(&whole);
        kvleaf_attention_destroy(&attention);
    }
}

/* A row of one family is the same bits in a batch with the other family, wherever it stands. */
static void test_families_mixed_in_a_batch(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F16);
        problem_options options = {.seed = 41, .placement = 1}, elsewhere = {.seed = 41, .placement = 7};
        kvleaf_attention *attention = make_attention(r, &g, 8, 64, 512);
        const problem_seq seqs[] = {{.id = 1, .q_len = 5, .kv_len = 60, .family = KVLEAF_FAMILY_PREFILL},
                                    {.id = 2, .q_len = 1, .kv_len = 300, .family = KVLEAF_FAMILY_DECODE},
                                    {.id = 3, .q_len = 17, .kv_len = 17, .family = KVLEAF_FAMILY_PREFILL},
                                    {.id = 4, .q_len = 2, .kv_len = 90, .family = KVLEAF_FAMILY_DECODE}};
        problem mixed, alone;
        solve(r, attention, &g, seqs, 4, &options, &mixed);
        for (int32_t i = 0; i < 4; i++) {
            solve(r, attention, &g, &seqs[i], 1, &elsewhere, &alone);
            if (!problem_same_rows(&mixed, mixed.cu_q[i], &alone, 0, seqs[i].q_len))
                fail_msg("%s: sequence %d has other bits alone", r->name, i);
            problem_destroy(&alone);
        }
        problem_destroy(&mixed);
        kvleaf_attention_destroy(&attention);
    }
}

/* AUTO takes one query row to decode and more to prefill. */
static void test_auto_takes_the_family_by_rows(void **state)
{
    (void)state;
    EACH_RIG(r)
    {
        problem_geometry g = usual(r, KVLEAF_F16);
        problem_options options = {.seed = 51};
        kvleaf_attention *attention = make_attention(r, &g, 8, 64, 512);
        problem_seq one = {.id = 1, .q_len = 1, .kv_len = 290}, two = {.id = 1, .q_len = 2, .kv_len = 291};
        problem by_itself, named;
        solve(r, attention, &g, &one, 1, &options, &by_itself);
        one.family = KVLEAF_FAMILY_DECODE;
        solve(r, attention, &g, &one, 1, &options, &named);
        assert_true(problem_same_rows(&by_itself, 0, &named, 0, 1));
        problem_destroy(&by_itself);
        problem_destroy(&named);
        solve(r, attention, &g, &two, 1, &options, &by_itself);
        two.family = KVLEAF_FAMILY_PREFILL;
        solve(r, attention, &g, &two, 1, &options, &named);
        assert_true(problem_same_rows(&by_itself, 0, &named, 0, 2));
        problem_destroy(&by_itself);
        problem_destroy(&named);
        kvleaf_attention_destroy(&attention);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_poison_in_unused_slots),
        cmocka_unit_test(test_more_queries_than_keys),
        cmocka_unit_test(test_a_prompt_in_chunks),
        cmocka_unit_test(test_equal_scores_at_every_length),
        cmocka_unit_test(test_capped_scores),
        cmocka_unit_test(test_empty_sequences_and_batches),
        cmocka_unit_test(test_every_ratio_and_block_size),
        cmocka_unit_test(test_a_batch_that_shrinks_on_one_table),
        cmocka_unit_test(test_long_lengths_mixed),
        cmocka_unit_test(test_families_mixed_in_a_batch),
        cmocka_unit_test(test_auto_takes_the_family_by_rows),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
