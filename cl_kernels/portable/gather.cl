// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/gather.cl"
/* Copies each sequence's keys and values out of its blocks into packed rows. Elements move as they are.
 * Launch: global {total_k * WORK_GROUP, num_kv_heads}, local {WORK_GROUP, 1}: a work-group per (row, KV head). */
#include "common/config.clh"
#include "common/dtypes.clh"
#include "common/layout.clh"

#if KV_DTYPE == DTYPE_F32
typedef uint kv_raw;
#else
typedef ushort kv_raw;
#endif

/* The last sequence that starts at or before the row: among equal starts the only one that is not empty. */
inline int sequence_of(__global const int *sequences, int num_sequences, int row)
{
    int low = 0;
    int high = num_sequences - 1;
    while (low < high) {
        int middle = low + (high - low + 1) / 2;
        if (sequences[middle * GATHER_INTS + GATHER_OUT] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

inline void load_row(__global const kv_raw *source, long4 source_view, __global kv_raw *target, long4 target_view,
                     int value, int row, int head, int block, int in_block, int4 shape)
{
    long to = target_view.s0 + (long)row * target_view.s1 + (long)head * target_view.s2;
    int head_dim = SHAPE_HEAD_DIM(shape);
    for (int dim = (int)get_local_id(0); dim < head_dim; dim += WORK_GROUP) {
        kv_raw x = 0;
        if (block >= 0)
            x = source[tile_start(source_view, block, head) +
                       element_offset(source_view, value, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, dim)];
        target[to + dim] = x;
    }
}

/* Sequences at meta + work.s0 (plan.h, GATHER_*); work = {gather_offset, num_seqs, num_blocks, total_k}. Rows of a
 * block id outside the pool are zero; rows that no sequence owns are left alone. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_gather(__global const kv_raw *k, long4 k_view, __global const kv_raw *v, long4 v_view, __global const int *table,
           __global const int *meta, __global kv_raw *k_out, long4 k_out_view, __global kv_raw *v_out, long4 v_out_view,
           int4 shape, int4 work)
{
    int row = (int)get_group_id(0);
    int head = (int)get_group_id(1);
    if (row >= work.s3)
        return;
    __global const int *sequence = meta + work.s0 + sequence_of(meta + work.s0, work.s1, row) * GATHER_INTS;
    int position = row - sequence[GATHER_OUT];
    if (position < 0 || position >= sequence[GATHER_KV_LEN])
        return;
    int block_size = SHAPE_BLOCK_SIZE(shape);
    int block = table[sequence[GATHER_TABLE] + position / block_size];
    if (block >= work.s2)
        block = -1;
    load_row(k, k_view, k_out, k_out_view, 0, row, head, block, position % block_size, shape);
    load_row(v, v_view, v_out, v_out_view, 1, row, head, block, position % block_size, shape);
}
