// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/append_vector.cl"
/* Scatters new keys and values to their slots, eight dims at a time: for layouts in which eight dims of a token lie
 * together at a multiple of 16 bytes, and 16-bit elements. Any device.
 * Launch: global {num_kv_heads * WORK_GROUP, ceil(num_tokens / ITEM_TOKENS)}, local {WORK_GROUP, 1}: a work-group per
 * KV head and ITEM_TOKENS tokens, which in a prompt lie in one block. */
#define APPEND_EIGHT 1
#include "common/append.clh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef ITEM_TOKENS
#define ITEM_TOKENS 16
#endif

/* Arguments as portable/append.cl has them. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_append(__global const uchar *k_source, long4 k_source_view, __global const uchar *v_source, long4 v_source_view,
           __global KV_ELEM *k, long4 k_view, __global KV_ELEM *v, long4 v_view, __global const int *meta, int4 shape,
           int4 work)
{
    const append_work to = make_append_work(k_source, k_source_view, v_source, v_source_view, k, k_view, v, v_view,
                                            shape, work.s2);
    int head = (int)get_group_id(0), first = (int)get_group_id(1) * ITEM_TOKENS;
    __global const long *slots = (__global const long *)(meta + work.s0);
    int tokens = min(ITEM_TOKENS, work.s1 - first);
    for (int x = (int)get_local_id(0); x < tokens * ROW_PIECES(HEAD_DIM); x += WORK_GROUP) {
        int token = first + x / ROW_PIECES(HEAD_DIM);
        append_piece(&to, token, head, slots[token], x % ROW_PIECES(HEAD_DIM));
    }
}
