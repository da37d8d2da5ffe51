// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/cpu/append.cl"
/* Scatters new keys and values to their slots: a work-item per (16 tokens, KV head), explicit vectors. Any layout but
 * swizzle8.
 * Launch: global {num_kv_heads, ceil(num_tokens / 16)}, local {1, 1}.
 *
 * Tokens whose slots follow each other inside a 16-token unit of a CPU16 block form a run. The work-item in whose 16
 * tokens a run begins writes all of it, so that a prompt's units are transposed whole wherever they begin in the
 * batch. */
#include "common/transpose.clh"
#include "cpu/append.clh"

#define APPEND_TOKENS 16
#if KV_LAYOUT == LAYOUT_CPU16
#define RUN_TOKENS 16
#else
#define RUN_TOKENS 1
#endif

/* A whole unit of keys, [16 tokens][head_dim] to [head_dim][16 tokens]. */
inline void store_unit(__global const uchar *source, long from, long token_stride, int dtype, __global kv_raw *unit,
                       int head_dim)
{
    bool aligned = is_aligned16(unit);
    int dim = 0;
    for (; dim + 16 <= head_dim; dim += 16) {
        kv_raw16 rows[16];
        for (int token = 0; token < 16; token++)
            rows[token] = load_rounded16(source, from + token * token_stride + dim, dtype);
        transpose16(rows);
        for (int i = 0; i < 16; i++)
            stream_raw16(rows[i], unit + (dim + i) * 16, aligned);
    }
    for (; dim < head_dim; dim++)
        for (int token = 0; token < 16; token++) {
            float x = load_any(source, from + token * token_stride + dim, dtype);
            STORE_KV(x, (__global KV_ELEM *)unit, dim * 16 + token);
        }
}

inline void store_keys(__global const uchar *source, long from, long token_stride, int dtype, __global kv_raw *target,
                       long4 view, int in_block, int run, int4 shape)
{
#if KV_LAYOUT == LAYOUT_CPU16
    if (run == 16) {
        int head_dim = SHAPE_HEAD_DIM(shape);
        long unit = element_offset(view, 0, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, 0);
        store_unit(source, from, token_stride, dtype, target + unit, head_dim);
        return;
    }
#endif
    for (int i = 0; i < run; i++, from += token_stride)
        store_key(source, from, dtype, target, view, in_block + i, shape, true);
}

/* Tokens from `token` on whose slots go on from its own within the unit. */
inline int run_length(__global const long *slots, int token, int num_tokens, int in_block)
{
    int limit = min(RUN_TOKENS - in_block % RUN_TOKENS, num_tokens - token);
    int run = 1;
    while (run < limit && slots[token + run] == slots[token] + run)
        run++;
    return run;
}

/* Sources [num_tokens, num_kv_heads, head_dim] by views {offset, token_stride, head_stride, dtype}; int64 slots
 * [num_tokens] at meta + work.s0; work = {slots_offset, num_tokens, num_blocks, 0}. A slot outside the pool writes
 * nothing. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_append(__global const uchar *k_source, long4 k_source_view, __global const uchar *v_source, long4 v_source_view,
           __global kv_raw *k, long4 k_view, __global kv_raw *v, long4 v_view, __global const int *meta, int4 shape,
           int4 work)
{
    int head = (int)get_group_id(0);
    int begin = (int)get_group_id(1) * APPEND_TOKENS;
    int end = min(begin + APPEND_TOKENS, work.s1);
    int block_size = SHAPE_BLOCK_SIZE(shape);
    long num_slots = (long)work.s2 * block_size;
    __global const long *slots = (__global const long *)(meta + work.s0);

    for (int token = begin; token < end; token++) {
        long slot = slots[token];
        if (slot < 0 || slot >= num_slots)
            continue;
        if (slot % RUN_TOKENS != 0 && token > 0 && slots[token - 1] == slot - 1)
            continue; /* inside a run */
        int block = (int)(slot / block_size);
        int in_block = (int)(slot - (long)block * block_size);
        int run = run_length(slots, token, work.s1, in_block);
        long k_from = k_source_view.s0 + token * k_source_view.s1 + head * k_source_view.s2;
        long v_from = v_source_view.s0 + token * v_source_view.s1 + head * v_source_view.s2;
        __global kv_raw *k_tile = k + tile_start(k_view, block, head);
        __global kv_raw *v_tile = v + tile_start(v_view, block, head);
        store_keys(k_source, k_from, k_source_view.s1, (int)k_source_view.s3, k_tile, k_view, in_block, run, shape);
        for (int i = 0; i < run; i++)
            store_row(v_source, v_from + i * v_source_view.s1, (int)v_source_view.s3, v_tile, v_view, 1, in_block + i,
                      shape, true);
    }
}
