/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SAVED_SUPPORT_H
#define KVL_SAVED_SUPPORT_H

/* From one manager into another. */

#include "blocks_support.h"

#include "blocks/saved.h"

enum { BLOCK = 4, MAX_SEQS = 16 };

/* 64 ids; the array is used again after 15 more calls. */
static inline const int32_t *ids_from(int32_t first)
{
    static int32_t ids[16][64], next;
    int32_t *at = ids[next++ % 16];
    for (int32_t i = 0; i < 64; i++)
        at[i] = first + i;
    return at;
}

/* Saves from one manager and loads into another; the status of the load. */
static inline kvleaf_status carry(const kvleaf_blocks *from, const kvleaf_seq *seqs, int32_t n, bool prefix_cache,
                                  kvleaf_blocks *to, kvleaf_seq *loaded)
{
    kvl_save save;
    kvl_load load;
    assert_ok(kvl_save_begin(from, seqs, n, prefix_cache, &save));
    kvleaf_status status = kvl_load_begin(to, &save.saved, loaded, &load);
    if (!status)
        kvl_load_end(to, &save.saved, &load, loaded, true);
    kvl_save_free(from, &save);
    check_blocks(from, 0);
    check_blocks(to, 0);
    return status;
}

#endif
