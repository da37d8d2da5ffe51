/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/prefill_mma.cl"
/* Paged prefill for NVIDIA GPUs from compute capability 8.0, with documented instructions alone: mma.sync and cp.async,
 * within 48 KiB of local memory. Seen on H200.
 *
 * A work-group takes one tile, a warp 16 of its rows. Keys and values come in blocks of KEYS at fixed positions, the
 * first first: keys a block ahead, values while the scores of their block are made. A warp copies eight keys of each.
 * A row is rescaled only where its own maximum grew by more than RESCALE, so its bits do not depend on its tile.
 * Behind a sequence's last key zeros stand in local memory. (An infinity or NaN among a sequence's own values reaches
 * the rows of its tile that do not see it.)
 *
 * Layouts in which eight dims of a key lie together. Queries, keys and values of one 16-bit dtype. */
#define KEYS 64
#include "common/layout.clh"
#include "nvidia/prefill_softmax.clh"

#define WARPS (ROWS / 16)
#define THREADS (WARPS * 32)
#define STEPS (PADDED / 16)
#define BLOCK_BYTES (KEYS * PADDED * 2)
#define AT_VALUES (2 * BLOCK_BYTES) /* behind two buffers of keys */

#define COPIES_COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define COPIES_WAIT(n) asm volatile("cp.async.wait_group " n ";" ::: "memory") /* at most n groups in flight */

/* Address of a lane's row of 8 x 8 matrices: of eight keys, the chunk of eight dims at its place in the swizzle. */
inline uint matrix_row(uint eight, uint chunk, uint lane)
{
    return eight + chunk / 8 * 1024 + (lane & 7u) * 128 + ((chunk % 8 ^ (lane & 7u)) << 4);
}

/* The block id of the eight keys that this warp copies of a block. */
inline int block_id(__global const int *table, const tile *t, int block, uint warp)
{
    int position = min(block * KEYS + (int)warp * 8, t->keys - 1);
    return t->keys > 0 ? table[t->table + position / BLOCK_SIZE] : 0;
}

/* Starts the copy of the warp's eight keys, a chunk of eight dims a thread at a time; zeros where the sequence has none
 * or the head has no such dims. */
inline void copy_keys(__global const KV_ELEM *from, long4 view, int value, const tile *t, int id, int block, uint to,
                      uint warp, uint lane)
{
    int key = (int)(lane & 7u), position = block * KEYS + (int)warp * 8;
    long start = tile_start(view, id, t->kv_head);
#pragma unroll
    for (uint i = 0; i < PADDED / 32; i++) {
        uint chunk = 4 * i + (lane >> 3);
        bool there = position + key < t->keys && chunk * 8 < HEAD_DIM;
        long at = element_offset(view, value, BLOCK_SIZE, HEAD_DIM, position % BLOCK_SIZE + key, (int)chunk * 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(matrix_row(to + warp * EIGHT_BYTES, chunk, lane)),
                     "l"((ulong)from + (ulong)(there ? start + at : 0) * 2), "r"(there ? 16 : 0)
                     : "memory");
    }
}

/* Two neighbouring query elements as K's dtype has them. */
inline uint load_pair(__global const Q_ELEM *row, int dim, bool pairs, uint there)
{
    if (!there || dim >= HEAD_DIM)
        return 0;
    if (pairs)
        return *(__global const uint *)((__global const ushort *)row + dim);
    return pack_kv(LOAD_Q(row, dim), dim + 1 < HEAD_DIM ? LOAD_Q(row, dim + 1) : 0.0f);
}

/* The warp's 16 rows as the product's A operand, four registers a 16-dim step. */
inline void load_rows(uint *rows, __global const Q_ELEM *q, long4 view, const place *at, uint lane)
{
    bool pairs = (((ulong)q / 2 + (ulong)view.s0) | (ulong)view.s1 | (ulong)view.s2 | HEAD_DIM) % 2 == 0;
    __global const Q_ELEM *first = q + (view.s0 + at->token * view.s1 + at->head * view.s2);
    __global const Q_ELEM *second = first + (SECOND_QUERY * view.s1 + SECOND_HEAD * view.s2);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int dim = 16 * i + 2 * (int)(lane & 3u);
        rows[4 * i] = load_pair(first, dim, pairs, at->there0);
        rows[4 * i + 1] = load_pair(second, dim, pairs, at->there1);
        rows[4 * i + 2] = load_pair(first, dim + 8, pairs, at->there0);
        rows[4 * i + 3] = load_pair(second, dim + 8, pairs, at->there1);
    }
}

inline void multiply_keys(float *x, const uint *rows, uint keys, uint lane)
{
#pragma unroll
    for (int i = 0; i < SCORES; i++)
        x[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS / 2; i++)
#pragma unroll
        for (int eight = 0; eight < KEYS / 8; eight++) {
            uint b[4];
            load_matrices(b, matrix_row(keys + eight * EIGHT_BYTES, 4 * i + (lane >> 3), lane));
            multiply_add(x + 4 * eight, rows + 8 * i, b[0], b[1]);
            multiply_add(x + 4 * eight, rows + 8 * i + 4, b[2], b[3]);
        }
}

inline void multiply_values(float *o, const uint *p, uint values, uint lane)
{
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int pair = 0; pair < PADDED / 16; pair++) {
            uint b[4], eight = values + (2 * i + ((lane >> 3) & 1u)) * EIGHT_BYTES;
            load_matrices_transposed(b, matrix_row(eight, 2 * pair + (lane >> 4), lane));
            multiply_add(o + 8 * pair, p + 4 * i, b[0], b[1]);
            multiply_add(o + 8 * pair + 4, p + 4 * i, b[2], b[3]);
        }
}

/* All blocks of the tile; the warp's outputs are unnormalised. */
inline void attend_tile(float *o, running *sum, const uint *rows, const tile *t, const limits *see,
                        __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v, long4 v_view,
                        __global const int *table, uint base, float scale_log2, uint warp, uint lane)
{
    float x[SCORES];
    uint p[SCORES / 2];
    int column = 2 * (int)(lane & 3u), blocks = tile_blocks(t), id = block_id(table, t, 0, warp);
    copy_keys(k, k_view, 0, t, id, 0, base, warp, lane);
    COPIES_COMMIT;
    for (int block = 0; block < blocks; block++) {
        uint keys = base + (block & 1) * BLOCK_BYTES, next_keys = base + (~block & 1) * BLOCK_BYTES;
        int next = block + 1 < blocks ? block_id(table, t, block + 1, warp) : 0;
        COPIES_WAIT("0");
        barrier(CLK_LOCAL_MEM_FENCE);
        copy_keys(v, v_view, 1, t, id, block, base + AT_VALUES, warp, lane);
        COPIES_COMMIT;
        if (block + 1 < blocks)
            copy_keys(k, k_view, 0, t, next, block + 1, next_keys, warp, lane);
        COPIES_COMMIT;
        id = next;
        multiply_keys(x, rows, keys, lane);
        if (block * KEYS + KEYS - 1 > t->first_limit)
            hide(x, see->x0 - block * KEYS - column, see->x1 - block * KEYS - column);
        float by0, by1;
        if (grow(x, sum, scale_log2, &by0, &by1))
            rescale(o, by0, by1);
        weigh(x, sum, scale_log2);
        pack_weights(p, x);
        COPIES_WAIT("1");
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_values(o, p, base + AT_VALUES, lane);
    }
}

__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global const int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, __global int *counter, int4 shape, int4 work, float scale_log2,
            int4 work2)
{
    __local uchar memory[3 * BLOCK_BYTES] __attribute__((aligned(1024)));
    uint base = local_address(memory), thread = (uint)get_local_id(0), lane = thread & 31u;
    uint warp = warp_broadcast(thread >> 5, 0), first_row = warp * 16 + (lane >> 2);
    const tile t = tile_of(meta, work, (uint)get_group_id(0));
    const place at = place_rows(&t, first_row);
    const limits see = limits_of(&t, first_row);
    const outputs all = make_outputs(out, out_view, lse, lse_view, scale_log2), *to = &all;
    running sum = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, 0.0f, 0.0f};
    uint rows[4 * STEPS];
    float o[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        o[i] = 0.0f;
    load_rows(rows, q, q_view, &at, lane);
    attend_tile(o, &sum, rows, &t, &see, k, k_view, v, v_view, table, base, scale_log2, warp, lane);
    WRITE_ROWS(o, at, sum);
}
