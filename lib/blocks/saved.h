/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SAVED_H
#define KVL_SAVED_H

/* Sequences and index entries outside of a manager, as a snapshot holds them, and their way out and in.
 *
 * A record is what one block holds; in each group they are numbered from 0. Sequences and entries that share a block
 * name the same record, so that loading restores the sharing, that of a partial last block included. */

#include "blocks/blocks.h"

typedef struct kvl_saved_seq {
    uint64_t user, salt, ttl_ms;
    int32_t priority, no_prefix;
    int64_t tokens;             /* committed ones; columns = ceil(tokens / block_size) */
    int64_t known;              /* leading tokens whose ids are known */
    const int32_t *ids;         /* [known]; KVL_UNKNOWN where an id went with its block */
    const kvl_content *content; /* [columns] */
    const int32_t *records;     /* [num_groups][columns]; KVLEAF_NO_BLOCK before those in the window */
} kvl_saved_seq;

typedef struct kvl_saved_entry {
    uint64_t salt;
    uint64_t ttl_ms; /* that are left, 0 = no end */
    kvl_content content;
    int32_t parent; /* an earlier entry, or KVL_NO_ENTRY */
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

/* What is to be saved, and where it lies. */
typedef struct kvl_save {
    kvl_saved saved;
    int32_t *blocks[KVL_MAX_GROUPS]; /* [num_records]: the block to read a record from */
    int32_t *tokens[KVL_MAX_GROUPS]; /* [num_records]: its slots that hold tokens, the first ones */
    void *parts[9];                  /* what it allocated */
} kvl_save;

/* Looks up n sequences' committed tokens and, if asked for, the prefix index. *out is to be freed where this succeeds,
 * and is right until the next call on the manager. FOREIGN, STALE, INVALID, NO_MEMORY. */
kvleaf_status kvl_save_begin(const kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t n, bool prefix_cache,
                             kvl_save *out);
void kvl_save_free(const kvleaf_blocks *blocks, kvl_save *save);

/* A record on its way in: the block that it goes to, and what all that name it must agree on. */
typedef struct kvl_load_record {
    int32_t block; /* KVLEAF_NO_BLOCK until it is known */
    bool fill;     /* the block was taken for it; else the index had it */
    bool wanted;   /* something will hold it */
    bool named, entered;
    int32_t column, known;
    uint64_t salt, before[2]; /* before: the hash of its chain up to there; 0, 0 where that is not known */
    const int32_t *ids;       /* [known] */
    const kvl_content *content;
} kvl_load_record;

typedef struct kvl_load {
    kvl_load_record *records[KVL_MAX_GROUPS]; /* [num_records] */
    int32_t *entries;                         /* [num_entries] of the index; KVL_NO_ENTRY = not yet */
    bool held[KVL_MAX_GROUPS];                /* the blocks that the index had are held against eviction */
    int32_t num_seqs;                         /* made so far */
} kvl_load;

/* Loads in two phases, between which the manager must not be called. begin makes the sequences, empty, in seqs and
 * takes a block for each record that the index does not hold, all or nothing; the caller fills those. end, with `done`,
 * gives sequences and index what was saved; without, everything is as before the begin, but for cached blocks that had
 * to be evicted. CORRUPT: what is saved contradicts itself. FOREIGN: another block size, other groups or windows.
 * NO_BLOCKS. TOO_SMALL: max_sequences, max_blocks_per_seq. NO_MEMORY. */
kvleaf_status kvl_load_begin(kvleaf_blocks *blocks, const kvl_saved *saved, kvleaf_seq *seqs, kvl_load *out);
void kvl_load_end(kvleaf_blocks *blocks, const kvl_saved *saved, kvl_load *load, kvleaf_seq *seqs, bool done);

#endif
