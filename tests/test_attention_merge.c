/* SPDX-License-Identifier: Apache-2.0 */
/* Protects merges through the caller-level API: numbers of partials around powers of two, empty ones, and that parts of
 * a sequence merge to the whole. */
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

enum { HEADS = 4, DIM = 16, ROW = HEADS * DIM };

static const problem_geometry geometry = {.q_dtype = KVLEAF_F32,
                                          .kv_dtype = KVLEAF_F32,
                                          .out_dtype = KVLEAF_F32,
                                          .view = PROBLEM_NHD,
                                          .num_heads = HEADS,
                                          .num_kv_heads = 2,
                                          .head_dim = DIM,
                                          .block_size = 16};
static kvleaf_device *device;
static cl_command_queue queue;
static kvleaf_attention *attention;

static int set_up(void **state)
{
    (void)state;
    device = support_device();
    queue = support_queue(device);
    kvleaf_attention_params params = problem_attention_params(&geometry, 8, 64, 256);
    ASSERT_OK(kvleaf_attention_create(device, &params, &attention));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvleaf_attention_destroy(&attention);
    clReleaseCommandQueue(queue);
    kvleaf_device_destroy(&device);
    return 0;
}

/* problem_merge makes rows whose parts are all empty, all but one, or some. */
static void test_numbers_of_partials(void **state)
{
    static const int32_t counts[] = {1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 161, 256};
    uint64_t seed = support_seed(11);
    (void)state;
    for (int32_t i = 0; i < COUNT(counts); i++) {
        problem_geometry odd = geometry;
        problem_report report;
        odd.odd = i % 2;
        ASSERT_OK(problem_merge(device, queue, attention, &odd, counts[i], 15, seed + (uint64_t)i, &report));
        if (!report.passed)
            fail_msg("%s", report.text);
    }
}

typedef struct small_merge {
    float outs[4][ROW], lses[4][HEADS]; /* parts of one row of all heads */
    float out[ROW], lse[HEADS];
} small_merge;

static void run_small(small_merge *merge, int32_t n)
{
    cl_mem outs = support_buffer(device, queue, sizeof(merge->outs), 0xff);
    cl_mem lses = support_buffer(device, queue, sizeof(merge->lses), 0xff);
    cl_mem out = support_buffer(device, queue, sizeof(merge->out), 0xff);
    cl_mem lse = support_buffer(device, queue, sizeof(merge->lse), 0xff);
    kvleaf_tensor outs_view = {.handle = outs, .dtype = KVLEAF_F32}, lses_view = {.handle = lses, .dtype = KVLEAF_F32};
    kvleaf_tensor out_view = {.handle = out, .dtype = KVLEAF_F32}, lse_view = {.handle = lse, .dtype = KVLEAF_F32};
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = queue};
    assert_int_equal(clEnqueueWriteBuffer(queue, outs, CL_TRUE, 0, sizeof(merge->outs), merge->outs, 0, NULL, NULL), 0);
    assert_int_equal(clEnqueueWriteBuffer(queue, lses, CL_TRUE, 0, sizeof(merge->lses), merge->lses, 0, NULL, NULL), 0);
    ASSERT_OK(kvleaf_attention_merge(attention, n, 1, &outs_view, ROW, &lses_view, HEADS, &out_view, &lse_view, &exec));
    assert_int_equal(clEnqueueReadBuffer(queue, out, CL_TRUE, 0, sizeof(merge->out), merge->out, 0, NULL, NULL), 0);
    assert_int_equal(clEnqueueReadBuffer(queue, lse, CL_TRUE, 0, sizeof(merge->lse), merge->lse, 0, NULL, NULL), 0);
    clReleaseMemObject(outs);
    clReleaseMemObject(lses);
    clReleaseMemObject(out);
    clReleaseMemObject(lse);
}

/* The neutral element at every place: all parts, one of them, the first. */
static void test_the_neutral_element(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 4; n++) {
        for (int32_t full = -1; full < n; full++) {
            small_merge merge;
            memset(&merge, 0, sizeof(merge));
            for (int32_t p = 0; p < 4; p++)
                for (int32_t h = 0; h < HEADS; h++)
                    merge.lses[p][h] = p == full ? -7.25f + (float)h : -INFINITY;
            for (int32_t i = 0; i < ROW && full >= 0; i++)
                merge.outs[full][i] = 0.1f * (float)(i - 30);
            run_small(&merge, n);
            for (int32_t h = 0; h < HEADS; h++)
                assert_true(merge.lse[h] == (full < 0 ? -INFINITY : -7.25f + (float)h));
            for (int32_t i = 0; i < ROW; i++)
                assert_true(merge.out[i] == (full < 0 ? 0 : merge.outs[full][i]));
        }
    }
}

/* Two equal parts: the mean of their outputs, and LSE + ln 2. Far apart: the larger alone. */
static void test_known_weights(void **state)
{
    small_merge merge;
    (void)state;
    memset(&merge, 0, sizeof(merge));
    for (int32_t h = 0; h < HEADS; h++) {
        merge.lses[0][h] = h == 2 ? 300 : 1.5f;
        merge.lses[1][h] = h == 1 ? 1.5f + 1.0986123f : 1.5f; /* ln 3: three quarters of the weight */
    }
    for (int32_t i = 0; i < ROW; i++) {
        merge.outs[0][i] = 8;
        merge.outs[1][i] = 4;
    }
    run_small(&merge, 2);
    assert_true(fabsf(merge.out[0] - 6) < 1e-5f && fabsf(merge.lse[0] - (1.5f + 0.6931472f)) < 1e-5f);
    assert_true(fabsf(merge.out[DIM] - 5) < 1e-5f && fabsf(merge.lse[1] - (1.5f + 1.3862944f)) < 1e-5f);
    assert_true(merge.out[2 * DIM] == 8 && merge.lse[2] == 300);
}

/* A sequence of 200 keys as one, and as 1 .. 4 contiguous parts that are attended by themselves and merged. */
static void test_parts_merge_to_the_whole(void **state)
{
    static const int32_t cuts[] = {0, 64, 65, 200, 200}; /* the last part is empty */
    problem_geometry flat = geometry;
    problem_seq seq = {.id = 5, .q_len = 1, .kv_len = 200, .mask = KVLEAF_MASK_NONE, .family = KVLEAF_FAMILY_DECODE};
    problem_options options = {.seed = 61};
    kvleaf_attention *object = NULL;
    small_merge merge;
    problem whole;
    problem_report report;
    (void)state;
    flat.view = PROBLEM_CONTIGUOUS;
    kvleaf_attention_params params = problem_attention_params(&flat, 8, 64, 256);
    ASSERT_OK(kvleaf_attention_create(device, &params, &object));
    assert_true(problem_create(&whole, device, queue, &flat, &seq, 1, &options));
    ASSERT_OK(problem_attend(&whole, object));
    assert_true(problem_verify(&whole, &report));
    kvleaf_exec exec = problem_exec(&whole);
    for (int32_t p = 0; p < 4; p++) {
        const int32_t cu_q[] = {0, 1}, cu_k[] = {0, cuts[p + 1] - cuts[p]};
        const kvleaf_mask mask = KVLEAF_MASK_NONE;
        kvleaf_batch batch = {.struct_size = sizeof(batch), .num_seqs = 1};
        batch.cu_seqlens_q = cu_q;
        batch.cu_seqlens_k = cu_k;
        batch.masks = &mask;
        kvleaf_kv_view view = problem_kv_view(&whole);
        kvleaf_tensor q = problem_tensor(&whole.q), out = problem_tensor(&whole.out), lse = problem_tensor(&whole.lse);
        view.k.offset += (uint64_t)cuts[p] * 2 * DIM * sizeof(float);
        view.v.offset += (uint64_t)cuts[p] * 2 * DIM * sizeof(float);
        ASSERT_OK(kvleaf_attention_plan(object, &batch, &exec));
        ASSERT_OK(kvleaf_attention_attend(object, &q, &view, &out, &lse, &exec));
        clFinish(queue);
        unsigned char *whole_out = malloc(ROW * sizeof(float));
        assert_non_null(whole_out);
        memcpy(whole_out, whole.out_bits, ROW * sizeof(float));
        float whole_lse[HEADS];
        memcpy(whole_lse, whole.lse_values, sizeof(whole_lse));
        assert_true(problem_collect(&whole));
        memcpy(merge.outs[p], whole.out_bits, ROW * sizeof(float));
        memcpy(merge.lses[p], whole.lse_values, sizeof(merge.lses[p]));
        memcpy(whole.out_bits, whole_out, ROW * sizeof(float));
        memcpy(whole.lse_values, whole_lse, sizeof(whole_lse));
        free(whole_out);
    }
    run_small(&merge, 4);
    memcpy(whole.out_bits, merge.out, sizeof(merge.out));
    memcpy(whole.lse_values, merge.lse, sizeof(merge.lse));
    if (!problem_verify(&whole, &report))
        fail_msg("%s", report.text);
    problem_destroy(&whole);
    kvleaf_attention_destroy(&object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers_of_partials),
        cmocka_unit_test(test_the_neutral_element),
        cmocka_unit_test(test_known_weights),
        cmocka_unit_test(test_parts_merge_to_the_whole),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
