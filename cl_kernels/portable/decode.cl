// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/decode.cl"
/* Decode on any device: split attention of single query rows, and the fold of the splits.
 *
 * A work-group takes a run of splits of one row for one KV head, one after the other, and the query heads of that
 * group four at a time as a float4. For the scores a work-item holds a few tokens and walks the dims, so that a query
 * element read from local memory serves all of them; for the values it holds eight dims and walks the tokens. Both
 * walks keep the loads of their next step in flight. A split's end is a fixed position, and nothing here depends on how
 * many work-groups run, how long their runs are or where blocks lie. */
#include "common/append.clh"
#include "common/config.clh"
#include "common/decode_values.h"
#include "common/dtypes.clh"
#include "common/fold.clh"
#include "common/layout.clh"
#include "common/masks.clh"
#include "common/octet.clh"
#include "common/softmax.clh"
#include "portable/decode_run.clh"

/* Functions here are `inline` and never `static`: PoCL takes a local array that static functions alone see for one that
 * a barrier leaves as it is, and moves reads across. */

#if WORK_GROUP > 256
#error "local memory is laid out for work-groups of up to 256"
#endif

/* Tokens a work-item holds in the scores: four make local memory no slower than the arithmetic. */
#ifndef SCORE_TOKENS
#define SCORE_TOKENS 4
#endif
/* Value rows a work-item has in flight beyond those it is adding. */
#ifndef VALUE_TOKENS
#define VALUE_TOKENS 4
#endif

/* Work-items side by side over the tokens; where there are more, they share out the dims. */
#define TOKEN_LANES (WORK_GROUP * SCORE_TOKENS < SPLIT_TOKENS ? WORK_GROUP : SPLIT_TOKENS / SCORE_TOKENS)
#define DIM_PARTS (WORK_GROUP / TOKEN_LANES)
/* Where the walks have a fixed length, two turns in one spare moving what was read ahead. */
#ifdef HEAD_DIM
#define UNROLL_TWICE _Pragma("unroll 2")
#else
#define UNROLL_TWICE
#endif
/* Whether splits are known to begin with a block, and the blocks that one may touch. */
#if !KV_PAGED
#define ALIGNED_SPLITS 0
#define MAX_TILES 1
#elif !defined(BLOCK_SIZE)
#define ALIGNED_SPLITS 0
#define MAX_TILES (SPLIT_TOKENS + 1)
#else
#define ALIGNED_SPLITS (SPLIT_TOKENS % BLOCK_SIZE == 0)
#define MAX_TILES ((SPLIT_TOKENS - 1) / BLOCK_SIZE + 2)
#endif
/* Sums of the dim parts, then one maximum or sum a work-item, then eight dims a work-item. */
#define SCRATCH_PARTS ((DIM_PARTS - 1) * SPLIT_TOKENS)
#define SCRATCH_LANES (2 * WORK_GROUP)
#define SCRATCH (SCRATCH_PARTS > SCRATCH_LANES ? SCRATCH_PARTS : SCRATCH_LANES)

/* The split a work-group works on. */
typedef struct {
    int begin, count; /* its keys: positions begin .. begin + count - 1 */
    int skip;         /* of which so many lie before its row's window */
    int last;         /* last key its row sees */
    int first_block;  /* entry of the block table that tiles[0] is of */
    int skew;         /* token of that block where the split begins */
    int block_size, head_dim, octets;
} split;

inline split make_split(__global const int *row, int index, int block_size, int head_dim)
{
    split s;
    int first = first_of_row(row), visible_keys = row[ROW_VISIBLE];
    s.begin = (first / SPLIT_TOKENS + index) * SPLIT_TOKENS;
    s.count = clamp(visible_keys - s.begin, 0, SPLIT_TOKENS);
    s.skip = max(first - s.begin, 0);
    s.last = visible_keys - 1;
    s.first_block = BLOCK_OF(s.begin, block_size);
    s.skew = ALIGNED_SPLITS ? 0 : TOKEN_OF(s.begin, block_size);
    s.block_size = block_size;
    s.head_dim = head_dim;
    s.octets = (head_dim + 7) / 8;
    return s;
}

inline long tile_of(__local const long *tiles, const split *s, int token)
{
    return tiles[BLOCK_OF(s->skew + token, s->block_size)];
}

/* Where an octet of a token of the split lies. */
inline long find_octet(__local const long *tiles, const split *s, long4 view, int value, int token, int index)
{
    return tile_of(tiles, s, token) + element_offset(view, value, s->block_size, s->head_dim,
                                                     TOKEN_OF(s->skew + token, s->block_size), index * 8);
}

/* One dim of the tokens held: sums[i] += dim D of token i * that dim of the query, four heads at once. */
#define ADD_DIM(D)                                                                                                     \
    {                                                                                                                  \
        float4 element = query[c * 8 + D];                                                                             \
        _Pragma("unroll") for (int i = 0; i < SCORE_TOKENS; i++)                                                       \
            sums[i] = fma((float4)(keys[i].s##D), element, sums[i]);                                                   \
    }

/* Writes q . k of the split's tokens, four heads each, to products[token]; the work-items that share out the dims write
 * theirs to parts[part - 1][token]. Keys of bad blocks give a number that nobody reads. */
inline void multiply_keys(__global const KV_ELEM *k, long4 view, const split *s, __local const long *tiles,
                          __local const float4 *query, __local float4 *products, __local float4 *parts)
{
    int lane = (int)get_local_id(0) % TOKEN_LANES;
    int part = (int)get_local_id(0) / TOKEN_LANES;
    int turns = s->octets % DIM_PARTS == 0 ? s->octets / DIM_PARTS : (s->octets - part + DIM_PARTS - 1) / DIM_PARTS;
    long octet_stride = KEY_OCTET_STRIDE(s->block_size);
    for (int first = lane; first < s->count; first += TOKEN_LANES * SCORE_TOKENS) {
        float4 sums[SCORE_TOKENS];
        octet ahead[SCORE_TOKENS];
        long at[SCORE_TOKENS]; /* of a token past the end: the first one's */
        int row[SCORE_TOKENS];
#pragma unroll
        for (int i = 0; i < SCORE_TOKENS; i++) {
            int token = first + i * TOKEN_LANES < s->count ? first + i * TOKEN_LANES : first;
            at[i] = find_octet(tiles, s, view, 0, token, 0);
            row[i] = token % 8; /* splits and tiles begin at multiples of 8 where that matters */
            sums[i] = (float4)(0.0f);
            ahead[i] = OCTET_ZERO;
            if (part < s->octets)
                ahead[i] = read_octet(k, at[i] + key_octet(row[i], part, octet_stride), OCTET_STEP(0),
                                      s->head_dim - part * 8);
        }
        UNROLL_TWICE
        for (int turn = 0; turn < turns; turn++) {
            float8 keys[SCORE_TOKENS];
            int c = part + turn * DIM_PARTS, next = c + DIM_PARTS;
#pragma unroll
            for (int i = 0; i < SCORE_TOKENS; i++) {
                octet current = ahead[i];
                if (turn + 1 < turns)
                    ahead[i] = read_octet(k, at[i] + key_octet(row[i], next, octet_stride), OCTET_STEP(0),
                                          s->head_dim - next * 8);
                keys[i] = widen_octet(current);
            }
            ADD_DIM(0) ADD_DIM(1) ADD_DIM(2) ADD_DIM(3) ADD_DIM(4) ADD_DIM(5) ADD_DIM(6) ADD_DIM(7)
        }
        __local float4 *out = part == 0 ? products : parts + (part - 1) * SPLIT_TOKENS;
#pragma unroll
        for (int i = 0; i < SCORE_TOKENS; i++)
            if (first + i * TOKEN_LANES < s->count)
                out[first + i * TOKEN_LANES] = sums[i];
    }
}

/* Turns products into scores, NEGATIVE where hidden; returns the work-item's maximum. `whole`: every key is there. */
inline float4 mask_scores(const split *s, int whole, __local const long *v_tiles,
                          __local float4 *products, __local const float4 *parts, int first_head)
{
    float4 maximum = (float4)(NEGATIVE);
    for (int token = (int)get_local_id(0); token < SPLIT_TOKENS; token += WORK_GROUP) {
        int key = s->begin + token;
        float4 x = (float4)(NEGATIVE);
        int there = whole || (token < s->count && tile_of(v_tiles, s, token) >= 0);
        if (there && visible(key, s->begin + s->skip, s->last)) {
            x = products[token];
            for (int part = 1; part < DIM_PARTS; part++)
                x += parts[(part - 1) * SPLIT_TOKENS + token];
            x = score_heads(x, first_head, key, s->last);
        }
        products[token] = x;
        maximum = fmax(maximum, x);
    }
    return maximum;
}

/* The maximum or the sum over the work-group, in a fixed tree. Every work-item takes part. */
inline float4 reduce_max(float4 x, __local float4 *scratch)
{
    int lane = (int)get_local_id(0);
    scratch[lane] = x;
    for (int width = WORK_GROUP / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < width)
            scratch[lane] = fmax(scratch[lane], scratch[lane + width]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float4 all = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

inline float4 reduce_sum(float4 x, __local float4 *scratch)
{
    int lane = (int)get_local_id(0);
    scratch[lane] = x;
    for (int width = WORK_GROUP / 2; width > 0; width /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < width)
            scratch[lane] += scratch[lane + width];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float4 all = scratch[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return all;
}

/* Turns scores into weights under the maximum; returns the work-item's sum. */
inline float4 weigh_scores(__local float4 *scores, float4 maximum)
{
    float4 sum = (float4)(0.0f);
    for (int token = (int)get_local_id(0); token < SPLIT_TOKENS; token += WORK_GROUP) {
        float4 weight = weigh_heads(scores[token], maximum);
        scores[token] = weight;
        sum += weight;
    }
    return sum;
}

/* A work-item's place in the walk over the values: octet `lane` of a pass, tokens `group`, group + groups, ... Those
 * left over where lanes do not divide the work-group hold no token. `exact`: every token that the walk meets is there,
 * and so is every octet. */
typedef struct {
    int lanes, groups, lane, group;
    int exact;
} value_place;

inline value_place place_values(const split *s, int whole)
{
    int id = (int)get_local_id(0);
    value_place at;
    at.lanes = min(s->octets, WORK_GROUP);
    at.groups = WORK_GROUP / at.lanes;
    at.lane = id % at.lanes;
    at.group = id / at.lanes < at.groups ? id / at.lanes : SPLIT_TOKENS;
    at.exact = whole && SPLIT_TOKENS % (at.groups * VALUE_TOKENS) == 0 && s->octets % at.lanes == 0 &&
               at.groups * at.lanes == WORK_GROUP;
    return at;
}

/* Where the value octet of a work-item's n-th token lies. Where a block holds a fixed number of them and the layout is
 * linear in the token, all but the tile is spelt as constants. */
inline long find_value(__local const long *tiles, const split *s, long4 view, const value_place *at, uint n,
                       int index)
{
#if ALIGNED_SPLITS && KV_LAYOUT != LAYOUT_CPU16
    if (s->block_size % at->groups == 0) {
        uint per_block = (uint)(s->block_size / at->groups);
        int further = (int)(n % per_block) * at->groups;
        return tiles[n / per_block] + element_offset(view, 1, s->block_size, s->head_dim, at->group, index * 8) +
               element_offset(view, 1, s->block_size, s->head_dim, further, 0);
    }
#endif
    return find_octet(tiles, s, view, 1, at->group + (int)n * at->groups, index);
}

/* Value octets of a turn of VALUE_TOKENS of the work-item's tokens; zero where there is none or its block is bad. */
inline void read_values(octet *ahead, __global const KV_ELEM *v, long4 view, const split *s,
                        __local const long *tiles, const value_place *at, int turn, int index)
{
#pragma unroll
    for (int i = 0; i < VALUE_TOKENS; i++) {
        int n = turn * VALUE_TOKENS + i, token = at->group + n * at->groups;
        if (at->exact) {
            ahead[i] = read_octet(v, find_value(tiles, s, view, at, (uint)n, index), OCTET_STEP(1),
                                  s->head_dim - index * 8);
        } else {
            ahead[i] = OCTET_ZERO;
            if (index < s->octets && token >= s->skip && token < s->count && tile_of(tiles, s, token) >= 0)
                ahead[i] = read_octet(v, find_octet(tiles, s, view, 1, token, index), OCTET_STEP(1),
                                      s->head_dim - index * 8);
        }
    }
}

inline void add_value(float8 *sums, octet x, float4 weight)
{
    float8 value = widen_octet(x);
    sums[0] = fma((float8)(weight.s0), value, sums[0]);
    sums[1] = fma((float8)(weight.s1), value, sums[1]);
    sums[2] = fma((float8)(weight.s2), value, sums[2]);
    sums[3] = fma((float8)(weight.s3), value, sums[3]);
}

/* The weighted values of four heads: sums[head] over the work-item's tokens. `ahead` holds its first ones. Both walks
 * add the same numbers in the same order. */
inline void add_values(float8 *sums, octet *ahead, __global const KV_ELEM *v, long4 view, const split *s,
                       const value_place *at, __local const long *tiles, __local const float4 *weights,
                       int index)
{
    octet current[VALUE_TOKENS];
    int step = at->groups * VALUE_TOKENS;
    if (at->exact) {
        int turns = SPLIT_TOKENS / step;
        UNROLL_TWICE
        for (int turn = 0; turn < turns; turn++) {
#pragma unroll
            for (int i = 0; i < VALUE_TOKENS; i++)
                current[i] = ahead[i];
            if (turn + 1 < turns)
                read_values(ahead, v, view, s, tiles, at, turn + 1, index);
#pragma unroll
            for (int i = 0; i < VALUE_TOKENS; i++)
                add_value(sums, current[i], weights[at->group + turn * step + i * at->groups]);
        }
        return;
    }
    for (int turn = 0; at->group + turn * step < s->count; turn++) {
#pragma unroll
        for (int i = 0; i < VALUE_TOKENS; i++)
            current[i] = ahead[i];
        read_values(ahead, v, view, s, tiles, at, turn + 1, index);
#pragma unroll
        for (int i = 0; i < VALUE_TOKENS; i++)
            if (at->group + turn * step + i * at->groups < s->count)
                add_value(sums, current[i], weights[at->group + turn * step + i * at->groups]);
    }
}

/* Adds up one head's sums over the work-items that hold the same dims: `head` of the four from `first` on. They go on
 * through the tree of the run, the last split's to the partial. */
inline void store_values(float8 sum, __local float4 *scratch, __global float *accumulator, const value_place *at,
                         int first_octet, int head_dim, const run_step *step, int first, int head, __local float *nodes)
{
    int id = (int)get_local_id(0);
    scratch[2 * id] = sum.lo;
    scratch[2 * id + 1] = sum.hi;
    barrier(CLK_LOCAL_MEM_FENCE);
    __local const float *dims = (__local const float *)scratch;
    for (int i = id; i < at->lanes * 8 && first_octet * 8 + i < head_dim; i += WORK_GROUP) {
        float total = dims[i];
        for (int group = 1; group < at->groups; group++)
            total += dims[group * at->lanes * 8 + i];
        total = meet_sums(step, total, first, head, first_octet * 8 + i, nodes);
        if (step->level == RUN_LEVELS)
            accumulator[first_octet * 8 + i] = total;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

inline void store_sums(float4 maximum, float4 sum, __global float *partial, int stride, int heads, int head_dim)
{
    if (get_local_id(0) != 0)
        return;
    for (int head = 0; head < heads; head++) {
        partial[head * stride + PARTIAL_M(head_dim)] = maximum.s0;
        partial[head * stride + PARTIAL_L(head_dim)] = sum.s0;
        maximum = maximum.s1230;
        sum = sum.s1230;
    }
}

/* Where the split's tiles of K and V start. A bad block, or one that lies before the window, has a V tile of -1; its K
 * tile is that of block 0, which is there, so that reading needs no branch, and its scores are hidden. *bad = 1 where
 * there is one. */
inline void find_tiles(__global const int *table, int first, const split *s, int num_blocks, long4 k_view,
                       long4 v_view, int kv_head, __local long *k_tiles, __local long *v_tiles,
                       __local int *bad)
{
    if (get_local_id(0) == 0)
        *bad = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    int count = s->count > 0 ? BLOCK_OF(s->begin + s->count - 1, s->block_size) - s->first_block + 1 : 0;
    for (int i = (int)get_local_id(0); i < count; i += WORK_GROUP) {
        long v_tile = -1;
        if (!WINDOWED || !KV_PAGED || (i + 1) * s->block_size - s->skew > s->skip)
            v_tile = find_tile(table, first, s->first_block + i, num_blocks, v_view, kv_head);
        k_tiles[i] = v_tile < 0 ? tile_start(k_view, 0, kv_head)
                                : find_tile(table, first, s->first_block + i, num_blocks, k_view, kv_head);
        v_tiles[i] = v_tile;
        if (v_tile < 0)
            atomic_or(bad, 1);
    }
}

/* Four query heads, scaled; zero beyond the group and in dims that only fill an octet. */
inline void load_query(__global const Q_ELEM *q, long head_stride, int heads, int head_dim, float scale_log2,
                       __local float4 *out)
{
    for (int dim = (int)get_local_id(0); dim < (head_dim + 7) / 8 * 8; dim += WORK_GROUP) {
        float4 x = (float4)(0.0f);
        if (dim < head_dim) {
            x.s0 = LOAD_Q(q, dim);
            if (heads > 1)
                x.s1 = LOAD_Q(q, head_stride + dim);
            if (heads > 2)
                x.s2 = LOAD_Q(q, 2 * head_stride + dim);
            if (heads > 3)
                x.s3 = LOAD_Q(q, 3 * head_stride + dim);
        }
        out[dim] = x * scale_log2;
    }
}

/* What the work-items of a work-group share. */
typedef struct {
    __local float4 *query, *scores, *scratch, *scales;
    __local float *nodes;
    __local long *k_tiles, *v_tiles;
    __local int *bad;
} shared_memory;

/* Split n of a run of `count`, whose partial `partial` is: the heads of one KV head. */
inline void work_split(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view,
                       __global const KV_ELEM *v, long4 v_view, const split *s, int n, int count, int kv_head,
                       int group, float scale_log2, __global float *partial, const shared_memory *at)
{
    int whole = s->count == SPLIT_TOKENS && s->skip == 0 && !*at->bad;
    value_place place = place_values(s, whole);
    int stride = PARTIAL_STRIDE(s->head_dim);

    for (int first = 0; first < group; first += 4, partial += 4 * stride) {
        int first_head = kv_head * group + first, heads = min(4, group - first);
        load_query(q + first_head * q_view.s2, q_view.s2, heads, s->head_dim, scale_log2, at->query);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_keys(k, k_view, s, at->k_tiles, at->query, at->scores, at->scratch);
        octet ahead[VALUE_TOKENS];
        read_values(ahead, v, v_view, s, at->v_tiles, &place, 0, place.lane);
        barrier(CLK_LOCAL_MEM_FENCE);
        float4 maximum = mask_scores(s, whole, at->v_tiles, at->scores, at->scratch, first_head);
        barrier(CLK_LOCAL_MEM_FENCE);
        maximum = reduce_max(maximum, at->scratch);
        float4 sum = reduce_sum(weigh_scores(at->scores, maximum), at->scratch);

        run_step step = meet_nodes(n, n + 1 == count, first, &maximum, &sum, at->scales);
        if (step.level == RUN_LEVELS)
            store_sums(maximum, sum, partial, stride, heads, s->head_dim);
        else
            keep_scales(&step, first, maximum, sum, at->scales);
        for (int pass = 0; pass < s->octets; pass += place.lanes) {
            float8 sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (pass > 0)
                read_values(ahead, v, v_view, s, at->v_tiles, &place, 0, pass + place.lane);
            add_values(sums, ahead, v, v_view, s, &place, at->v_tiles, at->scores, pass + place.lane);
#pragma unroll
            for (int head = 0; head < 4; head++)
                if (head < heads)
                    store_values(sums[head], at->scratch, partial + head * stride, &place, pass, s->head_dim, &step,
                                 first, head, at->nodes);
        }
    }
}

/* The work-group that has a row's last split writes the row's new key and value before it reads: no other row reads
 * their block (lib/attention/fuse.c). */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_decode(const decode_values in, __global const Q_ELEM *q, __global KV_ELEM *k, __global KV_ELEM *v,
           __global const int *table, __global int *meta, __global const uchar *k_source,
           __global const uchar *v_source)
{
    __local float4 query[DIM_CAPACITY], scores[SPLIT_TOKENS], scratch[SCRATCH], scales[RUN_SCALES];
    __local float nodes[RUN_SUMS];
    __local long k_tiles[MAX_TILES], v_tiles[MAX_TILES];
    __local int bad;
    const shared_memory at = {query, scores, scratch, scales, nodes, k_tiles, v_tiles, &bad};
    FIND_BUFFERS(q, k, v, k_source, v_source);
    __global const int *item = meta + in.work.s1 + (int)get_group_id(0) * RUN_INTS;
    __global const int *row = meta + in.work.s0 + item[RUN_ROW] * ROW_INTS;
    int kv_head = (int)get_group_id(1), group = SHAPE_GROUP(in.shape), run = item[RUN_INDEX];
    int first = run * item[RUN_SPLITS], count = clamp(splits_of_row(row) - first, 0, item[RUN_SPLITS]);
    __global float *partials = (__global float *)(meta + in.workspace.s1);
    __global float *partial = partials + ((long)(row[ROW_PARTIAL] + run) * in.shape.s0 + kv_head * group) *
                                             PARTIAL_STRIDE(SHAPE_HEAD_DIM(in.shape));
    q += in.q_view.s0 + (long)row[ROW_Q_TOKEN] * in.q_view.s1;
#if KV_PAGED
    if (in.slots.s0 >= 0 && row[ROW_VISIBLE] > 0 && first + count == splits_of_row(row)) {
        const append_work to = make_append_work(k_source, in.k_source_view, v_source, in.v_source_view, k, in.k_view, v,
                                                in.v_view, in.shape, in.work.s3);
        append_row(&to, row[ROW_Q_TOKEN], kv_head, ((__global const long *)(meta + in.slots.s0))[row[ROW_Q_TOKEN]]);
    }
#endif

    for (int n = 0; n < count; n++) {
        split s = make_split(row, first + n, SHAPE_BLOCK_SIZE(in.shape), SHAPE_HEAD_DIM(in.shape));
        find_tiles(table, row[ROW_TABLE], &s, in.work.s3, in.k_view, in.v_view, kv_head, k_tiles, v_tiles, &bad);
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
        work_split(q, in.q_view, k, in.k_view, v, in.v_view, &s, n, count, kv_head, group, in.scale_log2, partial,
                   &at);
    }
}

inline void store_output(fold_node root, __global OUT_ELEM *out, int quad, int head_dim)
{
    int dim = quad * 4;
    STORE_OUT(normalise(root.sum.s0, root.l), out, dim);
    if (dim + 1 < head_dim)
        STORE_OUT(normalise(root.sum.s1, root.l), out, dim + 1);
    if (dim + 2 < head_dim)
        STORE_OUT(normalise(root.sum.s2, root.l), out, dim + 2);
    if (dim + 3 < head_dim)
        STORE_OUT(normalise(root.sum.s3, root.l), out, dim + 3);
}

/* A work-group folds one head of one row: work-items side by side take four dims each, and the others a run of splits,
 * which is a subtree of the fixed tree, so the bits don't depend on how many there are. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_fold(__global const int *meta, __global OUT_ELEM *out, long4 out_view, __global float *lse, long4 lse_view,
         int4 shape, long2 work)
{
    __local float4 sums[WORK_GROUP];
    __local float2 scales[WORK_GROUP];
    int num_heads = shape.s0;
    int head_dim = SHAPE_HEAD_DIM(shape);
    int head = (int)get_group_id(0) % num_heads, id = (int)get_local_id(0);
    __global const int *row = meta + work.s0 + (int)get_group_id(0) / num_heads * ROW_INTS;
    int count = (splits_of_row(row) + row[ROW_RUN] - 1) / row[ROW_RUN];
    int stride = PARTIAL_STRIDE(head_dim);
    __global const float *partials =
        (__global const float *)(meta + work.s1) + ((long)row[ROW_PARTIAL] * num_heads + head) * stride;
    out += out_view.s0 + (long)row[ROW_Q_TOKEN] * out_view.s1 + head * out_view.s2;

    int lanes = 1, length = 1;
    while (lanes < WORK_GROUP && lanes * 4 < head_dim)
        lanes *= 2;
    int runs = WORK_GROUP / lanes;
    while ((long)length * runs < count)
        length *= 2;
    int first = id / lanes * length;
    for (int quad = id % lanes; quad - id % lanes < (head_dim + 3) / 4; quad += lanes) {
        bool holds = first < count && quad * 4 < head_dim;
        fold_node root;
        root.sum = (float4)(0.0f);
        root.m = NEGATIVE;
        root.l = 0.0f;
        if (holds)
            root = fold_run(partials, (long)num_heads * stride, first, min(first + length, count), quad, head_dim);
        for (int width = 1; width < runs; width *= 2) {
            if (id / lanes % width == 0) {
                sums[id] = root.sum;
                scales[id] = (float2)(root.m, root.l);
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (id / lanes % (2 * width) == 0 && holds && first + width * length < count) {
                fold_node right;
                right.sum = sums[id + width * lanes];
                right.m = scales[id + width * lanes].x;
                right.l = scales[id + width * lanes].y;
                root = fold_pair(root, right);
            }
        }
        if (holds && first == 0)
            store_output(root, out, quad, head_dim);
        if (id == 0 && quad == 0 && lse_view.s3)
            lse[lse_view.s0 + (long)row[ROW_Q_TOKEN] * lse_view.s1 + head * lse_view.s2] =
                natural_lse(root.m, root.l);
    }
}
