// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/cpu/merge.cl"
/* Merges n partial results over disjoint key sets in a fixed binary tree over their index: node i of a level combines
 * nodes 2i and 2i+1 of the level below, a missing right child is neutral (Milakov and Gimelshein, 2018, section 3.1).
 * Launch: global {rows * num_heads}, local {1}: a work-item per (row, head), explicit vectors. */
#include "common/config.clh"
#include "common/dtypes.clh"

#define MERGE_LEVELS 31  /* of a tree over any int of leaves */
#define MERGE_VECTORS 16 /* of 16 dims: head_dim up to 256 */

typedef float16 __attribute__((aligned(4))) float16_at_element;

/* m: the running maximum, -infinity where no key was seen, which alone makes a state neutral and its sum unread. */
typedef struct {
    float16 sum[MERGE_VECTORS];
    float m, l;
} merge_state;

/* right = combine(left, right). The weight of the larger maximum is 1 exactly, so a state passes unchanged through a
 * combination with a neutral one. */
inline void combine(const merge_state *left, merge_state *right, int vectors)
{
    if (left->m == -INFINITY)
        return;
    if (right->m == -INFINITY) {
        for (int i = 0; i < vectors; i++)
            right->sum[i] = left->sum[i];
        right->m = left->m;
        right->l = left->l;
        return;
    }
    if (left->m >= right->m) {
        float weight = exp(right->m - left->m);
        for (int i = 0; i < vectors; i++)
            right->sum[i] = fma(right->sum[i], (float16)(weight), left->sum[i]);
        right->m = left->m;
        right->l = fma(right->l, weight, left->l);
    } else {
        float weight = exp(left->m - right->m);
        for (int i = 0; i < vectors; i++)
            right->sum[i] = fma(left->sum[i], (float16)(weight), right->sum[i]);
        right->l = fma(left->l, weight, right->l);
    }
}

inline void load_leaf(__global const float *out, float lse, merge_state *leaf, int head_dim)
{
    leaf->m = lse;
    leaf->l = 1.0f;
    if (lse == -INFINITY)
        return;
    int vectors = head_dim / 16;
    for (int i = 0; i < vectors; i++)
        leaf->sum[i] = *(__global const float16_at_element *)(out + i * 16);
    if (head_dim % 16) {
        leaf->sum[vectors] = (float16)(0.0f);
        for (int dim = vectors * 16; dim < head_dim; dim++)
            ((float *)leaf->sum)[dim] = out[dim];
    }
}

inline void store_root(const merge_state *root, __global OUT_ELEM *out, int head_dim)
{
    const float *sum = (const float *)root->sum;
    bool empty = root->m == -INFINITY;
    for (int dim = 0; dim < head_dim; dim++) {
        float x = empty ? 0.0f : root->l == 1.0f ? sum[dim] : sum[dim] / root->l;
        STORE_OUT(x, out, dim);
    }
}

/* outs float32 by {offset, part_stride, token_stride, head_stride}, lses likewise; out by {offset, token_stride,
 * head_stride, 0}, lse by {offset, token_stride, head_stride, written or not}; work = {n, rows, 0, 0}. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_merge(__global const float *outs, long4 outs_view, __global const float *lses, long4 lses_view,
          __global OUT_ELEM *out, long4 out_view, __global float *lse, long4 lse_view, int4 shape, int4 work)
{
    int row = (int)get_group_id(0) / shape.s0;
    int head = (int)get_group_id(0) % shape.s0;
    if (row >= work.s1)
        return;
    int head_dim = SHAPE_HEAD_DIM(shape);
    int vectors = (head_dim + 15) / 16;
    outs += outs_view.s0 + row * outs_view.s2 + head * outs_view.s3;
    lses += lses_view.s0 + row * lses_view.s2 + head * lses_view.s3;

    merge_state stack[MERGE_LEVELS]; /* the open left child of each level */
    for (int i = 0; i < work.s0; i++) {
        int open = 0; /* left children that wait for this leaf: its place once they are combined with it */
        while ((i >> open) & 1)
            open++;
        load_leaf(outs + i * outs_view.s1, lses[i * lses_view.s1], &stack[open], head_dim);
        for (int level = 0; level < open; level++)
            combine(&stack[level], &stack[open], vectors);
    }
    merge_state root;
    root.m = -INFINITY;
    root.l = 0.0f;
    for (int level = 0; level < MERGE_LEVELS; level++)
        if ((work.s0 >> level) & 1)
            combine(&stack[level], &root, vectors);
    store_root(&root, out + out_view.s0 + row * out_view.s1 + head * out_view.s2, head_dim);
    if (lse_view.s3)
        lse[lse_view.s0 + row * lse_view.s1 + head * lse_view.s2] =
            root.l == 1.0f || root.m == -INFINITY ? root.m : root.m + log(root.l);
}
