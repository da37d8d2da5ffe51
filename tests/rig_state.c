/* SPDX-License-Identifier: Apache-2.0 */
/* Whole steps of a rig, and what its cache says of itself. */
#define _POSIX_C_SOURCE 200809L
#include <time.h>

#include "rig.h"

void rig_run(rig *r, const rig_step *step, const char *what)
{
    ASSERT_OK(rig_build(r, step));
    rig_layers(r, step, what);
    rig_commit(r, step, NULL);
}

void rig_run_one(rig *r, rig_seq *seq, int32_t num_q, kvleaf_family family, const char *what)
{
    const rig_step step = {.seqs = {seq}, .num_q = {num_q}, .n = 1, .family = family};
    rig_run(r, &step, what);
}

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
