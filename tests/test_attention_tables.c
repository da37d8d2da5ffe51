/* SPDX-License-Identifier: Apache-2.0 */
/* Protects block tables and lengths that live on the device: right ones give what host tables give, wrong ids count as
 * masked tokens, and nothing else is read or written. */
#include "support.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

enum { SEQS = 4, BLOCK = 8 };

static const problem_geometry geometry = {.q_dtype = KVLEAF_F32,
                                          .kv_dtype = KVLEAF_F32,
                                          .out_dtype = KVLEAF_F32,
                                          .view = PROBLEM_NHD,
                                          .num_heads = 4,
                                          .num_kv_heads = 2,
                                          .head_dim = 16,
                                          .block_size = BLOCK};
static const problem_seq seqs[SEQS] = {{.id = 1, .q_len = 1, .kv_len = 37, .family = KVLEAF_FAMILY_DECODE},
                                       {.id = 2, .q_len = 5, .kv_len = 29, .family = KVLEAF_FAMILY_PREFILL},
                                       {.id = 3, .q_len = 2, .kv_len = 8, .family = KVLEAF_FAMILY_DECODE},
                                       {.id = 4, .q_len = 3, .kv_len = 3, .family = KVLEAF_FAMILY_PREFILL}};
static const problem_options options = {.seed = 71, .placement = 3};

static kvleaf_device *device;
static cl_command_queue queue;
static kvleaf_attention *attention;
static problem made;

static int set_up(void **state)
{
    (void)state;
    device = support_device();
    queue = support_queue(device);
    kvleaf_attention_params params = problem_attention_params(&geometry, SEQS, 32, 64);
    params.device_tables = 1;
    ASSERT_OK(kvleaf_attention_create(device, &params, &attention));
    assert_true(problem_create(&made, device, queue, &geometry, seqs, SEQS, &options));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
    clReleaseCommandQueue(queue);
    kvleaf_device_destroy(&device);
    return 0;
}

static cl_mem upload(const void *data, size_t size)
{
    cl_mem buffer = support_buffer(device, queue, size, 0xff);
    assert_int_equal(clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, size, data, 0, NULL, NULL), CL_SUCCESS);
    return buffer;
}

/* The problem's batch with its table on the device, `first` entries in, and its lengths there too if wanted. */
static kvleaf_batch device_batch(cl_mem table, int32_t first, cl_mem lens)
{
    kvleaf_batch batch = problem_batch(&made);
    batch.block_table = NULL;
    batch.device_block_table = table;
    batch.device_block_table_offset = (uint64_t)first * sizeof(int32_t);
    batch.device_seq_lens_k = lens;
    return batch;
}

static void attend(const kvleaf_batch *batch)
{
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_kv_view view = problem_kv_view(&made);
    kvleaf_tensor q = problem_tensor(&made.q), out = problem_tensor(&made.out), lse = problem_tensor(&made.lse);
    assert_true(problem_upload_outputs(&made));
    ASSERT_OK(kvleaf_attention_plan(attention, batch, &exec));
    ASSERT_OK(kvleaf_attention_attend(attention, &q, &view, &out, &lse, &exec));
    assert_int_equal(clFinish(queue), CL_SUCCESS);
    if (!problem_collect(&made))
        fail_msg("%s", made.fault);
}

/* Behind three entries of something else, with bounds that are the lengths themselves. */
static void test_a_right_table(void **state)
{
    size_t entries = (size_t)SEQS * (size_t)made.columns;
    int32_t *shifted = malloc((entries + 3) * sizeof(*shifted));
    problem_report report;
    (void)state;
    assert_non_null(shifted);
    shifted[0] = shifted[1] = shifted[2] = INT_MAX;
    memcpy(shifted + 3, made.table, entries * sizeof(*shifted));
    cl_mem table = upload(shifted, (entries + 3) * sizeof(*shifted));
    kvleaf_batch batch = device_batch(table, 3, NULL);
    attend(&batch);
    if (!problem_verify(&made, &report))
        fail_msg("%s", report.text);
    clReleaseMemObject(table);
    free(shifted);
}

/* The host knows only upper bounds; the lengths that count are on the device. */
static void test_lengths_on_the_device(void **state)
{
    static const int32_t bounds[SEQS] = {40, 40, 16, 40};
    size_t entries = (size_t)SEQS * (size_t)made.columns;
    problem_report report;
    (void)state;
    cl_mem table = upload(made.table, entries * sizeof(int32_t));
    cl_mem lens = upload(made.lens, sizeof(int32_t) * SEQS);
    kvleaf_batch batch = device_batch(table, 0, lens);
    batch.seq_lens_k = bounds;
    attend(&batch);
    if (!problem_verify(&made, &report))
        fail_msg("%s", report.text);
    clReleaseMemObject(table);
    clReleaseMemObject(lens);
}

/* Attention of one row over the tokens of the sequence's blocks that are not `bad`, in float64. */
static double without_block(int32_t index, int32_t row, int32_t head, int32_t bad, double *out)
{
    float k[64 * 16], v[64 * 16];
    reference_seq seq = problem_reference_seq(&made, index);
    reference_kv flat = {.k = k,
                         .v = v,
                         .dtype = KVLEAF_F32,
                         .layout = KVLEAF_LAYOUT_STRIDED,
                         .head_dim = 16,
                         .k_token_stride = 16,
                         .v_token_stride = 16};
    reference_seq all = {.q_len = 1};
    double q[16];
    int64_t kept = 0;
    for (int64_t t = 0; t < reference_visible(&seq, row); t++) {
        if (t / BLOCK == bad)
            continue;
        for (int32_t d = 0; d < 16; d++) {
            k[kept * 16 + d] =
                reference_load(KVLEAF_F32, made.k.host, reference_seq_index(&made.kv, &seq, false, t, head / 2, d));
            v[kept * 16 + d] =
                reference_load(KVLEAF_F32, made.v.host, reference_seq_index(&made.kv, &seq, true, t, head / 2, d));
        }
        kept++;
    }
    for (int32_t d = 0; d < 16; d++)
        q[d] = reference_load(KVLEAF_F32, made.q.host, problem_array_at(&made.q, made.cu_q[index] + row, head, d));
    all.kv_len = kept;
    return reference_row(&flat, &all, 0, kept, reference_scale(0, 16), q, out);
}

static void test_a_wrong_id_masks_its_tokens(void **state)
{
    static const int32_t wrong[] = {-1, INT_MIN, INT_MAX, 1 << 20};
    size_t entries = (size_t)SEQS * (size_t)made.columns;
    int32_t *ids = malloc(entries * sizeof(*ids));
    (void)state;
    assert_non_null(ids);
    for (int w = 0; w < 5; w++) {
        for (int32_t bad = 0; bad < 3; bad++) {
            memcpy(ids, made.table, entries * sizeof(*ids));
            for (int32_t i = 0; i < SEQS; i++)
                ids[i * made.columns + bad] = w < 4 ? wrong[w] : made.num_blocks;
            cl_mem table = upload(ids, entries * sizeof(*ids));
            kvleaf_batch batch = device_batch(table, 0, NULL);
            attend(&batch);
            for (int32_t i = 0; i < SEQS; i++) {
                for (int32_t row = 0; row < seqs[i].q_len; row++) {
                    for (int32_t head = 0; head < 4; head++) {
                        double expected[16];
                        float actual[16];
                        double lse = without_block(i, row, head, bad, expected);
                        for (int32_t d = 0; d < 16; d++)
                            actual[d] = problem_out(&made, made.cu_q[i] + row, head, d);
                        if (!(reference_row_error(expected, actual, 16) <= 1e-5) ||
                            !(reference_lse_error(lse, problem_lse(&made, made.cu_q[i] + row, head), KVLEAF_F32,
                                                  KVLEAF_F32, KVLEAF_F32) <= 1))
                            fail_msg(
                                "id %d in block %d: sequence %d, row %d, head %d: %g and LSE %g, expected %g and %g",
                                w < 4 ? wrong[w] : made.num_blocks, bad, i, row, head, (double)actual[0],
                                (double)problem_lse(&made, made.cu_q[i] + row, head), expected[0], lse);
                    }
                }
            }
            clReleaseMemObject(table);
        }
    }
    free(ids);
}

static void test_plan_refuses(void **state)
{
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_batch batch = problem_batch(&made);
    int32_t short_table[4] = {0, 0, 0, 0};
    (void)state;
    ASSERT_FAILS(KVLEAF_INVALID, "device_block_table", kvleaf_attention_plan(attention, &batch, &exec));
    cl_mem table = upload(short_table, sizeof(short_table));
    batch = device_batch(table, 0, NULL);
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "device_block_table", kvleaf_attention_plan(attention, &batch, &exec));
    batch.device_block_table_offset = 2;
    ASSERT_FAILS(KVLEAF_INVALID, "device_block_table_offset", kvleaf_attention_plan(attention, &batch, &exec));
    clReleaseMemObject(table);
    table = upload(made.table, (size_t)SEQS * (size_t)made.columns * sizeof(int32_t));
    batch = device_batch(table, 0, table);
    batch.device_seq_lens_k_offset = (uint64_t)SEQS * (uint64_t)made.columns * sizeof(int32_t);
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "device_seq_lens_k", kvleaf_attention_plan(attention, &batch, &exec));
    clReleaseMemObject(table);
}

/* Gather and append by slots work from device tables too. */
static void test_slots_beside_a_device_table(void **state)
{
    int64_t slots[32];
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_kv_view view = problem_kv_view(&made);
    cl_mem table = upload(made.table, (size_t)SEQS * (size_t)made.columns * sizeof(int32_t));
    kvleaf_batch batch = device_batch(table, 0, NULL);
    kvleaf_tensor k = problem_tensor(&made.q);
    (void)state;
    k.token_stride = 64; /* any 11 tokens of two heads */
    for (int32_t i = 0; i < made.total_q; i++)
        slots[i] = -1;
    batch.slot_mapping = slots;
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_append(attention, &k, &k, &view, &exec));
    assert_int_equal(clFinish(queue), CL_SUCCESS);
    unsigned char *now = support_read(queue, made.k.buffer, made.k.bytes);
    assert_memory_equal(now, made.k.host, made.k.bytes);
    free(now);
    batch.slot_mapping = NULL; /* in place needs the table on the host */
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "slot_mapping", kvleaf_attention_append(attention, &k, &k, &view, &exec));
    clReleaseMemObject(table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_right_table),
        cmocka_unit_test(test_lengths_on_the_device),
        cmocka_unit_test(test_a_wrong_id_masks_its_tokens),
        cmocka_unit_test(test_plan_refuses),
        cmocka_unit_test(test_slots_beside_a_device_table),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
