// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/cpu/gather.cl"
/* Copies each sequence's keys and values out of its blocks into packed rows: a work-item per (16 rows, KV head),
 * explicit vectors. Any layout but swizzle8. Elements move as they are.
 * Launch: global {num_kv_heads, ceil(total_k / 16)}, local {1, 1}.
 *
 * The positions of a 16-token unit of a CPU16 block form a run; the work-item in whose 16 rows it begins copies all of
 * it. */
#include "common/config.clh"
#include "common/layout.clh"
#include "common/transpose.clh"

#define GATHER_ROWS 16
#if KV_LAYOUT == LAYOUT_CPU16
#define RUN_TOKENS 16
#else
#define RUN_TOKENS 1
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

inline void clear_row(__global kv_raw *row, int head_dim)
{
    for (int dim = 0; dim < head_dim; dim++)
        row[dim] = 0;
}

inline void load_scattered(__global const kv_raw *tile, long4 view, int value, int first_dim, int in_block,
                           __global kv_raw *row, int4 shape)
{
    int head_dim = SHAPE_HEAD_DIM(shape);
    for (int dim = first_dim; dim < head_dim; dim++)
        row[dim] = tile[element_offset(view, value, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, dim)];
}

/* A row whose dims are contiguous at least sixteen at a time. */
inline void load_row(__global const kv_raw *tile, long4 view, int value, int in_block, __global kv_raw *row, int4 shape)
{
    int head_dim = SHAPE_HEAD_DIM(shape);
    int dim = 0;
    for (; dim + 16 <= head_dim; dim += 16)
        store_raw16(load_raw16(tile + element_offset(view, value, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, dim)),
                    row + dim);
    load_scattered(tile, view, value, dim, in_block, row, shape);
}

/* The first `run` tokens of a unit of keys, [head_dim][16 tokens] to rows. */
inline void load_unit(__global const kv_raw *unit, __global kv_raw *rows_out, long row_stride, int run, int head_dim)
{
    int dim = 0;
    for (; dim + 16 <= head_dim; dim += 16) {
        kv_raw16 rows[16];
        for (int i = 0; i < 16; i++)
            rows[i] = load_raw16(unit + (dim + i) * 16);
        transpose16(rows);
        for (int token = 0; token < 16; token++)
            if (token < run)
                store_raw16(rows[token], rows_out + token * row_stride + dim);
    }
    for (; dim < head_dim; dim++)
        for (int token = 0; token < run; token++)
            rows_out[token * row_stride + dim] = unit[dim * 16 + token];
}

inline void load_keys(__global const kv_raw *tile, long4 view, int in_block, int run, __global kv_raw *rows_out,
                      long row_stride, int4 shape)
{
#if KV_LAYOUT == LAYOUT_CPU16
    int head_dim = SHAPE_HEAD_DIM(shape);
    long unit = element_offset(view, 0, SHAPE_BLOCK_SIZE(shape), head_dim, in_block, 0);
    load_unit(tile + unit, rows_out, row_stride, run, head_dim);
#elif KV_LAYOUT == LAYOUT_DIM8
    load_scattered(tile, view, 0, 0, in_block, rows_out, shape);
#else
    load_row(tile, view, 0, in_block, rows_out, shape);
#endif
}

/* Sequences at meta + work.s0 (plan.h, GATHER_*); work = {gather_offset, num_seqs, num_blocks, total_k}. Rows of a
 * block id outside the pool are zero; rows that no sequence owns are left alone. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_gather(__global const kv_raw *k, long4 k_view, __global const kv_raw *v, long4 v_view, __global const int *table,
           __global const int *meta, __global kv_raw *k_out, long4 k_out_view, __global kv_raw *v_out, long4 v_out_view,
           int4 shape, int4 work)
{
    int head = (int)get_group_id(0);
    int begin = (int)get_group_id(1) * GATHER_ROWS;
    int end = min(begin + GATHER_ROWS, work.s3);
    int block_size = SHAPE_BLOCK_SIZE(shape);
    __global const int *sequences = meta + work.s0;

    for (int row = begin, run; row < end; row += run) {
        __global const int *sequence = sequences + sequence_of(sequences, work.s1, row) * GATHER_INTS;
        int position = row - sequence[GATHER_OUT];
        run = 1;
        if (position < 0 || position >= sequence[GATHER_KV_LEN] || position % RUN_TOKENS != 0)
            continue;
        run = min(min(RUN_TOKENS, sequence[GATHER_KV_LEN] - position), work.s3 - row);
        int block = table[sequence[GATHER_TABLE] + position / block_size];
        int in_block = position % block_size;
        __global kv_raw *k_rows = k_out + k_out_view.s0 + row * k_out_view.s1 + head * k_out_view.s2;
        __global kv_raw *v_rows = v_out + v_out_view.s0 + row * v_out_view.s1 + head * v_out_view.s2;
        if (block < 0 || block >= work.s2) {
            for (int i = 0; i < run; i++) {
                clear_row(k_rows + i * k_out_view.s1, SHAPE_HEAD_DIM(shape));
                clear_row(v_rows + i * v_out_view.s1, SHAPE_HEAD_DIM(shape));
            }
            continue;
        }
        load_keys(k + tile_start(k_view, block, head), k_view, in_block, run, k_rows, k_out_view.s1, shape);
        __global const kv_raw *v_tile = v + tile_start(v_view, block, head);
        for (int i = 0; i < run; i++)
            load_row(v_tile, v_view, 1, in_block + i, v_rows + i * v_out_view.s1, shape);
    }
}
