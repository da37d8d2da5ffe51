// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/append.cl"
/* Scatters new keys and values to their slots. Any layout, any dtype, any device.
 * Launch: global {num_tokens * WORK_GROUP, num_kv_heads}, local {WORK_GROUP, 1}: a work-group per (token, KV head). */
#include "common/config.clh"
#include "common/dtypes.clh"
#include "common/layout.clh"

inline void store_row(__global const uchar *source, long4 source_view, __global KV_ELEM *target, long4 target_view,
                      int value, int token, int head, int block, int in_block, int4 shape)
{
    long from = source_view.s0 + (long)token * source_view.s1 + (long)head * source_view.s2;
    long to = tile_start(target_view, block, head);
    int head_dim = SHAPE_HEAD_DIM(shape);
    for (int dim = (int)get_local_id(0); dim < head_dim; dim += WORK_GROUP) {
        float x = load_any(source, from + dim, (int)source_view.s3);
        long at = to + element_offset(target_view, value, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, dim);
        STORE_KV(x, target, at);
    }
#if KV_LAYOUT == LAYOUT_SWIZZLE8 /* the padding takes part in matrix products */
    for (int dim = head_dim + (int)get_local_id(0); dim < (head_dim + 63) / 64 * 64; dim += WORK_GROUP)
        STORE_KV(0.0f, target,
                 to + element_offset(target_view, value, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, dim));
#endif
}

/* Sources [num_tokens, num_kv_heads, head_dim] by views {offset, token_stride, head_stride, dtype}; int64 slots
 * [num_tokens] at meta + work.s0; work = {slots_offset, num_tokens, num_blocks, 0}. A slot outside the pool writes
 * nothing. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_append(__global const uchar *k_source, long4 k_source_view, __global const uchar *v_source, long4 v_source_view,
           __global KV_ELEM *k, long4 k_view, __global KV_ELEM *v, long4 v_view, __global const int *meta, int4 shape,
           int4 work)
{
    int token = (int)get_group_id(0);
    int head = (int)get_group_id(1);
    int block_size = SHAPE_BLOCK_SIZE(shape);
    if (token >= work.s1)
        return;
    long slot = ((__global const long *)(meta + work.s0))[token];
    if (slot < 0 || slot >= (long)work.s2 * block_size)
        return;
    int block = (int)(slot / block_size);
    int in_block = (int)(slot - (long)block * block_size);
    store_row(k_source, k_source_view, k, k_view, 0, token, head, block, in_block, shape);
    store_row(v_source, v_source_view, v, v_view, 1, token, head, block, in_block, shape);
}
