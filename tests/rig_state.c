/* SPDX-License-Identifier: Apache-2.0 */
/* What a rig's cache says of itself. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "rig.h"

kvleaf_blocks_stats rig_stats(const rig *r)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    ASSERT_OK(kvleaf_cache_query(r->cache, &stats));
    assert_int_equal(stats.total, stats.used + stats.cached + stats.free);
    return stats;
}

void rig_check_lengths(const rig *r, const rig_seq *seq, int32_t planned)
{
    kvleaf_seq_info info = {.struct_size = sizeof info};
    ASSERT_OK(kvleaf_seq_query(r->cache, seq->seq, &info));
    assert_int_equal(info.committed, seq->committed);
    assert_int_equal(info.planned, planned);
    assert_int_equal(info.extended, seq->extended);
}

void rig_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
}
