/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/nvidia/decode_mma.cl"
/* Decode for NVIDIA GPUs from compute capability 8.0, with documented instructions alone: mma.sync and cp.async, within
 * 48 KiB of local memory. One launch. Seen on H200.
 *
 * A work-group takes one task: a run of up to RUN_SPLITS consecutive splits of one (row, KV head). Each of its four
 * warps works a quarter of every split's keys on its own: items of 16 keys and 64 dims come into a ring of its own by
 * asynchronous copies and run on from split to split. Several work-groups share a compute unit, which has so many bytes
 * on their way and something to do while one of them waits.
 *
 * Keys are the matrix product's A operand (16 keys), the query heads of the group its columns; values, transposed on
 * load, are A again. Partials of the warps are combined a split at a time, splits and runs in one fixed binary tree, so
 * the length of a run changes no bit. Each warp counts a row's runs for itself, and the one that counts last folds its
 * outputs of them.
 *
 * Layouts in which eight dims of a key lie together, paged or not. Where they lie at no multiple of 16 bytes they come
 * element by element. */
#include "common/append.clh"
#include "nvidia/decode_mma_copy.clh"
#include "nvidia/decode_mma_split.clh"
#include "nvidia/decode_runs.clh"

#if defined(LONGEST_RUN) && LONGEST_RUN > 1 << (LEVELS - 1)
#error "the host's runs are longer than LEVELS are for"
#endif

/* A warp as it uses up its ring: where the next item comes, and the place of the one before it. */
typedef struct consumer {
    uint stage, freed;
    uint ring;
} consumer;

/* Waits for item n of the split and lets the stream use the stage of the one before; where the item lies. */
inline uint next_item(consumer *c, const stream *s, const task *t, int n, bool more)
{
    uint item = c->stage;
    COPIES_WAIT(AHEAD - 1);
    warp_sync();
    if (n + AHEAD < 2 * ITEMS || more)
        copy_item(s, t, n + AHEAD, c->freed);
    COPIES_COMMIT;
    c->freed = item;
    c->stage = item + ITEM_BYTES == c->ring + RING_BYTES ? c->ring : item + ITEM_BYTES;
    return item;
}

/* The warp's keys and values of the split. `more`: another one follows. */
inline void work_split(scores *x, float o[COLUMNS][4 * STEPS], consumer *c, const stream *s, const task *t,
                       uint queries, bool more, float scale_log2)
{
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x->x[unit][column][i] = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint item = next_item(c, s, t, unit * PARTS + part, more);
            multiply_item_keys(x->x[unit], queries, part, item, s->lane);
        }
    }
    softmax(x, s->first_key, t, scale_log2, s->lane);
    clear_outputs(o);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint item = next_item(c, s, t, ITEMS + unit * PARTS + part, more);
            multiply_item_values(o, x->p[unit], part, item, s->lane);
        }
}

inline void start_stream(stream *s, consumer *c, const task *t, const tables *all, uint warp)
{
    s->first_key = t->first_split * SPLIT + (int)warp * WARP_KEYS;
    load_ids(s->ids, t, all, s->first_key, s->lane);
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
        copy_item(s, t, n, c->ring + n * ITEM_BYTES);
        COPIES_COMMIT;
    }
    c->stage = c->ring;
    c->freed = c->ring + AHEAD * ITEM_BYTES;
}

/* The work-group that has a row's last split writes the row's new key and value before it reads: no other row reads
 * their block (lib/attention/fuse.c). */
#if !LIMITED_REGISTERS
__attribute__((reqd_work_group_size(THREADS, 1, 1)))
#endif
__kernel void
kvl_decode(const decode_values in, __global const Q_ELEM *q, __global KV_ELEM *k, __global KV_ELEM *v,
           __global const int *table, __global int *meta, __global const uchar *k_source,
           __global const uchar *v_source, __global OUT_ELEM *out, __global float *lse)
{
    __local uchar memory[LOCAL_BYTES] __attribute__((aligned(1024)));
    FIND_BUFFERS(q, k, v, k_source, v_source);
    FIND_OUT(q, out);
    uint base = local_address(memory), thread = (uint)get_local_id(0), warp = warp_broadcast(thread >> 5, 0);
    const tables all = TABLES_OF(in, table, meta);
    task t;
    take(&t, &all, (uint)get_group_id(0));
    stream s = {.k = side_of((ulong)k, in.k_view, t.kv_head),
                .v = side_of((ulong)v, in.v_view, t.kv_head),
                .chunks = in_chunks((ulong)k, in.k_view) && in_chunks((ulong)v, in.v_view),
                .lane = thread & 31u};
    consumer c = {.ring = base + AT_RINGS + warp * RING_BYTES};
    if (KV_PAGED && in.slots.s0 >= 0 && t.run == t.runs - 1 && t.visible > 0) {
        const append_work to =
            make_append_work(k_source, in.k_source_view, v_source, in.v_source_view, k, in.k_view, v, in.v_view,
                             in.shape, in.work.s3);
        append_row(&to, t.q_token, t.kv_head,
                   all.num_rows == 1 ? in.slots.s1 : ((__global const long *)(meta + in.slots.s0))[t.q_token]);
        WRITTEN_FENCE;
        STREAMING_BARRIER;
    }
    start_stream(&s, &c, &t, &all, warp);
    place_queries(base + AT_QUERIES, q, in.q_view, &t, s.lane, (int)warp, WARPS);
    place at = {.head = (thread >> 4) % PAIRS * 2 + (thread & 1u), .first = thread};
    at.there = at.head < GROUP;
    const outputs to = {out, in.out_view, lse, in.lse_view};
    pending p = PENDING_OF(in, meta, &to);
    tree levels;
    folded sum;
    STREAMING_BARRIER;
    for (int split = t.first_split; split < t.end_split; split++) {
        bool more = split + 1 < t.end_split;
        s.next_key = s.first_key + SPLIT;
        if (more)
            load_ids(s.next_ids, &t, &all, s.next_key, s.lane);
        scores x;
        float o[COLUMNS][4 * STEPS];
        work_split(&x, o, &c, &s, &t, base + AT_QUERIES, more, in.scale_log2);
        combine_split(&sum, &x, o, base, &at, warp, s.lane);
        push(&levels, &sum, (uint)(split - t.first_split));
        s.first_key = s.next_key;
#pragma unroll
        for (int i = 0; i < IDS; i++)
            s.ids[i] = s.next_ids[i];
    }
    root(&levels, &sum, (uint)(t.end_split - t.first_split));
    finish_task(&sum, &t, &p, &at);
    if (t.runs > 1)
        count_run(&p, &t, &at);
    await_count(&p, &t);
    settle(&p, &at, false);
}
