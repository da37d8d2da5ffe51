/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/decode.cl"
/* Paged decode for NVIDIA GPUs from compute capability 9.0: one launch, tensor cores, bulk copies. Seen on H200.
 *
 * A task is a run of consecutive splits of one (row, KV head), and comes in parts of PART_SPLITS. A work-group is eight
 * streaming warps and a ninth that takes tasks from a counter, writes the tokens that the step appends, and publishes
 * each part with its block ids and queries, one ahead, but for the work-group's first, which each warp finds by itself.
 * (Three more make its warpgroup whole, which gives its registers to the others; they bring the first queries.) A
 * streaming warp works its 16-key units of every split on its own: a ring of bulk copies brings them, and runs on from
 * part to part. K is the matrix product's A operand (16 keys), the query heads of the group are its columns; V
 * transposed on load is A again.
 *
 * Partials of the warps are combined a split at a time, splits and runs in one fixed binary tree, so neither the
 * length of a run, nor the grid, nor the timing changes a bit. Each warp counts a row's runs for itself, and the one
 * that counts last folds its outputs of them.
 *
 * At small batches a launch is mostly its start and its end, where each instruction is run for the first time: so the
 * first keys wait for as few as possible, and a run is counted before it is over where that can hold up nobody.
 *
 * Layout: swizzle8. Local memory beyond 48 KiB comes by the edit of lib/device/ptx.c. */
#include "nvidia/decode_runs.clh"
#include "nvidia/decode_stream.clh"

#if defined(LONGEST_RUN) && LONGEST_RUN > PART_SPLITS << (PART_LEVELS - 1)
#error "the host's runs have more parts than PART_LEVELS are for"
#endif

/* A streaming warp as it uses up what its stream brings. */
typedef struct consumer {
    uint base, warp, lane;
    uint ring, barriers; /* of this warp */
    uint phase;          /* of the barriers of the split's first stages */
    uint buffer;         /* of warp outputs */
    const sides *kv;
    const tables *all;
} consumer;

/* Waits for an item of the split and returns where it lies. */
inline uint await_item(const consumer *c, int item)
{
    barrier_wait(c->barriers + 8 * (item % STAGES), (c->phase + item / STAGES) & 1u);
    return c->ring + item % STAGES * ITEM_BYTES;
}

/* Gives the item's stage back, which the stream uses for the item STAGES after it. */
inline void item_done(const consumer *c, int item, stream *s)
{
    const int next = (item + STAGES) % ITEMS;
    warp_sync();
    copy_item(s, next, c->ring, c->barriers);
    if (next == ITEMS - 1)
        next_split(s, c->kv, c->all, c->base, c->warp, c->lane);
}

inline void multiply_keys(scores *x, uint queries[QUERY_PARTS][COLUMNS][2 * STEPS], const consumer *c, stream *s)
{
#pragma unroll
    for (int i = 0; i < ITEMS / 2; i++) {
        multiply_key_item(x->x + i * ITEM_UNITS, queries, await_item(c, i), c->lane);
        item_done(c, i, s);
    }
}

inline void multiply_values(float o[COLUMNS][4 * STEPS], const scores *x, int first_key, const task *t,
                            const consumer *c, stream *s, pending *p, const place *at, bool count)
{
    clear_outputs(o);
#pragma unroll
    for (int i = 0; i < ITEMS / 2; i++) {
        const int item = ITEMS / 2 + i;
        if (i == ITEMS / 2 - 1 && count)
            count_run(p, t, at);
        multiply_value_item(o, x->p + i * ITEM_UNITS, first_key + i * ITEM_UNITS * UNIT, t, await_item(c, item),
                            c->lane);
        item_done(c, item, s);
    }
}

/* One split's end: the warps' outputs meet in local memory, `buffer` of them in turn; this thread's outputs of the
 * split, all warps combined. */
inline void combine_split(folded *sum, const scores *x, float o[COLUMNS][4 * STEPS], uint outputs_at, uint sums_at,
                          uint *buffer, uint warp, uint lane, const place *at)
{
    uint output = outputs_at + *buffer * OUTPUT_BYTES, sums = sums_at + *buffer * SUM_BYTES;
    if (BUFFERS == 1)
        STREAMING_BARRIER;
    store_warp(x, o, output, sums, warp, lane);
    STREAMING_BARRIER;
    *buffer = (*buffer + 1) % BUFFERS;
    combine_warps(sum, output, sums, at);
}

/* One split of the task: this thread's outputs of it, all warps combined. `count`: the run is counted, before its last
 * values are there. */
inline void work_split(folded *sum, uint queries[QUERY_PARTS][COLUMNS][2 * STEPS], const task *t, int split,
                       float scale_log2, const place *at, consumer *c, stream *s, pending *p, bool count)
{
    scores x;
    float o[COLUMNS][4 * STEPS];
    int first_key = split * SPLIT + (int)c->warp * (UNITS * UNIT);
    multiply_keys(&x, queries, c, s);
    softmax(&x, first_key, t, scale_log2, c->lane);
    multiply_values(o, &x, first_key, t, c, s, p, at, count);
    if (TURNS % 2)
        c->phase ^= 1u;
    combine_split(sum, &x, o, c->base + AT_OUTPUT, c->base + AT_SUMS, &c->buffer, c->warp, c->lane, at);
}

/* What the work-group's first keys wait for, before all else: its task and the blocks of the lane's unit. What they do
 * not wait for is done while the blocks are read. */
typedef struct start {
    task first;
    uint ids[IDS_PER_UNIT];
    sides head;
    bool waits; /* for the task's new token */
} start;

inline void begin(start *to, const tables *all, const sides *kv, bool appends, uint barriers, uint warp, uint lane)
{
    take_first(&to->first, all);
#pragma unroll
    for (int part = 0; part < IDS_PER_UNIT; part++)
        to->ids[part] = (uint)unit_block(&to->first, all, (int)unit_of_lane(warp, lane), part);
    to->head = of_head(kv, to->first.kv_head);
    to->waits = appends && has_newest_key(&to->first) && to->first.behind == 0 && newest_warp(&to->first) == warp;
    if (lane > 0)
        return;
    for (int i = 0; i < STAGES; i++)
        barrier_init(barriers + 8 * i, ITEM_UNITS);
    barrier_init_fence();
}

/* Starts the copies of the first task; every warp waits for the others before it may need a second. */
inline void start_stream(stream *s, const start *from, const consumer *c)
{
    const task *t = &from->first;
    s->alone = one_each(c->all);
    s->ends = s->alone && t->behind == 0;
    s->taken = 0;
    s->turn = c->lane;
    s->left = t->end_split - t->first_split;
#pragma unroll
    for (int part = 0; part < IDS_PER_UNIT; part++)
        place_unit(s, &from->head, from->ids[part], part, t->first_split, unit_of_lane(c->warp, c->lane));
    if (from->waits)
        await_first_token();
    warp_sync();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        copy_item(s, i, c->ring, c->barriers);
    EVERYBODY_BARRIER;
    want_task(s, true, c->base, c->warp, c->lane);
    if (STAGES == ITEMS)
        next_split(s, c->kv, c->all, c->base, c->warp, c->lane);
}

/* One part of a task. */
inline void work_part(folded *sum, const task *t, uint queries_at, float scale_log2, const place *at, consumer *c,
                      stream *s, pending *p)
{
    uint queries[QUERY_PARTS][COLUMNS][2 * STEPS];
    tree levels;
    const int splits = t->end_split - t->first_split;
    load_queries(queries, queries_at, c->lane);
    for (int i = 0; i < splits; i++) {
        work_split(sum, queries, t, t->first_split + i, scale_log2, at, c, s, p,
                   s->alone && t->runs > 1 && t->behind == 0 && i == splits - 1);
        if (splits > 1)
            push(&levels, sum, (uint)i);
    }
    if (splits > 1)
        root(&levels, sum, (uint)splits);
}

/* The streaming warps' work, from the first task on. */
inline void work_tasks(task *t, stream *s, consumer *c, float scale_log2, pending *p, const place *at)
{
    folded sum, parts[PART_LEVELS];
    for (uint n = 0;; n++) { /* one turn more settles the last task */
        const bool there = t->index < (uint)c->all->num_tasks;
        if (there) {
            work_part(&sum, t, query_slot(c->base, n), scale_log2, at, c, s, p);
            join_part(parts, &sum, t);
            if (t->behind > 0) {
                *t = take_published(c->base, n, c->lane);
                continue;
            }
            finish_task(&sum, t, p, at);
        }
        if (s->alone)
            await_count(p, t);
        settle(p, at, s->alone);
        if (!there || s->alone)
            return;
        if (t->runs > 1)
            count_run(p, t, at);
        await_count(p, t);
        *t = take_published(c->base, n, c->lane);
    }
}

/* The queries of the work-group's first task, by the warps that have nothing else to do. */
inline void first_queries(uint base, __global const Q_ELEM *q, long4 q_view, const tables *all, uint warp, uint lane)
{
    task t;
    take(&t, all, (uint)get_group_id(0));
    place_queries(query_slot(base, 0), q, q_view, &t, lane, (int)warp - WARPS - 1, 3);
}

/* No other row reads the block that a row's new key and value go to (lib/attention/fuse.c). */
__attribute__((reqd_work_group_size(THREADS, 1, 1))) __kernel void
kvl_decode(const decode_values in, __global const Q_ELEM *q, __global KV_ELEM *k, __global KV_ELEM *v,
           __global const int *table, __global int *meta, __global const uchar *k_source,
           __global const uchar *v_source, __global OUT_ELEM *out, __global float *lse)
{
    __local uchar memory[48000] __attribute__((aligned(1024)));
    asm volatile("//KVL-LOCAL %0;" ::"n"(LOCAL_BYTES_NEEDED));
    FIND_BUFFERS(q, k, v, k_source, v_source);
    FIND_OUT(q, out);
    uint base = local_address(memory), thread = (uint)get_local_id(0);
    uint warp = warp_broadcast(thread >> 5, 0);
    __global int *counter = meta;
    const tables all = TABLES_OF(in, table, meta);
    const sides kv = {in_bytes((ulong)k, in.k_view), in_bytes((ulong)v, in.v_view)};
    const outputs to = {out, in.out_view, lse, in.lse_view};
    if (warp >= WARPS) {
        asm volatile("//KVL setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp > WARPS) {
            first_queries(base, q, in.q_view, &all, warp, thread & 31u);
            EVERYBODY_BARRIER;
        } else {
            const new_tokens tokens = {in.slots.s0 >= 0,
                                       make_append_work(k_source, in.k_source_view, v_source, in.v_source_view, k,
                                                        in.k_view, v, in.v_view, in.shape, in.work.s3),
                                       (__global const long *)(meta + in.slots.s0), in.slots.s1};
            init_task_barriers(base, thread & 31u);
            write_first_token(&all, &tokens, thread & 31u);
            EVERYBODY_BARRIER;
            publish_tasks(&all, &tokens, q, in.q_view, counter, base, thread & 31u);
        }
    } else {
        const uint barriers = base + AT_RING_BARRIERS + warp * (STAGES * 8);
        start from;
        begin(&from, &all, &kv, in.slots.s0 >= 0, barriers, warp, thread & 31u);
        asm volatile("//KVL setmaxnreg.inc.sync.aligned.u32 232;");
        consumer c = {.base = base,
                      .warp = warp,
                      .lane = thread & 31u,
                      .ring = base + warp * (STAGES * ITEM_BYTES),
                      .barriers = barriers,
                      .kv = &kv,
                      .all = &all};
        place at = {.head = (thread >> 4) % PAIRS * 2 + (thread & 1u), .first = thread};
        at.there = at.head < GROUP;
        stream s;
        start_stream(&s, &from, &c);
        pending p = PENDING_OF(in, meta, &to);
        work_tasks(&from.first, &s, &c, in.scale_log2, &p, &at);
    }
    if (one_each(&all))
        return;
    EVERYBODY_BARRIER;
    if (thread == 0 && atomic_count_relaxed(counter + 1) == (uint)get_num_groups(0) - 1)
        counter[0] = counter[1] = 0;
}
