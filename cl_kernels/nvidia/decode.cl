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
#include "nvidia/decode_tasks.clh"
#include "nvidia/decode_fold.clh"

/* The group's queries as the product's B operand: two registers a 16-dim step; heads and dims that are not there are
 * zero. Where K's dtype can't hold them they are the sum of two that it can. */
inline void load_queries(uint q[QUERY_PARTS][COLUMNS][2 * STEPS], __global const Q_ELEM *base, long4 view,
                         const task *t, uint lane)
{
    uint head = lane >> 2, pair = lane & 3u;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        uint within = column * 8 + head;
        long row = view.s0 + t->q_token * view.s1 + ((long)t->kv_head * GROUP + min(within, (uint)GROUP - 1)) * view.s2;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            int dim = i * 8 + (int)pair * 2;
            bool there = within < GROUP;
            float x = there && dim < HEAD_DIM ? LOAD_Q(base, row + dim) : 0.0f;
            float y = there && dim + 1 < HEAD_DIM ? LOAD_Q(base, row + dim + 1) : 0.0f;
            q[0][column][i] = pack_kv(x, y);
            if (QUERY_PARTS == 2) {
                float2 rounded = unpack_kv(q[0][column][i]);
                q[QUERY_PARTS - 1][column][i] = pack_kv(x - rounded.x, y - rounded.y);
            }
        }
    }
}

/* Scores of the warp's units of a split, from the ring, and their softmax: p as B operand of the value product. */
typedef struct scores {
    float x[UNITS][COLUMNS][4];
    uint p[UNITS][COLUMNS][2];
    float m[COLUMNS][2], l[COLUMNS][2]; /* of heads 2 * (lane & 3) and the next */
} scores;

inline void softmax(scores *s, int first_key, int visible, float scale_log2, uint lane)
{
    int key = first_key + (int)(lane >> 2);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        float m0 = NEGATIVE_INFINITY, m1 = NEGATIVE_INFINITY, l0 = 0.0f, l1 = 0.0f;
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            float *x = s->x[unit][column];
            if (key + unit * UNIT >= visible)
                x[0] = x[1] = NEGATIVE_INFINITY;
            if (key + unit * UNIT + 8 >= visible)
                x[2] = x[3] = NEGATIVE_INFINITY;
            m0 = fmax(m0, fmax(x[0], x[2]));
            m1 = fmax(m1, fmax(x[1], x[3]));
        }
#pragma unroll
        for (uint mask = 4; mask <= 16; mask *= 2) {
            m0 = fmax(m0, warp_xor(m0, mask));
            m1 = fmax(m1, warp_xor(m1, mask));
        }
        m0 *= scale_log2;
        m1 *= scale_log2;
        float minus0 = m0 == NEGATIVE_INFINITY ? 0.0f : -m0, minus1 = m1 == NEGATIVE_INFINITY ? 0.0f : -m1;
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            float *x = s->x[unit][column];
            float p0 = fast_exp2(fma(x[0], scale_log2, minus0)), p1 = fast_exp2(fma(x[1], scale_log2, minus1));
            float p2 = fast_exp2(fma(x[2], scale_log2, minus0)), p3 = fast_exp2(fma(x[3], scale_log2, minus1));
            l0 += p0 + p2;
            l1 += p1 + p3;
            s->p[unit][column][0] = transpose8(pack_kv(p0, p1));
            s->p[unit][column][1] = transpose8(pack_kv(p2, p3));
        }
#pragma unroll
        for (uint mask = 4; mask <= 16; mask *= 2) {
            l0 += warp_xor(l0, mask);
            l1 += warp_xor(l1, mask);
        }
        s->m[column][0] = m0;
        s->m[column][1] = m1;
        s->l[column][0] = l0;
        s->l[column][1] = l1;
    }
}

/* Leaves the warp's unnormalised outputs, maxima and sums of a split in local memory. */
inline void store_warp(const scores *s, float o[COLUMNS][4 * STEPS], uint output, uint sums, uint warp, uint lane)
{
    uint r = lane >> 2, c = lane & 3u;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        uint pair = column * 4 + c;
        if (pair >= PAIRS)
            continue;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            store_local4(output + warp * WARP_OUTPUT_BYTES + (i * PAIRS + pair) * 128 + r * 16, o[column][4 * i],
                         o[column][4 * i + 2], o[column][4 * i + 1], o[column][4 * i + 3]);
        if (r == 0) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                store_local(sums + ((2 * pair + k) * WARPS + warp) * 4, s->m[column][k]);
                store_local(sums + ((2 * PAIRS + 2 * pair + k) * WARPS + warp) * 4, s->l[column][k]);
            }
        }
    }
}

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

/* Address of a lane's row for 16-dim step i of an item: chunk 2 i or 2 i + 1 of its row, at its place in the
 * swizzle. */
inline uint row_address(uint item, uint row_at, int i, uint chunk, uint lane)
{
    return item + row_at + (i >> 2) * 1024 + ((((2u * i + chunk) & 7u) ^ (lane & 7u)) << 4);
}

inline void multiply_keys(scores *x, uint queries[QUERY_PARTS][COLUMNS][2 * STEPS], consumer *c, stream *s)
{
    uint row_at = (c->lane & 7u) * 128 + ((c->lane >> 3) & 1u) * EIGHT_BYTES;
#pragma unroll
    for (int first = 0; first < UNITS; first += ITEM_UNITS) {
        uint item = next_item(c);
#pragma unroll
        for (int unit = 0; unit < ITEM_UNITS; unit++)
#pragma unroll
            for (int column = 0; column < COLUMNS; column++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x->x[first + unit][column][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int unit = 0; unit < ITEM_UNITS; unit++) {
                uint a[4];
                load_matrices(a, row_address(item + unit * UNIT_BYTES, row_at, i, c->lane >> 4, c->lane));
#pragma unroll
                for (int column = 0; column < COLUMNS; column++)
#pragma unroll
                    for (int part = 0; part < QUERY_PARTS; part++)
                        multiply_add(x->x[first + unit][column], a, queries[part][column][2 * i],
                                     queries[part][column][2 * i + 1]);
            }
        item_done(c, s);
    }
}

/* Values of keys that the row does not see are cleared, whatever they hold. */
inline void multiply_values(float o[COLUMNS][4 * STEPS], const scores *x, int first_key, int visible, consumer *c,
                            stream *s)
{
    uint row_at = (c->lane & 7u) * 128 + (c->lane >> 4) * EIGHT_BYTES;
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
#pragma unroll
        for (int i = 0; i < 4 * STEPS; i++)
            o[column][i] = 0.0f;
#pragma unroll
    for (int first = 0; first < UNITS; first += ITEM_UNITS) {
        uint item = next_item(c);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int unit = 0; unit < ITEM_UNITS; unit++) {
                int key = first_key + (first + unit) * UNIT + 2 * (int)(c->lane & 3u);
                uint keep0 = (key < visible ? 0xffffu : 0u) | (key + 1 < visible ? 0xffff0000u : 0u);
                uint keep1 = (key + 8 < visible ? 0xffffu : 0u) | (key + 9 < visible ? 0xffff0000u : 0u);
                uint a[4];
                load_matrices_transposed(a, row_address(item + unit * UNIT_BYTES, row_at, i, (c->lane >> 3) & 1u,
                                                        c->lane));
                a[0] &= keep0;
                a[1] &= keep0;
                a[2] &= keep1;
                a[3] &= keep1;
#pragma unroll
                for (int column = 0; column < COLUMNS; column++)
                    multiply_add(o[column] + 4 * i, a, x->p[first + unit][column][0], x->p[first + unit][column][1]);
            }
        item_done(c, s);
    }
}

/* A run that shares its row with others, on its way from its partial to the row. The work-group that counts last has
 * the row. Each step waits for a barrier that the splits after it need anyway. */
enum { NOT_PENDING, STORED, COUNTED };

typedef struct pending {
    int stage;
    task of;
    uint before; /* thread 0: runs counted before this one */
    __global float *partials;
    __global int *counts; /* of rows and KV heads */
    int num_heads, kv_heads;
    const outputs *to;
} pending;

inline void before_barrier(const pending *p, uint base)
{
    if (p->stage == COUNTED && get_local_id(0) == 0)
        store_local_uint(base + AT_FLAG, p->before);
}

inline void after_barrier(pending *p, uint base, const place *at)
{
    if (p->stage == STORED) {
        if (get_local_id(0) == 0) {
            __global int *count = p->counts + p->of.row * p->kv_heads + p->of.kv_head;
            p->before = atomic_count(count);
            if (p->before == (uint)p->of.runs - 1)
                *count = 0;
        }
        p->stage = COUNTED;
    } else if (p->stage == COUNTED) {
        p->stage = NOT_PENDING;
        if (load_local_uint(base + AT_FLAG) == (uint)p->of.runs - 1) {
            folded row;
            merge_runs(&row, p->partials, &p->of, at, p->num_heads);
            write_row(&row, p->to, &p->of, at);
        }
    }
}

/* Brings a pending run to its end now. */
inline void drain(pending *p, uint base, const place *at)
{
    while (p->stage != NOT_PENDING) {
        before_barrier(p, base);
        STREAMING_BARRIER;
        after_barrier(p, base, at);
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
    softmax(&x, first_key, t->visible, scale_log2, c->lane);
    multiply_values(o, &x, first_key, t->visible, c, s);
    uint output = c->base + AT_OUTPUT + c->buffer * OUTPUT_BYTES, sums = c->base + AT_SUMS + c->buffer * SUM_BYTES;
    if (BUFFERS == 1)
        STREAMING_BARRIER;
    store_warp(&x, o, output, sums, c->warp, c->lane);
    before_barrier(p, c->base);
    STREAMING_BARRIER;
    after_barrier(p, c->base, at);
    c->buffer = (c->buffer + 1) % BUFFERS;
    combine_warps(sum, output, sums, at);
}

/* The end of a task: its row, or its partial. */
inline void finish_task(const folded *sum, const task *t, pending *p, uint base, const place *at)
{
    if (t->runs == 1) {
        write_row(sum, p->to, t, at);
        return;
    }
    drain(p, base, at);
    store_run(sum, p->partials, t, at, p->num_heads);
    p->of = *t;
    p->stage = STORED;
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
                     .to = &to};
        for (uint n = 0; t.index < (uint)all.num_tasks; n++) {
            for (int split = t.first_split; split < t.end_split; split++) {
                work_split(&sum, queries, &t, split, scale_log2, &at, &c, &s, &p);
                push(&levels, &sum, (uint)(split - t.first_split));
            }
            task next = take_published(base, n, c.lane);
            if (next.index < (uint)all.num_tasks)
                load_queries(queries, q, q_view, &next, c.lane);
            root(&levels, &sum, (uint)(t.end_split - t.first_split));
            finish_task(&sum, &t, &p, base, &at);
            t = next;
        }
        drain(&p, base, &at);
    }
    if ((uint)all.num_tasks <= groups)
        return;
    EVERYBODY_BARRIER;
    if (thread == 0 && atomic_count(counter + 1) == groups - 1)
        counter[0] = counter[1] = 0;
}
