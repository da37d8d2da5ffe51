/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/decode.cl"
/* Paged decode for NVIDIA GPUs from compute capability 9.0: one launch, tensor cores, bulk copies. Seen on H200.
 *
 * A task is a run of up to run_splits consecutive 256-key splits of one (row, KV head). A work-group is eight streaming
 * warps and a ninth that takes tasks from a counter and publishes each with its block ids, one ahead. (Three more make
 * its warpgroup whole, which gives its registers to the others.) A streaming
 * warp works two 16-key units of every split on its own: a ring of bulk copies brings them, and runs on from task to
 * task. K is the matrix product's A operand (16 keys), the query heads of the group are its columns; V transposed on
 * load is A again.
 *
 * Partials of the warps are combined a split at a time, splits and runs in one fixed binary tree, so neither the
 * length of a run, nor the grid, nor the timing changes a bit. The work-group that counts last in a row folds the
 * row's runs.
 *
 * Layout: swizzle8. Local memory beyond 48 KiB comes by the edit of lib/device/ptx.c. */
#include "nvidia/decode_runs.clh"
#include "nvidia/decode_stream.clh"

/* A streaming warp as it uses up what its stream brings. */
typedef struct consumer {
    uint base, warp, lane;
    uint ring, barriers; /* of this warp */
    uint stage, phase;
    uint buffer;         /* of warp outputs */
    const sides *kv;
    const tables *all;
} consumer;

/* Waits for the next item and returns where it lies. */
inline uint next_item(const consumer *c)
{
    barrier_wait(c->barriers + 8 * c->stage, c->phase);
    return c->ring + c->stage * ITEM_BYTES;
}

/* Gives the item's stage back and lets the stream use it. */
inline void item_done(consumer *c, stream *s)
{
    warp_sync();
    advance(s, c->kv, c->all, c->base, c->warp, c->lane);
    if (++c->stage == STAGES) {
        c->stage = 0;
        c->phase ^= 1u;
    }
}

inline void multiply_keys(scores *x, uint queries[QUERY_PARTS][COLUMNS][2 * STEPS], consumer *c, stream *s)
{
#pragma unroll
    for (int first = 0; first < UNITS; first += ITEM_UNITS) {
        uint item = next_item(c);
        multiply_key_item(x->x + first, queries, item, c->lane);
        item_done(c, s);
    }
}

inline void multiply_values(float o[COLUMNS][4 * STEPS], const scores *x, int first_key, const task *t, consumer *c,
                            stream *s)
{
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
#pragma unroll
        for (int i = 0; i < 4 * STEPS; i++)
            o[column][i] = 0.0f;
#pragma unroll
    for (int first = 0; first < UNITS; first += ITEM_UNITS) {
        uint item = next_item(c);
        multiply_value_item(o, x->p + first, first_key + first * UNIT, t, item, c->lane);
        item_done(c, s);
    }
}

/* One split of the task: this thread's outputs of it, all warps combined. */
inline void work_split(folded *sum, uint queries[QUERY_PARTS][COLUMNS][2 * STEPS], const task *t, int split,
                       float scale_log2, const place *at, consumer *c, stream *s, pending *p)
{
    scores x;
    float o[COLUMNS][4 * STEPS];
    int first_key = split * SPLIT + (int)c->warp * (UNITS * UNIT);
    multiply_keys(&x, queries, c, s);
    softmax(&x, first_key, t, scale_log2, c->lane);
    multiply_values(o, &x, first_key, t, c, s);
    combine_split(sum, &x, o, c->base + AT_OUTPUT, c->base + AT_SUMS, &c->buffer, c->warp, c->lane, at, p);
}

/* Takes the work-group's first task and starts its copies; every warp waits for the others before it may need a
 * second. */
inline void start_stream(stream *s, consumer *c)
{
    s->item = s->stage = s->taken = 0;
    take(&s->now, c->all, (uint)get_group_id(0));
    s->items = (uint)(s->now.end_split - s->now.first_split) * ITEMS;
    uint unit = c->lane / UNITS * (SPLIT / UNIT) + c->warp * UNITS + c->lane % UNITS;
    for (int part = 0; part < IDS_PER_UNIT; part++)
        s->ids[part] = (uint)unit_block(&s->now, c->all, (int)unit, part);
    if (c->lane == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(c->barriers + 8 * i, 1);
        barrier_init_fence();
    }
    warp_sync();
    const int sure = min(STAGES - 1, ITEMS - 1); /* copies that no task is too short for */
    for (int i = 0; i < sure; i++)
        advance(s, c->kv, c->all, c->base, c->warp, c->lane);
    EVERYBODY_BARRIER;
    for (int i = sure; i < STAGES; i++)
        advance(s, c->kv, c->all, c->base, c->warp, c->lane);
}

__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_decode(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
           long4 v_view, __global const int *table, __global const int *meta, __global float *partials,
           __global int *counter, int4 shape, int4 work, float scale_log2, __global OUT_ELEM *out, long4 out_view,
           __global float *lse, long4 lse_view, int2 runs, int4 first_row)
{
    __local uchar memory[48000] __attribute__((aligned(1024)));
    asm volatile("//KVL-LOCAL %0;" ::"n"(LOCAL_BYTES_NEEDED));
    uint base = local_address(memory), thread = (uint)get_local_id(0), groups = (uint)get_num_groups(0);
    uint warp = warp_broadcast(thread >> 5, 0);
    const tables all = {table, meta + work.s1, work.s2 * shape.s1, shape.s1, runs.s0, runs.s1, first_row};
    const sides kv = {in_bytes((ulong)k, k_view), in_bytes((ulong)v, v_view)};
    const outputs to = {out, out_view, lse, lse_view};
    init_task_barriers(base, thread);
    if (warp >= WARPS) {
        asm volatile("//KVL setmaxnreg.dec.sync.aligned.u32 40;");
        EVERYBODY_BARRIER;
        if (warp == WARPS)
            publish_tasks(&all, counter, base, thread & 31u);
    } else {
        asm volatile("//KVL setmaxnreg.inc.sync.aligned.u32 232;");
        consumer c = {.base = base, .warp = warp, .lane = thread & 31u, .ring = base + warp * (STAGES * ITEM_BYTES),
                      .barriers = base + AT_RING_BARRIERS + warp * (STAGES * 8), .kv = &kv, .all = &all};
        place at = {.head = (thread >> 4) % PAIRS * 2 + (thread & 1u), .first = thread};
        at.there = at.head < GROUP;
        stream s;
        start_stream(&s, &c);
        task t;
        take(&t, &all, (uint)get_group_id(0));
        uint queries[QUERY_PARTS][COLUMNS][2 * STEPS];
        tree levels;
        folded sum;
        load_queries(queries, q, q_view, &t, c.lane);
        pending p = {.partials = partials, .counts = counter + 2, .num_heads = shape.s0, .kv_heads = shape.s1,
                     .to = &to, .flag = base + AT_FLAG};
        for (uint n = 0; t.index < (uint)all.num_tasks; n++) {
            for (int split = t.first_split; split < t.end_split; split++) {
                work_split(&sum, queries, &t, split, scale_log2, &at, &c, &s, &p);
                push(&levels, &sum, (uint)(split - t.first_split));
            }
            task next = take_published(base, n, c.lane);
            if (next.index < (uint)all.num_tasks)
                load_queries(queries, q, q_view, &next, c.lane);
            root(&levels, &sum, (uint)(t.end_split - t.first_split));
            finish_task(&sum, &t, &p, &at);
            t = next;
        }
        drain(&p, &at);
    }
    if ((uint)all.num_tasks <= groups)
        return;
    EVERYBODY_BARRIER;
    if (thread == 0 && atomic_count(counter + 1) == groups - 1)
        counter[0] = counter[1] = 0;
}
