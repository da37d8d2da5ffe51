/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SAVED_H
#define KVL_SAVED_H

/* Sequences and index entries outside of a manager, as a snapshot holds them.
 *
 * A record is what one block holds; in each group they are numbered from 0. Sequences and entries that share a block
 * name the same record, so that loading restores the sharing, that of a partial last block included. */

#include <kvleaf/blocks.h>

typedef struct kvl_saved_seq {
    uint64_t user, salt, ttl_ms;
    int32_t priority, no_prefix;
    int64_t tokens;          /* committed ones; columns = ceil(tokens / block_size) */
    int64_t known;           /* leading tokens whose ids are known */
    const int32_t *ids;      /* [known] */
    const uint64_t *content; /* [columns][2] the content digest of each block */
    const int32_t *records;  /* [num_groups][columns]; KVLEAF_NO_BLOCK where the block left its window */
} kvl_saved_seq;

typedef struct kvl_saved_entry {
    uint64_t salt, ttl_ms;
    uint64_t content[2];
    int32_t parent; /* an earlier entry, -1 = none */
    int32_t priority;
    const int32_t *ids;     /* [block_size] */
    const int32_t *records; /* [num_groups]; KVLEAF_NO_BLOCK where the group does not have the block any more */
} kvl_saved_entry;

typedef struct kvl_saved {
    int32_t block_size, num_groups;
    int32_t num_seqs, num_entries;
    const int32_t *windows;     /* [num_groups] tokens, 0 = none */
    const int32_t *num_records; /* [num_groups] */
    const kvl_saved_seq *seqs;
    const kvl_saved_entry *entries;
} kvl_saved;

#endif
