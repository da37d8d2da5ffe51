// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/append.cl"
/* Scatters new keys and values to their slots. Any layout, any dtype, any device.
 * Launch: global {num_tokens * WORK_GROUP, num_kv_heads}, local {WORK_GROUP, 1}: a work-group per (token, KV head). */
#include "common/append.clh"

/* Sources [num_tokens, num_kv_heads, head_dim] by views {offset, token_stride, head_stride, dtype}; int64 slots
 * [num_tokens] at meta + work.s0; work = {slots_offset, num_tokens, num_blocks, 0}. A slot outside the pool writes
 * nothing. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_append(__global const uchar *k_source, long4 k_source_view, __global const uchar *v_source, long4 v_source_view,
           __global KV_ELEM *k, long4 k_view, __global KV_ELEM *v, long4 v_view, __global const int *meta, int4 shape,
           int4 work)
{
    int token = (int)get_group_id(0);
    if (token >= work.s1)
        return;
    const append_work to = make_append_work(k_source, k_source_view, v_source, v_source_view, k, k_view, v, v_view,
                                            shape, work.s2);
    append_row(&to, token, (int)get_group_id(1), ((__global const long *)(meta + work.s0))[token]);
}
