// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/table.cl"
/* Writes the changed entries of the device's block table.
 * Launch: global {count rounded up to WORK_GROUP}, local {WORK_GROUP}. */
#include "common/config.clh"

/* work = {updates_offset, count, 0, 0}; updates as plan.h has them, each index at most once. */
__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_table_update(__global int *table, __global const int *meta, int4 work)
{
    int i = (int)get_global_id(0);
    if (i >= work.s1)
        return;
    __global const int *update = meta + work.s0 + (long)i * UPDATE_INTS;
    table[update[UPDATE_INDEX]] = update[UPDATE_BLOCK];
}
