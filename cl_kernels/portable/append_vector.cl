// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/append_vector.cl"
/* Scatters new keys and values to their slots, eight dims at a time: for layouts in which eight dims of a token lie
 * together at a multiple of 16 bytes, and 16-bit elements. Any device.
 * Launch: global {num_kv_heads * WORK_GROUP, ceil(num_tokens / ITEM_TOKENS)}, local {WORK_GROUP, 1}: a work-group per
 * KV head and ITEM_TOKENS tokens, which in a prompt lie in one block. */
#include "common/config.clh"
#include "common/dtypes.clh"
#include "common/layout.clh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef BLOCK_SIZE
#define BLOCK_SIZE 16
#endif
#ifndef ITEM_TOKENS
#define ITEM_TOKENS 16
#endif

#if KV_LAYOUT == LAYOUT_SWIZZLE8
#define CHUNKS ((HEAD_DIM + 63) / 64 * 8) /* the padding takes part in matrix products, so it is written too */
#else
#define CHUNKS ((HEAD_DIM + 7) / 8)
#endif

/* Where the eight dims of a work-item come from, and whether 16-byte loads of them may be made. */
typedef struct origin {
    __global const uchar *base;
    long4 view; /* offset, token stride, head stride, dtype */
    int wide;
} origin;

inline origin make_origin(__global const uchar *base, long4 view)
{
    ulong odd = ((ulong)base / 2 + (ulong)view.s0) % 8 | (ulong)view.s1 % 8 | (ulong)view.s2 % 8 | HEAD_DIM % 8;
    origin from = {base, view, view.s3 == KV_DTYPE && odd == 0};
    return from;
}

/* Eight dims as the cache stores them; zeros behind the head's last dim. */
inline uint4 load_chunk(const origin *from, int token, int head, int dim)
{
    long at = from->view.s0 + (long)token * from->view.s1 + (long)head * from->view.s2 + dim;
    if (from->wide && dim < HEAD_DIM)
        return *(__global const uint4 *)((__global const ushort *)from->base + at);
    ushort stored[8];
    for (int i = 0; i < 8; i++) {
        float x = dim + i < HEAD_DIM ? load_any(from->base, at + i, (int)from->view.s3) : 0.0f;
        STORE_KV(x, (KV_ELEM *)stored, i);
    }
    return (uint4)(stored[0] | (uint)stored[1] << 16, stored[2] | (uint)stored[3] << 16,
                   stored[4] | (uint)stored[5] << 16, stored[6] | (uint)stored[7] << 16);
}

inline void store_chunk(__global KV_ELEM *target, long4 view, int value, int block, int head, int in_block, int dim,
                        uint4 chunk)
{
    long at = tile_start(view, block, head) + element_offset(view, value, BLOCK_SIZE, HEAD_DIM, in_block, dim);
    *(__global uint4 *)((__global ushort *)target + at) = chunk;
}

/* Arguments as portable/append.cl has them. A slot outside the pool writes nothing. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_append(__global const uchar *k_source, long4 k_source_view, __global const uchar *v_source, long4 v_source_view,
           __global KV_ELEM *k, long4 k_view, __global KV_ELEM *v, long4 v_view, __global const int *meta, int4 shape,
           int4 work)
{
    int head = (int)get_group_id(0), first = (int)get_group_id(1) * ITEM_TOKENS;
    __global const long *slots = (__global const long *)(meta + work.s0);
    const origin from_k = make_origin(k_source, k_source_view), from_v = make_origin(v_source, v_source_view);
    int tokens = min(ITEM_TOKENS, work.s1 - first);
    for (int x = (int)get_local_id(0); x < tokens * CHUNKS; x += WORK_GROUP) {
        int token = first + x / CHUNKS, dim = x % CHUNKS * 8;
        long slot = slots[token];
        if (slot < 0 || slot >= (long)work.s2 * BLOCK_SIZE)
            continue;
        uint4 key = load_chunk(&from_k, token, head, dim), value = load_chunk(&from_v, token, head, dim);
        int block = (int)((ulong)slot / BLOCK_SIZE), in_block = (int)((ulong)slot % BLOCK_SIZE);
        store_chunk(k, k_view, 0, block, head, in_block, dim, key);
        store_chunk(v, v_view, 1, block, head, in_block, dim, value);
    }
}
