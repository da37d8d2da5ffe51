// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/copy.cl"
/* Copies whole blocks of one layer, K and V, as raw bytes in units of UNIT bytes, within a pool or from one to another.
 * Launch: global {pieces * WORK_GROUP, count, 2}, local {WORK_GROUP, 1, 1}: the pieces share a block between them. */
#include "common/config.clh"

#ifndef UNIT /* bytes moved at once; block_bytes is a multiple of it */
#define UNIT 1
#endif
#if UNIT == 16
typedef uint4 copy_unit;
#elif UNIT == 4
typedef uint copy_unit;
#elif UNIT == 1
typedef uchar copy_unit;
#else
#error "UNIT is 1, 4 or 16"
#endif

/* pairs: {source, destination} blocks from pairs[first_int]. k_to and v_to may be k_from and v_from. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_copy_blocks(__global const copy_unit *k_from, __global const copy_unit *v_from, __global copy_unit *k_to,
                __global copy_unit *v_to, __global const int *pairs, int first_int, int count, ulong block_bytes)
{
    int pair = (int)get_group_id(1);
    if (pair >= count)
        return;
    ulong units = block_bytes / UNIT;
    __global const copy_unit *source =
        (get_group_id(2) ? v_from : k_from) + (ulong)pairs[first_int + 2 * pair] * units;
    __global copy_unit *target = (get_group_id(2) ? v_to : k_to) + (ulong)pairs[first_int + 2 * pair + 1] * units;
    for (ulong at = get_global_id(0); at < units; at += get_global_size(0))
        target[at] = source[at];
}
