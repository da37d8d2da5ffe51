// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/merge.cl"
/* Merges n partial results over disjoint key sets in a fixed binary tree over their index: node i of a level combines
 * nodes 2i and 2i+1 of the level below, a missing right child is neutral (Milakov and Gimelshein, 2018, section 3.1).
 * Launch: global {rows * num_heads * WORK_GROUP}, local {WORK_GROUP}: a work-group per (row, head). */
#include "common/config.clh"
#include "common/dtypes.clh"

#define MERGE_LEVELS 31 /* of a tree over any int of leaves */
#define MERGE_DIMS 4    /* dims a work-item carries through the tree at once: 64 items take head_dim 256 in a walk */

/* m: the running maximum, -infinity where no key was seen, which alone makes a state neutral. */
typedef struct {
    float4 sum;
    float m, l;
} merge_state;

/* The weight of the larger maximum is 1 exactly, so a state passes unchanged through a combination with a
 * neutral one. */
inline merge_state combine(merge_state a, merge_state b)
{
    if (b.m == -INFINITY)
        return a;
    if (a.m == -INFINITY)
        return b;
    bool a_leads = a.m >= b.m;
    merge_state lead = a_leads ? a : b;
    merge_state other = a_leads ? b : a;
    float weight = exp(other.m - lead.m);
    lead.sum = fma(other.sum, (float4)(weight), lead.sum);
    lead.l = fma(other.l, weight, lead.l);
    return lead;
}

/* Dims dim + j * WORK_GROUP of a partial; an empty one's values are never read. */
inline merge_state load_leaf(__global const float *out, float lse, int dim, int head_dim)
{
    merge_state leaf;
    leaf.m = lse;
    leaf.l = 0.0f;
    leaf.sum = (float4)(0.0f);
    if (lse == -INFINITY)
        return leaf;
    leaf.l = 1.0f;
    if (dim < head_dim)
        leaf.sum.s0 = out[dim];
    if (dim + WORK_GROUP < head_dim)
        leaf.sum.s1 = out[dim + WORK_GROUP];
    if (dim + 2 * WORK_GROUP < head_dim)
        leaf.sum.s2 = out[dim + 2 * WORK_GROUP];
    if (dim + 3 * WORK_GROUP < head_dim)
        leaf.sum.s3 = out[dim + 3 * WORK_GROUP];
    return leaf;
}

inline void store_dim(float sum, merge_state root, __global OUT_ELEM *out, int dim, int head_dim)
{
    if (dim >= head_dim)
        return;
    float x = root.l == 1.0f ? sum : sum / root.l;
    x = root.m == -INFINITY ? 0.0f : x;
    STORE_OUT(x, out, dim);
}

/* outs float32 by {offset, part_stride, token_stride, head_stride}, lses likewise; out by {offset, token_stride,
 * head_stride, 0}, lse by {offset, token_stride, head_stride, written or not}; work = {n, rows, 0, 0}. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_merge(__global const float *outs, long4 outs_view, __global const float *lses, long4 lses_view,
          __global OUT_ELEM *out, long4 out_view, __global float *lse, long4 lse_view, int4 shape, int4 work)
{
    int num_heads = shape.s0;
    int head_dim = SHAPE_HEAD_DIM(shape);
    int row = (int)get_group_id(0) / num_heads;
    int head = (int)get_group_id(0) % num_heads;
    if (row >= work.s1)
        return;
    outs += outs_view.s0 + (long)row * outs_view.s2 + (long)head * outs_view.s3;
    lses += lses_view.s0 + (long)row * lses_view.s2 + (long)head * lses_view.s3;
    out += out_view.s0 + (long)row * out_view.s1 + (long)head * out_view.s2;
    int lane = (int)get_local_id(0);

    for (int dim = lane; dim - lane < head_dim; dim += MERGE_DIMS * WORK_GROUP) {
        merge_state stack[MERGE_LEVELS]; /* the open left child of each level */
        for (int i = 0; i < work.s0; i++) {
            merge_state state = load_leaf(outs + i * outs_view.s1, lses[i * lses_view.s1], dim, head_dim);
            int level = 0;
            for (; (i >> level) & 1; level++)
                state = combine(stack[level], state);
            stack[level] = state;
        }
        merge_state root;
        root.sum = (float4)(0.0f);
        root.m = -INFINITY;
        root.l = 0.0f;
        for (int level = 0; level < MERGE_LEVELS; level++)
            if ((work.s0 >> level) & 1)
                root = combine(stack[level], root);
        store_dim(root.sum.s0, root, out, dim, head_dim);
        store_dim(root.sum.s1, root, out, dim + WORK_GROUP, head_dim);
        store_dim(root.sum.s2, root, out, dim + 2 * WORK_GROUP, head_dim);
        store_dim(root.sum.s3, root, out, dim + 3 * WORK_GROUP, head_dim);
        if (dim == 0 && lse_view.s3)
            lse[lse_view.s0 + (long)row * lse_view.s1 + (long)head * lse_view.s2] =
                root.l == 1.0f || root.m == -INFINITY ? root.m : root.m + log(root.l);
    }
}
