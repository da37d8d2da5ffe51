/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the worked figures of the four documents the project started from, by their numbers, on the device through
 * the public calls: 000 and 004 (the varlen and the decode path), 001 (one scalar head in any blocks), 002 (scattered
 * blocks, samples that share a prompt). tests/test_seed_blocks.c has what the block manager says to them. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvleaf/kvleaf.h>

#include "reference.h"
#include "support.h"

#define SEED        20260u
#define GUARD       64 /* floats behind every output that nothing may write */
#define GUARD_VALUE 12345.5f

static kvleaf_device *device;
static cl_command_queue queue;
static uint64_t first_seed;

static float *random_floats(size_t count, uint64_t seed)
{
    support_rng random = {seed};
    float *data = malloc((count ? count : 1) * sizeof *data);

    assert_non_null(data);
    for (size_t i = 0; i < count; i++) {
        data[i] = support_float(&random);
    }
    return data;
}

static int open_device(void **state)
{
    (void)state;
    first_seed = support_seed(SEED);
    device = support_device();
    queue = support_queue(device);
    return 0;
}

static int close_device(void **state)
{
    (void)state;
    clReleaseCommandQueue(queue);
    kvleaf_device_destroy(&device);
    return 0;
}

static cl_mem upload(const void *data, size_t bytes)
{
    cl_int error;
    cl_mem memory = clCreateBuffer(kvleaf_device_context(device), CL_MEM_COPY_HOST_PTR, bytes, (void *)data, &error);

    assert_int_equal(error, CL_SUCCESS);
    return memory;
}

/* A buffer of `count` floats and a guard behind them, all of the guard's value. */
static cl_mem output(size_t count)
{
    float *data = malloc((count + GUARD) * sizeof *data);
    cl_mem memory;

    assert_non_null(data);
    for (size_t i = 0; i < count + GUARD; i++) {
        data[i] = GUARD_VALUE;
    }
    memory = upload(data, (count + GUARD) * sizeof *data);
    free(data);
    return memory;
}

static void read_bytes(cl_mem memory, void *data, size_t bytes)
{
    assert_int_equal(clEnqueueReadBuffer(queue, memory, CL_TRUE, 0, bytes, data, 0, NULL, NULL), CL_SUCCESS);
}

/* Reads what `output` made and releases it; the guard must be as it was. */
static float *take_output(cl_mem memory, size_t count)
{
    float *data = malloc((count + GUARD) * sizeof *data);

    assert_non_null(data);
    read_bytes(memory, data, (count + GUARD) * sizeof *data);
    clReleaseMemObject(memory);
    for (size_t i = count; i < count + GUARD; i++) {
        assert_true(data[i] == GUARD_VALUE);
    }
    return data;
}

static kvleaf_exec on_queue(void)
{
    return (kvleaf_exec){.struct_size = sizeof(kvleaf_exec), .queue = queue};
}

static kvleaf_tensor floats(cl_mem memory)
{
    return (kvleaf_tensor){.handle = memory, .dtype = KVLEAF_F32};
}

/* Every row of a batch against float64, and the row's sequence by `values`: out, lse as the library gave them. */
static void assert_rows(const reference_kv *kv, const reference_seq *seq, int32_t heads, int32_t kv_heads,
                        const float *q, const float *out, const float *lse)
{
    size_t rows = (size_t)seq->q_len * (size_t)heads, dim = (size_t)kv->head_dim;
    double *inputs = malloc(rows * dim * sizeof *inputs), *expected = malloc(rows * dim * sizeof *expected);
    double *expected_lse = malloc(rows * sizeof *expected_lse);

    assert_true(inputs && expected && expected_lse);
    for (size_t i = 0; i < rows * dim; i++) {
        inputs[i] = q[i];
    }
    assert_true(
        reference_attend(kv, seq, heads, kv_heads, reference_scale(0, kv->head_dim), inputs, expected, expected_lse));
    for (size_t row = 0; row < rows; row++) {
        double error = reference_row_error(expected + row * dim, out + row * dim, (int32_t)dim);

        assert_true(error <= reference_tolerance(KVLEAF_F32, kv->dtype, KVLEAF_F32));
        assert_true(!lse || reference_lse_error(expected_lse[row], lse[row], KVLEAF_F32, kv->dtype, KVLEAF_F32) <= 1);
    }
    free(inputs);
    free(expected);
    free(expected_lse);
}

static void assert_empty_rows(const float *out, const float *lse, int32_t rows, int32_t heads, int32_t dim)
{
    for (int32_t i = 0; i < rows * heads; i++) {
        for (int32_t d = 0; d < dim; d++) {
            assert_true(out[i * dim + d] == 0.0f);
        }
        assert_true(isinf(lse[i]) && lse[i] < 0);
    }
}

static void varlen(kvleaf_mask mask)
{
    enum { HEADS = 4, KV_HEADS = 2, DIM = 16, TOTAL_Q = 14, TOTAL_K = 8 };
    const int32_t cu_q[] = {0, 10, 13, 14}, cu_k[] = {0, 0, 1, 8};
    const kvleaf_mask masks[] = {mask, mask, mask};
    const kvleaf_family families[] = {KVLEAF_FAMILY_PREFILL, KVLEAF_FAMILY_PREFILL, KVLEAF_FAMILY_AUTO};
    float *q = random_floats(TOTAL_Q * HEADS * DIM, first_seed),
          *k = random_floats(TOTAL_K * KV_HEADS * DIM, first_seed + 1);
    float *v = random_floats(TOTAL_K * KV_HEADS * DIM, first_seed + 2), *out, *lse;
    cl_mem q_mem = upload(q, TOTAL_Q * HEADS * DIM * sizeof *q), out_mem = output(TOTAL_Q * HEADS * DIM);
    cl_mem k_mem = upload(k, TOTAL_K * KV_HEADS * DIM * sizeof *k),
           v_mem = upload(v, TOTAL_K * KV_HEADS * DIM * sizeof *v);
    cl_mem lse_mem = output(TOTAL_Q * HEADS);
    kvleaf_tensor q_tensor = floats(q_mem), out_tensor = floats(out_mem), lse_tensor = floats(lse_mem);
    kvleaf_kv_view view = {.struct_size = sizeof view, .k = floats(k_mem), .v = floats(v_mem)};
    kvleaf_batch batch = {.struct_size = sizeof batch,
                          .num_seqs = 3,
                          .cu_seqlens_q = cu_q,
                          .cu_seqlens_k = cu_k,
                          .masks = masks,
                          .families = families};
    reference_kv kv = {.k = k,
                       .v = v,
                       .dtype = KVLEAF_F32,
                       .layout = KVLEAF_LAYOUT_STRIDED,
                       .head_dim = DIM,
                       .k_token_stride = KV_HEADS * DIM,
                       .k_head_stride = DIM,
                       .v_token_stride = KV_HEADS * DIM,
                       .v_head_stride = DIM};
    kvleaf_attention *attention = NULL;
    kvleaf_exec exec = on_queue();

    ASSERT_OK(kvleaf_attention_create(device,
                                      kvleaf_attention_params(.num_heads = HEADS, .num_kv_heads = KV_HEADS,
                                                              .head_dim_k = DIM, .q_dtype = KVLEAF_F32,
                                                              .kv_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32),
                                      &attention));
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_attend(attention, &q_tensor, &view, &out_tensor, &lse_tensor, &exec));
    out = take_output(out_mem, TOTAL_Q * HEADS * DIM);
    lse = take_output(lse_mem, TOTAL_Q * HEADS);

    assert_empty_rows(out, lse, 10, HEADS, DIM);
    for (int i = 1; i < 3; i++) {
        reference_seq seq = {.first = cu_k[i],
                             .q_len = cu_q[i + 1] - cu_q[i],
                             .kv_len = cu_k[i + 1] - cu_k[i],
                             .causal = mask == KVLEAF_MASK_CAUSAL};

        assert_rows(&kv, &seq, HEADS, KV_HEADS, q + cu_q[i] * HEADS * DIM, out + cu_q[i] * HEADS * DIM,
                    lse + cu_q[i] * HEADS);
    }
    if (mask == KVLEAF_MASK_CAUSAL) { /* r1 has three rows and one key, which only its last row sees */
        assert_empty_rows(out + 10 * HEADS * DIM, lse + 10 * HEADS, 2, HEADS, DIM);
    }
    kvleaf_attention_destroy(&attention);
    clReleaseMemObject(q_mem);
    clReleaseMemObject(k_mem);
    clReleaseMemObject(v_mem);
    free(q), free(k), free(v), free(out), free(lse);
}

static void doc_000_004_varlen_contiguous(void **state)
{
    (void)state;
    varlen(KVLEAF_MASK_NONE);
    varlen(KVLEAF_MASK_CAUSAL);
}

/* Figure 2 over the application's own buffers: blocks of 32 tokens, [block][token][head][dim]. */
enum { D_HEADS = 4, D_KV_HEADS = 2, D_DIM = 16, D_BLOCK = 32, D_BLOCKS = 8, D_TOKEN = D_KV_HEADS * D_DIM };
static const int32_t decode_cached[] = {30, 32, 70};
static const int32_t decode_table[3][4] = {{2, -1, -1, -1}, {0, 1, -1, -1}, {3, 5, 6, -1}};
static const int32_t decode_slots[] = {2 * 32 + 30, 1 * 32 + 0, 6 * 32 + 6};

/* A pool of NaN that holds the cached tokens in their places. */
static float *decode_pool(uint64_t first)
{
    size_t count = (size_t)D_BLOCKS * D_BLOCK * D_TOKEN;
    float *pool = malloc(count * sizeof *pool);
    support_rng seed = {first};

    assert_non_null(pool);
    for (size_t i = 0; i < count; i++) {
        pool[i] = NAN;
    }
    for (int seq = 0; seq < 3; seq++) {
        for (int32_t position = 0; position < decode_cached[seq]; position++) {
            int32_t slot = decode_table[seq][position / D_BLOCK] * D_BLOCK + position % D_BLOCK;

            for (int i = 0; i < D_TOKEN; i++) {
                pool[slot * D_TOKEN + i] = support_float(&seed);
            }
        }
    }
    return pool;
}

/* Puts the new tokens into their slots of the host's copy and compares every byte with the device's. */
static void assert_only_slots_changed(float *expected, const float *fresh, cl_mem memory)
{
    size_t bytes = (size_t)D_BLOCKS * D_BLOCK * D_TOKEN * sizeof *expected;
    float *actual = malloc(bytes);

    assert_non_null(actual);
    for (int seq = 0; seq < 3; seq++) {
        memcpy(expected + decode_slots[seq] * D_TOKEN, fresh + seq * D_TOKEN, D_TOKEN * sizeof *expected);
    }
    read_bytes(memory, actual, bytes);
    assert_memory_equal(actual, expected, bytes);
    free(actual);
}

static void doc_000_004_decode_in_place(void **state)
{
    const int32_t cu_q[] = {0, 1, 2, 3}, lengths[] = {31, 33, 71};
    float *q = random_floats(3 * D_HEADS * D_DIM, first_seed), *out, *lse;
    float *k_new = random_floats(3 * D_TOKEN, first_seed + 1), *v_new = random_floats(3 * D_TOKEN, first_seed + 2);
    float *k = decode_pool(first_seed + 3), *v = decode_pool(first_seed + 4);
    size_t pool_bytes = (size_t)D_BLOCKS * D_BLOCK * D_TOKEN * sizeof *k;
    cl_mem mems[] = {upload(q, 3 * D_HEADS * D_DIM * sizeof *q), upload(k_new, 3 * D_TOKEN * sizeof *k_new),
                     upload(v_new, 3 * D_TOKEN * sizeof *v_new), upload(k, pool_bytes), upload(v, pool_bytes)};
    cl_mem out_mem = output(3 * D_HEADS * D_DIM), lse_mem = output(3 * D_HEADS);
    kvleaf_tensor tensors[] = {floats(mems[0]), floats(mems[1]), floats(mems[2]), floats(out_mem), floats(lse_mem)};
    kvleaf_kv_view view = {.struct_size = sizeof view,
                           .k = floats(mems[3]),
                           .v = floats(mems[4]),
                           .block_stride = D_BLOCK * D_TOKEN,
                           .num_blocks = D_BLOCKS};
    kvleaf_batch batch = {.struct_size = sizeof batch,
                          .num_seqs = 3,
                          .cu_seqlens_q = cu_q,
                          .seq_lens_k = lengths,
                          .block_table = decode_table[0],
                          .block_table_stride = 4,
                          .num_blocks = D_BLOCKS};
    reference_kv kv = {.k = k,
                       .v = v,
                       .dtype = KVLEAF_F32,
                       .layout = KVLEAF_LAYOUT_STRIDED,
                       .block_size = D_BLOCK,
                       .head_dim = D_DIM,
                       .k_token_stride = D_TOKEN,
                       .k_head_stride = D_DIM,
                       .v_token_stride = D_TOKEN,
                       .v_head_stride = D_DIM,
                       .block_stride = D_BLOCK * D_TOKEN};
    kvleaf_attention *attention = NULL;
    kvleaf_exec exec = on_queue();

    (void)state;
    view.k.token_stride = view.v.token_stride = D_TOKEN;
    view.k.head_stride = view.v.head_stride = D_DIM;
    ASSERT_OK(kvleaf_attention_create(device,
                                      kvleaf_attention_params(.num_heads = D_HEADS, .num_kv_heads = D_KV_HEADS,
                                                              .head_dim_k = D_DIM, .q_dtype = KVLEAF_F32,
                                                              .kv_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32,
                                                              .block_size = D_BLOCK),
                                      &attention));
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_append(attention, &tensors[1], &tensors[2], &view, &exec));
    ASSERT_OK(kvleaf_attention_attend(attention, &tensors[0], &view, &tensors[3], &tensors[4], &exec));
    assert_only_slots_changed(k, k_new, mems[3]);
    assert_only_slots_changed(v, v_new, mems[4]);
    out = take_output(out_mem, 3 * D_HEADS * D_DIM);
    lse = take_output(lse_mem, 3 * D_HEADS);
    for (int i = 0; i < 3; i++) {
        reference_seq seq = {.table = decode_table[i], .q_len = 1, .kv_len = lengths[i], .causal = true};

        assert_rows(&kv, &seq, D_HEADS, D_KV_HEADS, q + i * D_HEADS * D_DIM, out + i * D_HEADS * D_DIM,
                    lse + i * D_HEADS);
    }
    kvleaf_attention_destroy(&attention);
    for (size_t i = 0; i < sizeof mems / sizeof mems[0]; i++) {
        clReleaseMemObject(mems[i]);
    }
    free(q), free(k_new), free(v_new), free(k), free(v), free(out), free(lse);
}

/* ---------------------------------------------------------------------------------------- the managed cache */

typedef struct managed {
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    int32_t num_blocks, block_size, heads, kv_heads, dim;
    kvleaf_layout layout;
} managed;

static void managed_open(managed *m, const int32_t *order, int32_t count)
{
    kvleaf_layer layer = {.num_heads = m->heads, .num_kv_heads = m->kv_heads, .head_dim_k = m->dim};
    kvleaf_pool_params params = {.struct_size = sizeof params,
                                 .num_blocks = m->num_blocks,
                                 .block_size = m->block_size,
                                 .num_kv_heads = m->kv_heads,
                                 .head_dim_k = m->dim,
                                 .dtype = KVLEAF_F32,
                                 .layout = m->layout};

    ASSERT_OK(kvleaf_pool_create(device, &params, &m->pool));
    ASSERT_OK(kvleaf_cache_create(device,
                                  kvleaf_cache_params(.layers = &layer, .num_layers = 1, .pools = &m->pool,
                                                      .num_pools = 1, .q_dtype = KVLEAF_F32, .out_dtype = KVLEAF_F32,
                                                      .free_order = order, .free_count = count),
                                  &m->cache));
    ASSERT_OK(kvleaf_plan_create(m->cache, kvleaf_plan_params(.max_tokens = 256), &m->plan));
}

static void managed_close(managed *m)
{
    kvleaf_plan_destroy(&m->plan);
    kvleaf_cache_destroy(&m->cache);
    kvleaf_pool_destroy(&m->pool);
}

static kvleaf_seq managed_seq(managed *m)
{
    kvleaf_seq seq = 0;

    ASSERT_OK(kvleaf_seq_create(m->cache, NULL, &seq));
    return seq;
}

/* Extends the sequence by `count` tokens, stores their k and v and attends with their q: out [count, heads, dim]. With
 * `gathered`, a pair of buffers, the step gathers the sequence's K and V into them too. */
static float *managed_step(managed *m, kvleaf_seq seq, int32_t count, const float *q, const float *k, const float *v,
                           const cl_mem *gathered)
{
    size_t q_count = (size_t)count * (size_t)m->heads * (size_t)m->dim;
    size_t kv_count = (size_t)count * (size_t)m->kv_heads * (size_t)m->dim;
    cl_mem mems[] = {upload(q, q_count * sizeof *q), upload(k, kv_count * sizeof *k), upload(v, kv_count * sizeof *v)};
    cl_mem out_mem = output(q_count);
    kvleaf_tensor tensors[] = {floats(mems[0]), floats(mems[1]), floats(mems[2]), floats(out_mem)};
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = count};
    kvleaf_batch_entry entry = {.seq = seq, .num_q = count};
    kvleaf_exec exec = on_queue();

    ASSERT_OK(kvleaf_seq_extend(m->cache, seq, &tokens, NULL));
    ASSERT_OK(kvleaf_plan_build(m->plan, m->cache, &entry, 1, &exec));
    ASSERT_OK(kvleaf_append(m->plan, 0, &tensors[1], &tensors[2], &exec));
    ASSERT_OK(kvleaf_attend(m->plan, 0, &tensors[0], &tensors[3], NULL, &exec));
    if (gathered) {
        kvleaf_tensor k_tensor = floats(gathered[0]), v_tensor = floats(gathered[1]);

        ASSERT_OK(kvleaf_gather(m->plan, 0, &k_tensor, &v_tensor, &exec));
    }
    ASSERT_OK(kvleaf_plan_commit(m->plan, NULL));
    for (int i = 0; i < 3; i++) {
        clReleaseMemObject(mems[i]);
    }
    return take_output(out_mem, q_count);
}

/* The first `count` tokens of a sequence as they lie in the pool, by its table and the layout: [count, kv_heads, dim].
 */
static float *managed_read(const managed *m, kvleaf_seq seq, int32_t count, bool value)
{
    kvleaf_pool_params params = {.struct_size = sizeof params};
    kvleaf_pool_bytes size = {.struct_size = sizeof size};
    int32_t table[16], in_use = 0;
    float *pool, *out = malloc((size_t)count * (size_t)m->kv_heads * (size_t)m->dim * sizeof *out), *next = out;
    cl_mem memory;
    size_t tile;

    ASSERT_OK(kvleaf_pool_query(m->pool, &params));
    ASSERT_OK(kvleaf_pool_size(device, &params, &size));
    ASSERT_OK(kvleaf_pool_memory(m->pool, 0, &memory));
    ASSERT_OK(kvleaf_seq_table(m->cache, seq, 0, table, 16, &in_use));
    pool = malloc(size.layer_bytes);
    assert_true(pool && out && (int64_t)in_use * m->block_size >= count);
    read_bytes(memory, pool, size.layer_bytes);
    tile = kvleaf_layout_tile(params.layout, m->block_size, m->dim);
    for (int32_t position = 0; position < count; position++) {
        for (int32_t head = 0; head < m->kv_heads; head++) {
            size_t side = 2 * (size_t)table[position / m->block_size] + (size_t)value;
            size_t at = (side * (size_t)m->kv_heads + (size_t)head) * tile;

            for (int32_t d = 0; d < m->dim; d++) {
                *next++ = pool[at + kvleaf_layout_offset(params.layout, value, m->block_size, m->dim,
                                                         position % m->block_size, d)];
            }
        }
    }
    free(pool);
    return out;
}

static void assert_stored(const managed *m, kvleaf_seq seq, int32_t count, const float *k, const float *v)
{
    size_t bytes = (size_t)count * (size_t)m->kv_heads * (size_t)m->dim * sizeof *k;
    float *k_stored = managed_read(m, seq, count, false), *v_stored = managed_read(m, seq, count, true);

    assert_memory_equal(k_stored, k, bytes);
    assert_memory_equal(v_stored, v, bytes);
    free(k_stored), free(v_stored);
}

static void assert_managed_table(const managed *m, kvleaf_seq seq, const int32_t *expected, int32_t count)
{
    int32_t table[16], in_use = -1;

    ASSERT_OK(kvleaf_seq_table(m->cache, seq, 0, table, 16, &in_use));
    assert_int_equal(in_use, count);
    assert_memory_equal(table, expected, (size_t)count * sizeof *expected);
}

/* One scalar head, keys 0, query 1, the value of position i is i: after each position the mean of the values. */
static void scalar_head(const int32_t *order, int32_t count, float *means)
{
    const float ones[] = {1, 1, 1, 1, 1}, zeros[5] = {0}, values[] = {1, 2, 3, 4, 5};
    managed m = {.num_blocks = 8, .block_size = 4, .heads = 1, .kv_heads = 1, .dim = 1};
    kvleaf_seq seq;

    managed_open(&m, order, count);
    seq = managed_seq(&m);
    for (int32_t position = 0; position < 5; position++) {
        float *out = managed_step(&m, seq, 1, ones, zeros, values + position, NULL);

        means[position] = out[0];
        free(out);
        assert_managed_table(&m, seq, order, position < 4 ? 1 : 2);
        assert_stored(&m, seq, position + 1, zeros, values); /* the prefix stays where it was */
    }
    managed_close(&m);
}

static void doc_001_scalar_head_in_any_blocks(void **state)
{
    static const int32_t orders[][2] = {{4, 1}, {0, 1}, {7, 0}, {2, 6}};
    float first[5];

    (void)state;
    scalar_head(orders[0], 2, first);
    for (int position = 1; position <= 5; position++) {
        assert_true(fabsf(first[position - 1] - (float)(position + 1) / 2) <= 1e-5f * (float)position);
    }
    for (size_t i = 1; i < sizeof orders / sizeof orders[0]; i++) {
        float moved[5];

        scalar_head(orders[i], 2, moved);
        assert_memory_equal(moved, first, sizeof first);
    }
}

static void doc_002_gather_through_scattered_blocks(void **state)
{
    enum { TOKENS = 40, HEADS = 4, KV_HEADS = 2, DIM = 64, TOKEN = KV_HEADS * DIM };
    const int32_t order[] = {41, 7, 19, 2, 33};
    managed m = {.num_blocks = 64, .block_size = 16, .heads = HEADS, .kv_heads = KV_HEADS, .dim = DIM};
    float *q = random_floats(TOKENS * HEADS * DIM, first_seed), *k = random_floats(TOKENS * TOKEN, first_seed + 1);
    float *v = random_floats(TOKENS * TOKEN, first_seed + 2), *k_back, *v_back, *out;
    reference_kv kv = {.k = k,
                       .v = v,
                       .dtype = KVLEAF_F32,
                       .layout = KVLEAF_LAYOUT_STRIDED,
                       .head_dim = DIM,
                       .k_token_stride = TOKEN,
                       .k_head_stride = DIM,
                       .v_token_stride = TOKEN,
                       .v_head_stride = DIM};
    reference_seq whole = {.q_len = TOKENS, .kv_len = TOKENS, .causal = true};
    cl_mem gathered[2];
    kvleaf_seq seq;

    (void)state;
    managed_open(&m, order, 5);
    seq = managed_seq(&m);
    gathered[0] = output(TOKENS * TOKEN);
    gathered[1] = output(TOKENS * TOKEN);
    out = managed_step(&m, seq, TOKENS, q, k, v, gathered);
    k_back = take_output(gathered[0], TOKENS * TOKEN);
    v_back = take_output(gathered[1], TOKENS * TOKEN);
    assert_managed_table(&m, seq, order, 3);
    assert_memory_equal(k_back, k, TOKENS * TOKEN * sizeof *k);
    assert_memory_equal(v_back, v, TOKENS * TOKEN * sizeof *v);
    assert_stored(&m, seq, TOKENS, k, v);
    assert_rows(&kv, &whole, HEADS, KV_HEADS, q, out, NULL);
    managed_close(&m);
    free(q), free(k), free(v), free(k_back), free(v_back), free(out);
}

/* Three samples of one prompt, each with a continuation of its own: what they share is there once and stays as it was.
 */
static void doc_002_samples_do_not_disturb_each_other(void **state)
{
    enum { PROMPT = 40, NEW = 3, ALL = PROMPT + NEW, HEADS = 4, KV_HEADS = 2, DIM = 64, TOKEN = KV_HEADS * DIM };
    managed m = {.num_blocks = 16, .block_size = 16, .heads = HEADS, .kv_heads = KV_HEADS, .dim = DIM};
    float *q = random_floats(PROMPT * HEADS * DIM, first_seed), *k[3], *v[3];
    kvleaf_seq samples[3];
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

    (void)state;
    managed_open(&m, NULL, 0);
    samples[0] = managed_seq(&m);
    for (int i = 0; i < 3; i++) { /* the same prompt, other tails */
        support_rng seed = {first_seed + 10 + (uint64_t)i};

        k[i] = random_floats(ALL * TOKEN, first_seed + 1);
        v[i] = random_floats(ALL * TOKEN, first_seed + 2);
        for (int j = PROMPT * TOKEN; j < ALL * TOKEN; j++) {
            k[i][j] = support_float(&seed);
            v[i][j] = support_float(&seed);
        }
    }
    free(managed_step(&m, samples[0], PROMPT, q, k[0], v[0], NULL));
    for (int i = 1; i < 3; i++) {
        ASSERT_OK(kvleaf_seq_fork(m.cache, samples[0], PROMPT, &samples[i]));
    }
    for (int t = PROMPT; t < ALL; t++) {
        for (int i = 0; i < 3; i++) {
            reference_kv kv = {.k = k[i],
                               .v = v[i],
                               .dtype = KVLEAF_F32,
                               .layout = KVLEAF_LAYOUT_STRIDED,
                               .head_dim = DIM,
                               .k_token_stride = TOKEN,
                               .k_head_stride = DIM,
                               .v_token_stride = TOKEN,
                               .v_head_stride = DIM};
            reference_seq row = {.q_len = 1, .kv_len = t + 1, .causal = true};
            float *out = managed_step(&m, samples[i], 1, q, k[i] + t * TOKEN, v[i] + t * TOKEN, NULL);

            assert_rows(&kv, &row, HEADS, KV_HEADS, q, out, NULL);
            free(out);
        }
        for (int i = 0; i < 3; i++) {
            assert_stored(&m, samples[i], t + 1, k[i], v[i]);
        }
    }
    ASSERT_OK(kvleaf_cache_query(m.cache, &stats));
    assert_int_equal(stats.used, 2 + 3);
    for (int32_t block = 0; block < 2; block++) {
        assert_int_equal(kvleaf_blocks_refcount(kvleaf_cache_blocks(m.cache), 0, block), 3);
    }
    managed_close(&m);
    for (int i = 0; i < 3; i++) {
        free(k[i]), free(v[i]);
    }
    free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(doc_000_004_varlen_contiguous),
        cmocka_unit_test(doc_000_004_decode_in_place),
        cmocka_unit_test(doc_001_scalar_head_in_any_blocks),
        cmocka_unit_test(doc_002_gather_through_scattered_blocks),
        cmocka_unit_test(doc_002_samples_do_not_disturb_each_other),
    };

    return cmocka_run_group_tests_name("seed documents, device", tests, open_device, close_device);
}
