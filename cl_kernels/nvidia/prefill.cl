/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/prefill.cl"
/* Paged prefill for NVIDIA GPUs of compute capability 9.0 (Hopper). Seen on H200.
 *
 * A work-group a compute unit. Its first warpgroup loads: warp 0 keys and values by bulk copies; warp 1 takes tiles
 * from a counter and publishes them; warps 1 to WARPGROUPS bring the queries of a computing warpgroup each, which has
 * 64 rows. A tile is ROWS rows: row = query * PADDED_GROUP + head. Keys and values come in blocks of KEYS at fixed
 * positions, the last first, and serve all rows of the tile: the more rows, the less their way costs.
 *
 * A computing warpgroup multiplies, weighs and multiplies again, block for block; while one weighs, the others keep the
 * tensor cores busy. They run on from tile to tile, each on its own as far as the blocks in local memory allow.
 *
 * A row is rescaled only where its own maximum grew by more than RESCALE, so its bits do not depend on its tile.
 * Before a tile's window and behind a sequence's last key no value is read: zeros stand in local memory instead. (An
 * infinity or NaN among a sequence's own values reaches the rows of its tile that do not see it.)
 *
 * Layout: swizzle8. Keys and values of one 16-bit dtype; queries of another are the sum of two parts of that dtype. PTX
 * is edited: lib/device/ptx.c. */
#include "nvidia/prefill_query.clh"
#include "nvidia/prefill_load.clh"
#include "nvidia/prefill_rows.clh"

__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, int4 shape, int4 work, float scale_log2, int4 work2)
{
    __local uchar memory[48000] __attribute__((aligned(1024)));
    asm volatile("//KVL-LOCAL %0;" ::"n"(LOCAL_BYTES_NEEDED));
    uint base = local_address(memory), thread = (uint)get_local_id(0), warp = warp_broadcast(thread >> 5, 0);
    __global int *counter = meta;
    init_barriers(base, thread);
    asm volatile("bar.sync 0;" ::: "memory");
    const query_source from = make_source(q, q_view);
    if (warp < 4) {
        asm volatile("//KVL setmaxnreg.dec.sync.aligned.u32 " LOADING_REGISTERS ";");
        if (warp == 0)
            load_keys_and_values(base, table, (ulong)k, k_view, (ulong)v, v_view);
        else if (warp <= WARPGROUPS)
            load_queries(base, &from, meta, work, counter);
    } else {
        asm volatile("//KVL setmaxnreg.inc.sync.aligned.u32 " COMPUTING_REGISTERS ";");
        const outputs to = make_outputs(out, out_view, lse, lse_view, scale_log2);
        compute_rows(base, &from, &to);
    }
    asm volatile("bar.sync 0;" ::: "memory");
    if (thread == 0 && atomic_count(counter + 1) == get_num_groups(0) - 1)
        counter[0] = counter[1] = 0;
}
