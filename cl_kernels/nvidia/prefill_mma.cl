/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/prefill_mma.cl"
/* Paged prefill for NVIDIA GPUs from compute capability 8.0, with documented instructions alone: mma.sync and cp.async,
 * within 48 KiB of local memory. Seen on H200.
 *
 * A work-group takes one tile, a warp TILES times 16 of its rows: two where registers allow it, since what is read of
 * keys and values serves both then. Keys and values come in blocks of KEYS at fixed positions, the first first; the
 * copies of a block are started between the products of the keys before, beside which their addresses cost nothing.
 * A row is rescaled only where its own maximum grew by more than RESCALE, so its bits do not depend on its tile.
 * Before a tile's window and behind a sequence's last key zeros stand in local memory. (An infinity or NaN among a
 * sequence's own values reaches the rows of its tile that do not see it.)
 *
 * Layouts in which eight dims of a key lie together. Keys and values of one 16-bit dtype; queries of another are the
 * sum of two parts of that dtype. */
#include "nvidia/prefill_mma.clh"

inline void clear_scores(float x[TILES][SCORES])
{
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int k = 0; k < SCORES; k++)
            x[i][k] = 0.0f;
}

/* Scores x of a block become weights p; outputs shrink where a row's maximum grew. */
inline void weigh_block(float x[TILES][SCORES], uint p[TILES][SCORES / 2], float o[TILES][OUTPUTS], running *sums,
                        const tile *t, int block, float scale_log2, uint first_row, uint lane)
{
    bool some = hides_some(t, block);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        float by0, by1;
        if (some || SCORE_CHANGES) {
            const limits see = limits_of(t, first_row + 16 * i);
            const place at = place_rows(t, first_row + 16 * i);
            change_scores(x[i], &at, &see, block * KEYS + 2 * (int)(lane & 3u), scale_log2);
            hide(x[i], &see, block * KEYS + 2 * (int)(lane & 3u));
        }
        if (grow(x[i], &sums[i], LATE_SCALE(scale_log2), &by0, &by1))
            rescale(o[i], by0, by1);
        weigh(x[i], &sums[i], LATE_SCALE(scale_log2));
        pack_weights(p[i], x[i]);
    }
}

__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global const int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, __global int *counter, int4 shape, int4 work, float scale_log2,
            int4 work2)
{
    __local uchar memory[LOCAL_BYTES] __attribute__((aligned(1024)));
    uint base = local_address(memory), thread = (uint)get_local_id(0), lane = thread & 31u;
    uint warp = warp_broadcast(thread >> 5, 0), first_row = warp * 16 * TILES + (lane >> 2);
    const tile t = tile_of(meta, work, (uint)get_group_id(0));
    int first = tile_first_block(&t), last = tile_last_block(&t), ids[COPIES];
    uint held[TILES][4 * HELD * QUERY_PARTS], p[TILES][SCORES / 2];
    float o[TILES][OUTPUTS], x[TILES][SCORES];
    running sums[TILES];
    find_ids(ids, table, &t, first, warp);
#pragma unroll
    for (int dims = 0; dims < PADDED; dims += 32)
        copy_units(ids, k, k_view, v, v_view, &t, first, dims, base, warp, lane);
    find_ids(ids, table, &t, first + 1, warp);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const place at = place_rows(&t, first_row + 16 * i);
        const running none = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, 0.0f, 0.0f};
        place_queries(held[i], q, q_view, &at, query_place(base, i, warp, lane), lane);
        sums[i] = none;
        clear(o[i]);
    }
    for (int block = first; block <= last; block++) {
        COPIES_WAIT;
        barrier(CLK_LOCAL_MEM_FENCE);
        clear_scores(x);
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            multiply_keys(x, held, base + KEYS_AT(block), step, base, warp, lane);
            copy_units(ids, k, k_view, v, v_view, &t, block + 1, 16 * step, base, warp, lane);
        }
        find_ids(ids, table, &t, block + 2, warp);
        weigh_block(x, p, o, sums, &t, block, scale_log2, first_row, lane);
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
            multiply_values(o, p, base + VALUES_AT(block), step, lane);
    }
    COPIES_WAIT;
    const outputs to = make_outputs(out, out_view, lse, lse_view, scale_log2);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const place at = place_rows(&t, first_row + 16 * i);
        write_rows(o[i], &at, &sums[i], &to, lane);
    }
}
