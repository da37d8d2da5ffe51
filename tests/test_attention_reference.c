/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the float64 reference itself: worked values, and the dtypes bit by bit. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference.h"

static void test_halves_survive_the_round_trip(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        for (int dtype = KVLEAF_F16; dtype <= KVLEAF_BF16; dtype++) {
            uint16_t in = (uint16_t)bits, out = 0;
            float value = reference_load((kvleaf_dtype)dtype, &in, 0);
            reference_store((kvleaf_dtype)dtype, &out, 0, value);
            if (isnan(value))
                assert_true(isnan(reference_load((kvleaf_dtype)dtype, &out, 0)));
            else
                assert_int_equal(out, in);
        }
    }
}

static void test_rounding_is_to_nearest_even(void **state)
{
    static const struct {
        kvleaf_dtype dtype;
        float value;
        uint16_t bits;
    } cases[] = {
        {KVLEAF_F16, 1.0f, 0x3c00},           {KVLEAF_F16, -2.0f, 0xc000},         {KVLEAF_F16, 65504.0f, 0x7bff},
        {KVLEAF_F16, 65519.0f, 0x7bff},       {KVLEAF_F16, 65520.0f, 0x7c00},      {KVLEAF_F16, 1.00048828125f, 0x3c00},
        {KVLEAF_F16, 1.00146484375f, 0x3c02}, {KVLEAF_F16, 5.9604645e-8f, 0x0001}, {KVLEAF_F16, 2.9802322e-8f, 0x0000},
        {KVLEAF_F16, 2.98023259e-8f, 0x0001}, {KVLEAF_F16, 6.1035156e-5f, 0x0400}, {KVLEAF_F16, 6.1005353e-5f, 0x0400},
        {KVLEAF_F16, -0.0f, 0x8000},          {KVLEAF_F16, 1e-30f, 0x0000},        {KVLEAF_BF16, 1.0f, 0x3f80},
        {KVLEAF_BF16, 1.00390625f, 0x3f80},   {KVLEAF_BF16, 1.01171875f, 0x3f82},  {KVLEAF_BF16, 3.4e38f, 0x7f80},
        {KVLEAF_BF16, -INFINITY, 0xff80},     {KVLEAF_BF16, 1e-40f, 0x0001},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint16_t bits = 0xdead;
        reference_store(cases[i].dtype, &bits, 0, cases[i].value);
        if (bits != cases[i].bits)
            fail_msg("%s of %.9g is %04x, expected %04x", kvleaf_dtype_name(cases[i].dtype), (double)cases[i].value,
                     bits, cases[i].bits);
    }
}

/* Two heads share one KV head of dim 2; keys (1,0), (0,1), (1,1); values (1,2), (3,4), (5,6). */
static const float keys[] = {1, 0, 0, 1, 1, 1}, values[] = {1, 2, 3, 4, 5, 6};

static reference_kv small_kv(void)
{
    return (reference_kv){.k = keys,
                          .v = values,
                          .dtype = KVLEAF_F32,
                          .layout = KVLEAF_LAYOUT_STRIDED,
                          .head_dim = 2,
                          .k_token_stride = 2,
                          .k_head_stride = 2,
                          .v_token_stride = 2,
                          .v_head_stride = 2};
}

static void assert_near(double actual, double expected)
{
    if (!(fabs(actual - expected) <= 1e-12 * fmax(1, fabs(expected))))
        fail_msg("%.17g, expected %.17g", actual, expected);
}

static void test_worked_rows(void **state)
{
    reference_kv kv = small_kv();
    reference_seq seq = {.q_len = 2, .kv_len = 3, .causal = true};
    const double ln2 = 0.69314718055994530942;
    /* Row 0 sees two keys. Head 0's scores are 0 and ln 2 (weights 1/3, 2/3), head 1's are 0 and 0. Row 1 sees three.
     */
    const double q[] = {0, 0.69314718055994530942, 0, 0, 0, 0, 1.3862943611198906188, 0};
    double out[8], lse[4];
    (void)state;
    assert_true(reference_attend(&kv, &seq, 2, 1, 1, q, out, lse));
    assert_near(out[0], 1.0 / 3 + 3 * 2.0 / 3);
    assert_near(out[1], 2.0 / 3 + 4 * 2.0 / 3);
    assert_near(lse[0], log(3));
    assert_near(out[2], 2);
    assert_near(lse[1], ln2);
    assert_near(out[4], 3);
    assert_near(lse[2], log(3));
    /* Scores 2 ln 2, 0, 2 ln 2: weights 4, 1, 4 of 9. */
    assert_near(out[6], (4 * 1 + 3 + 4 * 5) / 9.0);
    assert_near(lse[3], log(9));
}

/* Scores 0 and 2, under a cap of 2 tanh(1) of it. */
static void test_a_softcap_bends_scores(void **state)
{
    const float k[] = {0, 0, 2, 0}, v[] = {1, 2, 3, 4};
    const double q[] = {1, 0}, bent = 2 * 0.76159415595576488812;
    reference_kv kv = small_kv();
    reference_seq seq = {.q_len = 1, .kv_len = 2, .softcap = 2};
    double out[2], lse;
    (void)state;
    kv.k = k;
    kv.v = v;
    lse = reference_row(&kv, &seq, 0, 2, 1, q, out);
    assert_near(lse, log(1 + exp(bent)));
    assert_near(out[0], (1 + 3 * exp(bent)) / (1 + exp(bent)));
}

static void test_the_mask_is_bottom_right_aligned(void **state)
{
    const struct {
        int64_t q_len, kv_len, row, visible;
        bool causal;
    } cases[] = {{8, 5, 0, 0, true}, {8, 5, 2, 0, true}, {8, 5, 3, 1, true},  {8, 5, 7, 5, true},
                 {1, 9, 0, 9, true}, {3, 9, 0, 7, true}, {3, 9, 0, 9, false}, {2, 0, 1, 0, false}};
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        reference_seq seq = {.q_len = cases[i].q_len, .kv_len = cases[i].kv_len, .causal = cases[i].causal};
        assert_int_equal(reference_visible(&seq, cases[i].row), cases[i].visible);
    }
}

static void test_a_row_that_sees_nothing_is_empty(void **state)
{
    reference_kv kv = small_kv();
    reference_seq seq = {.q_len = 1, .kv_len = 0, .causal = true};
    const double q[] = {1, 1};
    double out[] = {7, 7};
    (void)state;
    assert_true(reference_row(&kv, &seq, 0, 0, 1, q, out) == -INFINITY);
    assert_true(out[0] == 0 && out[1] == 0);
}

static void test_merge_is_attention_over_the_union(void **state)
{
    reference_kv kv = small_kv();
    reference_seq first = {.q_len = 1, .kv_len = 2}, rest = {.first = 2, .q_len = 1, .kv_len = 1}, all = {.kv_len = 3};
    const double q[] = {0.5, -2};
    double outs[6] = {0, 0, 0, 0, 0, 0}, lses[3], whole[2], merged[2];
    (void)state;
    lses[0] = reference_row(&kv, &first, 0, 2, 1, q, outs);
    lses[1] = -INFINITY;
    lses[2] = reference_row(&kv, &rest, 0, 1, 1, q, outs + 4);
    double expected = reference_row(&kv, &all, 0, 3, 1, q, whole);
    assert_near(reference_merge(3, 2, outs, 2, lses, merged), expected);
    assert_near(merged[0], whole[0]);
    assert_near(merged[1], whole[1]);
    assert_true(reference_merge(1, 2, outs + 2, 2, lses + 1, merged) == -INFINITY);
    assert_true(merged[0] == 0 && merged[1] == 0);
}

/* Four keys of one head in blocks of two, in blocks 3 and 1, against the same contiguous. */
static void test_blocks_are_found_through_the_table(void **state)
{
    float paged_k[16], paged_v[16], flat_k[8], flat_v[8];
    const int32_t table[] = {3, 1};
    const double q[] = {0.3, -0.7};
    double a[2], b[2];
    reference_kv paged = small_kv(), flat = small_kv();
    (void)state;
    for (int i = 0; i < 16; i++)
        paged_k[i] = paged_v[i] = NAN;
    for (int t = 0; t < 4; t++)
        for (int d = 0; d < 2; d++) {
            flat_k[t * 2 + d] = paged_k[table[t / 2] * 4 + t % 2 * 2 + d] = (float)(t * 3 % 4 + d);
            flat_v[t * 2 + d] = paged_v[table[t / 2] * 4 + t % 2 * 2 + d] = (float)(t + 10 * d);
        }
    paged.k = paged_k;
    paged.v = paged_v;
    paged.block_size = 2;
    paged.block_stride = 4;
    flat.k = flat_k;
    flat.v = flat_v;
    reference_seq in_blocks = {.table = table, .q_len = 1, .kv_len = 4}, in_row = {.q_len = 1, .kv_len = 4};
    assert_near(reference_row(&paged, &in_blocks, 0, 4, 1, q, a), reference_row(&flat, &in_row, 0, 4, 1, q, b));
    assert_near(a[0], b[0]);
    assert_near(a[1], b[1]);
}

static void test_errors_are_what_they_say(void **state)
{
    const double expected[] = {3, 4}, nothing[] = {0, 0};
    const float near_it[] = {3, 4.05f}, with_nan[] = {3, NAN}, zero[] = {0, 0}, small[] = {0, 1e-30f};
    (void)state;
    assert_true(fabs(reference_row_error(expected, near_it, 2) - 0.01) < 1e-6);
    assert_true(isinf(reference_row_error(expected, with_nan, 2)));
    assert_true(reference_row_error(nothing, zero, 2) == 0);
    assert_true(isinf(reference_row_error(nothing, small, 2)));
    assert_true(reference_lse_error(-INFINITY, -INFINITY, 0, 0, 0) == 0);
    assert_true(isinf(reference_lse_error(-INFINITY, -1e30f, 0, 0, 0)));
    assert_true(isinf(reference_lse_error(1, -INFINITY, 0, 0, 0)));
    assert_true(isinf(reference_lse_error(1, NAN, 0, 0, 0)));
    assert_true(fabs(reference_lse_error(1, 1.0005f, KVLEAF_F16, KVLEAF_F32, KVLEAF_F32) - 0.5) < 1e-3);
    assert_true(reference_lse_error(1, 1.0005f, KVLEAF_F32, KVLEAF_F32, KVLEAF_F32) > 40);
    assert_true(reference_tolerance(KVLEAF_F32, KVLEAF_F32, KVLEAF_F32) == 1e-5);
    assert_true(reference_tolerance(KVLEAF_F32, KVLEAF_F16, KVLEAF_F32) == 1e-3);
    assert_true(reference_tolerance(KVLEAF_F32, KVLEAF_F16, KVLEAF_BF16) == 8e-3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_halves_survive_the_round_trip),
        cmocka_unit_test(test_rounding_is_to_nearest_even),
        cmocka_unit_test(test_worked_rows),
        cmocka_unit_test(test_a_softcap_bends_scores),
        cmocka_unit_test(test_the_mask_is_bottom_right_aligned),
        cmocka_unit_test(test_a_row_that_sees_nothing_is_empty),
        cmocka_unit_test(test_merge_is_attention_over_the_union),
        cmocka_unit_test(test_blocks_are_found_through_the_table),
        cmocka_unit_test(test_errors_are_what_they_say),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
