/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/prefill_mma.cl"
/* Paged prefill for NVIDIA GPUs from compute capability 8.0, with documented instructions alone: mma.sync and cp.async,
 * within 48 KiB of local memory. Seen on H200.
 *
 * A work-group takes one tile, a warp TILES times 16 of its rows: two where registers allow it, since what is read of
 * keys and values serves both then. Keys and values come in blocks of KEYS at fixed positions, the first first. The
 * copies of a block are started at the end of the scores of the one before, behind the last loads of its keys, since a
 * load is not moved ahead of a copy. A row is rescaled only where its own maximum grew by more than RESCALE, so its
 * bits do not depend on its tile. Before a tile's window and behind a sequence's last key zeros stand in local memory.
 * (An infinity or NaN among a sequence's own values reaches the rows of its tile that do not see it.)
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

/* Scores as the hook makes them, hidden where a row does not see the key; outputs shrink where its maximum grew. */
inline void settle_scores(float x[TILES][SCORES], float o[TILES][OUTPUTS], running *sums, const tile *t, int block,
                          float scale_log2, uint first_row, uint lane)
{
    if (SCORE_CHANGES || hides_some(t, block)) {
        int key = block * KEYS + 2 * (int)(lane & 3u);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const limits see = limits_of(t, first_row + 16 * i);
            const place at = place_rows(t, first_row + 16 * i);
            change_scores(x[i], KEYS, &at, &see, key, scale_log2);
            hide(x[i], KEYS, &see, key);
        }
    }
    if (some_grow(x, sums, LATE_SCALE(scale_log2))) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            float by0, by1;
            if (grow(x[i], KEYS, &sums[i], LATE_SCALE(scale_log2), &by0, &by1))
                rescale(o[i], by0, by1);
        }
    }
}

/* Products of a block's values; the scores of 16 keys become weights beside the products of the 16 before. */
inline void multiply_block(float o[TILES][OUTPUTS], float x[TILES][SCORES], uint values, running *sums,
                           float scale_log2)
{
    const int every = STEPS / 2 / TILES; /* steps from the weights of eight keys and a tile to the next */
    uint p[TILES][SCORES / 2], b[3][4];
    weighing w[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
        begin_weighing(&w[i], &sums[i], scale_log2);
    load_values(b[0], values, 0);
    load_values(b[1], values, 1);
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
        weigh_eight(p[i / 2], x[i / 2], i % 2, &w[i / 2], scale_log2);
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++) {
        const int sixteen = step / STEPS, i = step % STEPS / every;
        if (step + 2 < VALUE_STEPS)
            load_values(b[(step + 2) % 3], values, step + 2);
        if (sixteen + 1 < KEYS / 16 && step % every == 0)
            weigh_eight(p[i / 2], x[i / 2], 2 * (sixteen + 1) + i % 2, &w[i / 2], scale_log2);
        multiply_values(o, p, b[step % 3], step);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        sums[i].l0 = w[i].l[0] + w[i].l[1];
        sums[i].l1 = w[i].l[2] + w[i].l[3];
    }
}

__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global const int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, int4 shape, int4 work, float scale_log2, int4 work2)
{
    __local uchar memory[LOCAL_BYTES] __attribute__((aligned(1024)));
    uint base = local_address(memory), thread = (uint)get_local_id(0), lane = thread & 31u;
    uint warp = warp_broadcast(thread >> 5, 0), first_row = warp * 16 * TILES + (lane >> 2);
    const tile t = tile_of(meta, work, (uint)get_group_id(0));
    int first = tile_first_block(&t), last = tile_last_block(&t), ids[COPIES];
    uint rows[TILES][4 * STEPS * QUERY_PARTS], held[TILES][4 * HELD * QUERY_PARTS];
    float o[TILES][OUTPUTS], x[TILES][SCORES];
    running sums[TILES];
    find_ids(ids, table, &t, first, warp);
    load_rows(rows, q, q_view, &t, first_row, lane);
#pragma unroll
    for (int i = 0; i < COPIES; i++)
        copy_unit(ids, k, k_view, v, v_view, &t, first, i, base, warp, lane);
    find_ids(ids, table, &t, first + 1, warp);
    warp_sync(); /* so that the copies do not wait for the queries */
    deal_rows(rows, q, q_view, lane);
    uint left = query_place(base, warp, lane), keys_at = base + keys_lane(lane), values_at = base + values_lane(lane);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const running none = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, 0.0f, 0.0f};
        place_queries(held[i], rows[i], left + i * LEFT * 512);
        sums[i] = none;
        clear(o[i]);
    }
    for (int block = first; block <= last; block++) {
        uint a[TILES][8 * QUERY_PARTS], b[4][4], keys = keys_at + KEYS_AT(block);
        read_queries(a, held, step_of(0), left);
        COPIES_WAIT;
        barrier(CLK_LOCAL_MEM_FENCE);
        clear_scores(x);
        load_unit(b, keys, 0);
#pragma unroll
        for (int n = 0; n < KEY_UNITS; n++) {
            score_unit(x, a, b, held, keys, left, n);
            if (n >= KEY_UNITS - COPIES)
                copy_unit(ids, k, k_view, v, v_view, &t, block + 1, n - (KEY_UNITS - COPIES), base, warp, lane);
        }
        find_ids(ids, table, &t, block + 2, warp);
        settle_scores(x, o, sums, &t, block, scale_log2, first_row, lane);
        multiply_block(o, x, values_at + VALUES_AT(block), sums, LATE_SCALE(scale_log2));
    }
    COPIES_WAIT;
    const outputs to = make_outputs(out, out_view, lse, lse_view, scale_log2);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const place at = place_rows(&t, first_row + 16 * i);
        write_rows(o[i], &at, &sums[i], &to, lane);
    }
}
