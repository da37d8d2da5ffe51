/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BLOCKS_H
#define KVL_BLOCKS_H

/* The block manager from inside: what its own files share, and what the managed cache reads directly.
 *
 * A block is in its group's free list if and only if no sequence refers to it, no pending copy reads it and the
 * application did not withhold it (left it out of free_order).
 *
 * Copy-on-write. A block may be shared by sequences that have different numbers of tokens in it; whoever extends into a
 * shared one moves to a block of its own, and the copy of what it had committed is made later, by the next step. Until
 * then the source is pinned: it stays out of the free list and its copied slots are not written. Only committed tokens
 * are ever shared, and a step writes behind its sequence's committed length, so that a sequence that extended into a
 * block before it was shared may go on writing there. Pending copies never form chains: a sequence that shares the
 * destination of a pending copy copies from the original source, so that all of them can be made at once. */

#include <kvleaf/blocks.h>

#include "base/base.h"

enum { KVL_LIST_END = -1, KVL_UNLISTED = -2, KVL_NO_COPY = -1, KVL_MAX_GROUPS = 16 };

typedef struct kvl_block {
    int32_t references;         /* sequences whose table holds it */
    int32_t previous, next;     /* in the free list; next is KVL_UNLISTED where it is in none */
    int32_t pins;               /* pending copies that read it */
    int32_t pinned_slots;       /* slots 0 .. pinned_slots-1 are what they may need */
    int32_t copy;               /* the pending copy that fills it, or KVL_NO_COPY */
    int32_t tails, tail_tokens; /* work space of kvleaf_blocks_query, 0 outside it */
} kvl_block;

/* The blocks to hand out, first to last. All calls are O(1). */
typedef struct kvl_free_list {
    kvl_block *blocks;
    int32_t first, last, count;
} kvl_free_list;

void kvl_free_list_init(kvl_free_list *list, kvl_block *blocks, int32_t num_blocks);
/* Takes the first block; KVL_LIST_END where there is none. */
int32_t kvl_free_list_take(kvl_free_list *list);
/* Appends a block. False, and nothing is changed, where it is listed already. */
bool kvl_free_list_give(kvl_free_list *list, int32_t block);
/* Takes a block from wherever it is. False, and nothing is changed, where it is not listed. */
bool kvl_free_list_remove(kvl_free_list *list, int32_t block);

/* The blocks of one group. */
typedef struct kvl_group {
    int32_t num_blocks;
    kvl_block *blocks;
    kvl_free_list free;
    int32_t used;              /* referred to, pinned, or withheld */
    int32_t pinned;            /* of these, pinned and not referred to */
    kvleaf_block_copy *copies; /* [max_sequences], pending: a sequence's table holds the destination of one at most */
    int32_t num_copies;
    uint64_t copies_done;
} kvl_group;

typedef struct kvl_sequence {
    int64_t committed, planned, extended; /* planned > committed if and only if it is in an open step */
    uint64_t user;
    uint64_t mark;  /* the last call over several sequences that named it: finds one that is named twice */
    int32_t *table; /* [num_groups][capacity], kept by the slot when its sequence is destroyed */
    int32_t capacity;
    int32_t count;          /* of each group's entries: ceil(extended / block_size) */
    int32_t *first_changed; /* [num_groups]: entries from here on differ from what kvl_sequence_uploaded was told of */
    uint32_t generation;
    int32_t next_unused; /* in the list of unused slots; KVL_UNLISTED while it is live */
} kvl_sequence;

struct kvleaf_blocks {
    kvleaf_allocator allocator;
    int32_t block_size, max_sequences, max_blocks_per_seq, num_groups;
    uint64_t tag; /* the manager's own bits of its handles */
    kvl_group groups[KVL_MAX_GROUPS];
    kvl_sequence *sequences; /* [max_sequences] */
    int32_t *first_changed;  /* [max_sequences][num_groups]: the sequences' own */
    int32_t first_unused;    /* last in, first out, so that a warm table is used again */
    int32_t live;
    int64_t tokens;
    uint64_t mark;
};

/* The sequence behind a handle. INVALID: 0, or no manager. FOREIGN, STALE. */
kvleaf_status kvl_sequence_find(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out);

/* A number below max_sequences that is the sequence's own while it lives. */
int32_t kvl_sequence_slot(const kvleaf_blocks *blocks, const kvl_sequence *sequence);

/* The sequence's table in a group; `count` entries of it are in use. */
static inline int32_t *kvl_sequence_table(const kvl_sequence *sequence, int32_t group)
{
    return sequence->table + (size_t)group * (size_t)sequence->capacity;
}

/* Notes that the first `count` entries of a group's table are known elsewhere now; 0 makes all count as changed. */
void kvl_sequence_uploaded(kvl_sequence *sequence, int32_t group, int32_t count);

/* Cuts a sequence that is in no open step, as kvleaf_blocks_seq_truncate; `length` is known to be in range. */
kvleaf_status kvl_sequence_cut(kvleaf_blocks *blocks, kvl_sequence *sequence, int64_t length);

/* Makes a group's blocks and its free list. */
kvleaf_status kvl_group_create(kvleaf_blocks *blocks, int32_t group, const kvleaf_block_group *params);
void kvl_group_destroy(kvleaf_blocks *blocks, int32_t group);

/* INVALID where the group is out of range. */
kvleaf_status kvl_group_check(const kvleaf_blocks *blocks, int32_t group);

/* Blocks that could be taken. */
int32_t kvl_group_available(const kvl_group *group);

/* Takes the first free block, with one reference. The caller knows that there is one. */
int32_t kvl_group_take(kvl_group *group);

/* Whether a reference to each of the ids can be dropped. INVALID for an id out of range or named more often than it has
 * references. */
kvleaf_status kvl_group_check_release(kvl_group *group, const int32_t *ids, int32_t count);

/* Drops a reference to each of ids[count-1] .. ids[0], in this order, and gives back what nothing holds any more. */
void kvl_group_release(kvl_group *group, const int32_t *ids, int32_t count);

/* Whether a write at `slot` of a block needs a copy of the block first. */
bool kvl_group_must_copy(const kvl_group *group, int32_t block, int32_t slot);

/* Moves one reference from `block` to a block taken for it, whose first `slots` slots a pending copy will fill. Returns
 * the new block. The caller knows that one is free. */
int32_t kvl_group_copy_on_write(kvl_group *group, int32_t block, int32_t slots);

#endif
