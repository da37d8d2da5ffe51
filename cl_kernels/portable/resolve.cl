/* SPDX-License-Identifier: Apache-2.0 */
#line 3 "cl_kernels/portable/resolve.cl"
/* Lengths that only the device knows: the schedule is made for upper bounds, and this kernel lowers the bounds in the
 * plan's tables to what the device's array says. Records of three ints: where in the tables the length stands, whose
 * it is, and what to subtract (keys behind the ones a row sees). */
#include "common/config.clh"

__kernel void kvl_resolve(__global int *meta, __global const int *lens, long first, int4 work)
{
    int record = (int)get_global_id(0);
    if (record >= work.s1)
        return;
    __global const int *fields = meta + work.s0 + 3 * record;
    int keys = max(lens[first + fields[1]], 0) - fields[2];
    meta[fields[0]] = min(meta[fields[0]], keys);
}
