// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/copy.cl"
/* Copies whole blocks of one layer as raw bytes in units of UNIT bytes.
 * Launch: global {pieces * WORK_GROUP, pairs}, local {WORK_GROUP, 1}: the pieces share a block between them. */
#include "common/config.clh"

#ifndef UNIT /* bytes moved at once; block_bytes is a multiple of it */
#define UNIT 4
#endif
#if UNIT == 16
typedef uint4 copy_unit;
#elif UNIT == 4
typedef uint copy_unit;
#else
#error "UNIT is 4 or 16"
#endif

/* pairs: {source, destination} blocks from pairs[first_int]. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_copy_blocks(__global copy_unit *memory, __global const int *pairs, int first_int, ulong block_bytes)
{
    int pair = (int)get_group_id(1);
    ulong units = block_bytes / UNIT;
    __global const copy_unit *source = memory + (ulong)pairs[first_int + 2 * pair] * units;
    __global copy_unit *target = memory + (ulong)pairs[first_int + 2 * pair + 1] * units;
    for (ulong at = get_global_id(0); at < units; at += get_global_size(0))
        target[at] = source[at];
}
