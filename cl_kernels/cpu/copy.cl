// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/cpu/copy.cl"
/* Copies whole blocks of one layer as raw bytes in units of 64.
 * Launch: global {pieces, pairs}, local {1, 1}: the pieces share a block between them. */
#include "common/config.clh"

#define UNIT 64
typedef uint16 __attribute__((aligned(4))) copy_unit;

/* pairs: {source, destination} blocks from pairs[first_int]; block_bytes is a multiple of UNIT. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_copy_blocks(__global uchar *memory, __global const int *pairs, int first_int, ulong block_bytes)
{
    int pair = (int)get_group_id(1);
    ulong units = block_bytes / UNIT;
    ulong pieces = get_num_groups(0);
    ulong begin = units * get_group_id(0) / pieces;
    ulong end = units * (get_group_id(0) + 1) / pieces;
    __global const copy_unit *source =
        (__global const copy_unit *)(memory + (ulong)pairs[first_int + 2 * pair] * block_bytes);
    __global copy_unit *target = (__global copy_unit *)(memory + (ulong)pairs[first_int + 2 * pair + 1] * block_bytes);
    for (ulong at = begin; at < end; at++)
        target[at] = source[at];
}
