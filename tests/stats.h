/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_STATS_H
#define KVL_STATS_H

#include <kvleaf/blocks.h>

/* Field by field: the bytes between fields say nothing. */
static inline bool same_stats(const kvleaf_blocks_stats *a, const kvleaf_blocks_stats *b)
{
    return a->total == b->total && a->used == b->used && a->cached == b->cached && a->free == b->free &&
           a->pinned == b->pinned && a->sequences == b->sequences && a->swapped == b->swapped &&
           a->indexed == b->indexed && a->host_total == b->host_total && a->host_used == b->host_used &&
           a->tokens == b->tokens && a->slots_wasted == b->slots_wasted && a->copies == b->copies &&
           a->looked_up == b->looked_up && a->hits == b->hits && a->evictions == b->evictions &&
           a->swapped_out == b->swapped_out && a->swapped_in == b->swapped_in;
}

#endif
