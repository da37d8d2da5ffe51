/* SPDX-License-Identifier: Apache-2.0 */
/* Protects 64-bit offsets: blocks that begin at and behind byte and element 2^31 of K and V, read and written. The
 * buffers are large but hardly touched; a driver that will not give them skips the test. */
#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "problem.h"

enum { BLOCK = 16, DIM = 16, BLOCKS = 3, TOKENS = BLOCKS * BLOCK };

static const int64_t block_stride = (int64_t)1
                                    << 30; /* elements of two bytes: block 1 at byte 2^31, 2 at element 2^31 */
static const int32_t table[] = {2, 0, 1};  /* of one sequence */

typedef struct rig {
    kvleaf_device *device;
    cl_command_queue queue;
    cl_mem k, v;
    kvleaf_attention *attention;
    uint16_t near_k[TOKENS * DIM], near_v[TOKENS * DIM]; /* the sequence in order */
} rig;

static cl_mem large_buffer(kvleaf_device *device)
{
    cl_int error;
    size_t bytes = ((size_t)block_stride * (BLOCKS - 1) + BLOCK * DIM) * sizeof(uint16_t);
    kvleaf_caps caps = {.struct_size = sizeof(caps)};
    ASSERT_OK(kvleaf_device_query(device, &caps));
    if (caps.max_alloc_bytes < bytes || caps.global_bytes < 4 * bytes)
        return NULL;
    cl_mem buffer = clCreateBuffer(kvleaf_device_context(device), CL_MEM_READ_WRITE, bytes, NULL, &error);
    return error == CL_SUCCESS ? buffer : NULL;
}

static void put_block(rig *r, cl_mem buffer, int32_t block, const uint16_t *tokens)
{
    size_t at = (size_t)block * (size_t)block_stride * sizeof(uint16_t);
    assert_int_equal(
        clEnqueueWriteBuffer(r->queue, buffer, CL_TRUE, at, BLOCK * DIM * sizeof(uint16_t), tokens, 0, NULL, NULL),
        CL_SUCCESS);
}

static void get_block(rig *r, cl_mem buffer, int32_t block, uint16_t *tokens)
{
    size_t at = (size_t)block * (size_t)block_stride * sizeof(uint16_t);
    assert_int_equal(
        clEnqueueReadBuffer(r->queue, buffer, CL_TRUE, at, BLOCK * DIM * sizeof(uint16_t), tokens, 0, NULL, NULL),
        CL_SUCCESS);
}

static void write_sequence(rig *r)
{
    for (int i = 0; i < TOKENS * DIM; i++) {
        reference_store(KVLEAF_F16, r->near_k, (size_t)i, (float)(i * 7 % 23 - 11) / 8);
        reference_store(KVLEAF_F16, r->near_v, (size_t)i, (float)(i * 5 % 19 + 1) / 4);
    }
    for (int b = 0; b < BLOCKS; b++) {
        put_block(r, r->k, table[b], r->near_k + b * BLOCK * DIM);
        put_block(r, r->v, table[b], r->near_v + b * BLOCK * DIM);
    }
}

static bool open_rig(rig *r, const char *variants)
{
    kvleaf_device_params params = support_params();
    kvleaf_attention_params object = {.struct_size = sizeof(object),
                                      .num_heads = 2,
                                      .num_kv_heads = 1,
                                      .head_dim_k = DIM,
                                      .q_dtype = KVLEAF_F32,
                                      .kv_dtype = KVLEAF_F16,
                                      .out_dtype = KVLEAF_F32,
                                      .block_size = BLOCK,
                                      .max_seqs = 2,
                                      .max_tokens = 16,
                                      .max_context = TOKENS,
                                      .max_decode_keys = 8192};
    memset(r, 0, sizeof(*r));
    params.variants = variants;
    ASSERT_OK(kvleaf_device_open(&params, &r->device));
    r->queue = support_queue(r->device);
    r->k = large_buffer(r->device);
    r->v = r->k ? large_buffer(r->device) : NULL;
    if (!r->v)
        return false;
    ASSERT_OK(kvleaf_attention_create(r->device, &object, &r->attention));
    write_sequence(r);
    return true;
}

static void close_rig(rig *r)
{
    kvleaf_attention_destroy(&r->attention);
    if (r->k)
        clReleaseMemObject(r->k);
    if (r->v)
        clReleaseMemObject(r->v);
    clReleaseCommandQueue(r->queue);
    kvleaf_device_destroy(&r->device);
}

static kvleaf_kv_view view_of(const rig *r)
{
    kvleaf_kv_view view = {.struct_size = sizeof(view), .block_stride = block_stride, .num_blocks = BLOCKS};
    view.k.handle = r->k;
    view.v.handle = r->v;
    view.k.dtype = view.v.dtype = KVLEAF_F16;
    return view;
}

static kvleaf_batch batch_of(const int32_t *cu_q, const int32_t *lens, const kvleaf_family *families)
{
    kvleaf_batch batch = {.struct_size = sizeof(batch), .num_seqs = 1};
    batch.cu_seqlens_q = cu_q;
    batch.seq_lens_k = lens;
    batch.block_table = table;
    batch.block_table_stride = BLOCKS;
    batch.num_blocks = BLOCKS;
    batch.families = families;
    return batch;
}

static void check_attend(rig *r, kvleaf_family family)
{
    enum { ROWS = 3 };
    const int32_t cu_q[] = {0, ROWS}, lens[] = {TOKENS};
    float q[ROWS * 2 * DIM];
    kvleaf_batch batch = batch_of(cu_q, lens, &family);
    kvleaf_kv_view view = view_of(r);
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = r->queue};
    cl_mem q_buffer = support_buffer(r->device, r->queue, sizeof(q), 0);
    cl_mem out_buffer = support_buffer(r->device, r->queue, sizeof(q), 0xff);
    kvleaf_tensor q_tensor = {.handle = q_buffer, .dtype = KVLEAF_F32},
                  out = {.handle = out_buffer, .dtype = KVLEAF_F32};
    for (int i = 0; i < ROWS * 2 * DIM; i++)
        q[i] = (float)(i * 3 % 17 - 8) / 4;
    assert_int_equal(clEnqueueWriteBuffer(r->queue, q_buffer, CL_TRUE, 0, sizeof(q), q, 0, NULL, NULL), CL_SUCCESS);
    ASSERT_OK(kvleaf_attention_plan(r->attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_attend(r->attention, &q_tensor, &view, &out, NULL, &exec));
    float *result = (float *)(void *)support_read(r->queue, out_buffer, sizeof(q));
    reference_kv kv = {.k = r->near_k,
                       .v = r->near_v,
                       .dtype = KVLEAF_F16,
                       .layout = KVLEAF_LAYOUT_STRIDED,
                       .head_dim = DIM,
                       .k_token_stride = DIM,
                       .v_token_stride = DIM};
    reference_seq seq = {.q_len = ROWS, .kv_len = TOKENS, .causal = true};
    for (int row = 0; row < ROWS; row++) {
        for (int head = 0; head < 2; head++) {
            double query[DIM], expected[DIM];
            for (int d = 0; d < DIM; d++)
                query[d] = q[(row * 2 + head) * DIM + d];
            reference_row(&kv, &seq, 0, reference_visible(&seq, row), reference_scale(0, DIM), query, expected);
            assert_true(reference_row_error(expected, result + (row * 2 + head) * DIM, DIM) <= 1e-5);
        }
    }
    free(result);
    clReleaseMemObject(q_buffer);
    clReleaseMemObject(out_buffer);
}

static void check_gather(rig *r)
{
    const int32_t cu_q[] = {0, 1}, lens[] = {TOKENS - 1};
    kvleaf_batch batch = batch_of(cu_q, lens, NULL);
    kvleaf_kv_view view = view_of(r);
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = r->queue};
    cl_mem k = support_buffer(r->device, r->queue, (TOKENS - 1) * DIM * 2, 0xff),
           v = support_buffer(r->device, r->queue, (TOKENS - 1) * DIM * 2, 0xff);
    kvleaf_tensor k_out = {.handle = k, .dtype = KVLEAF_F16}, v_out = {.handle = v, .dtype = KVLEAF_F16};
    ASSERT_OK(kvleaf_attention_plan(r->attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_gather(r->attention, &view, &k_out, &v_out, &exec));
    unsigned char *keys = support_read(r->queue, k, (TOKENS - 1) * DIM * 2),
                  *values = support_read(r->queue, v, (TOKENS - 1) * DIM * 2);
    assert_memory_equal(keys, r->near_k, (TOKENS - 1) * DIM * 2);
    assert_memory_equal(values, r->near_v, (TOKENS - 1) * DIM * 2);
    free(keys);
    free(values);
    clReleaseMemObject(k);
    clReleaseMemObject(v);
}

/* New tokens for the last slot of each block; all else of the blocks stays. */
static void check_append(rig *r)
{
    const int32_t cu_q[] = {0, 3}, lens[] = {TOKENS};
    const int64_t slots[] = {3 * BLOCK - 1, 2 * BLOCK - 1, BLOCK - 1};
    uint16_t fresh[BLOCKS * DIM], now[BLOCK * DIM];
    kvleaf_batch batch = batch_of(cu_q, lens, NULL);
    kvleaf_kv_view view = view_of(r);
    kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = r->queue};
    cl_mem source = support_buffer(r->device, r->queue, sizeof(fresh), 0);
    kvleaf_tensor tensor = {.handle = source, .dtype = KVLEAF_F16};
    for (int i = 0; i < BLOCKS * DIM; i++)
        reference_store(KVLEAF_F16, fresh, (size_t)i, 100 + (float)i);
    assert_int_equal(clEnqueueWriteBuffer(r->queue, source, CL_TRUE, 0, sizeof(fresh), fresh, 0, NULL, NULL),
                     CL_SUCCESS);
    batch.slot_mapping = slots;
    ASSERT_OK(kvleaf_attention_plan(r->attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_append(r->attention, &tensor, &tensor, &view, &exec));
    assert_int_equal(clFinish(r->queue), CL_SUCCESS);
    for (int t = 0; t < BLOCKS; t++) {
        int block = (int)(slots[t] / BLOCK), at = 0;
        while (table[at] != block)
            at++;
        for (int value = 0; value < 2; value++) {
            const uint16_t *before = (value ? r->near_v : r->near_k) + at * BLOCK * DIM;
            get_block(r, value ? r->v : r->k, block, now);
            assert_memory_equal(now, before, (BLOCK - 1) * DIM * sizeof(uint16_t));
            assert_memory_equal(now + (BLOCK - 1) * DIM, fresh + t * DIM, DIM * sizeof(uint16_t));
        }
    }
    write_sequence(r);
    clReleaseMemObject(source);
}

static void check_far(const char *variants)
{
    rig r;
    if (!open_rig(&r, variants)) {
        close_rig(&r);
        print_message("this device gives no buffer of 4 GiB\n");
        skip();
    }
    check_attend(&r, KVLEAF_FAMILY_DECODE);
    check_attend(&r, KVLEAF_FAMILY_PREFILL);
    check_gather(&r);
    check_append(&r);
    close_rig(&r);
}

static void test_portable_kernels(void **state)
{
    (void)state;
    check_far("*.portable.*");
}

static void test_default_kernels(void **state)
{
    (void)state;
    check_far(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_portable_kernels),
        cmocka_unit_test(test_default_kernels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
