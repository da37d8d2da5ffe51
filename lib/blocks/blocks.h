/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BLOCKS_H
#define KVL_BLOCKS_H

/* The block manager from inside: what its own files share, and what the managed cache reads directly.
 *
 * A block is listed if and only if no sequence refers to it, nothing holds it (a pending copy that reads it, a pin) and
 * the application did not withhold it (left it out of free_order): in the free list, or, where the prefix index finds
 * it, in the cached list of its priority.
 *
 * Copy-on-write. A block may be shared by sequences that have different numbers of tokens in it; whoever extends into a
 * shared one moves to a block of its own, and the copy of what it had committed is made later, by the next step. Until
 * then the source is pinned: it stays out of the lists and its copied slots are not written. Only committed tokens are
 * ever shared, and a step writes behind its sequence's committed length, so that a sequence that extended into a block
 * before it was shared may go on writing there. Pending copies never form chains: a sequence that shares the
 * destination of a pending copy copies from the original source, so that all of them can be made at once.
 *
 * Token ids live with the block of the primary group that holds the tokens, not with the sequence, so that sharing
 * copies nothing. */

#include <kvleaf/blocks.h>

#include "base/base.h"

enum {
    KVL_LIST_END = -1,
    KVL_UNLISTED = -2,
    KVL_NO_COPY = -1,
    KVL_NO_ENTRY = -1,
    KVL_NO_HOST = -1,
    KVL_MAX_GROUPS = 16,
    KVL_PRIORITIES = KVLEAF_PRIORITY_HIGH - KVLEAF_PRIORITY_LOW + 1
};

/* The id of a token whose id is not known. */
#define KVL_UNKNOWN INT32_MIN

/* As large as a cache line: taking one costs a miss. */
typedef struct kvl_block {
    int32_t references;         /* sequences whose table holds it */
    int32_t previous, next;     /* in a list; next is KVL_UNLISTED where it is in none */
    int32_t entry;              /* what finds it in the prefix index, or KVL_NO_ENTRY */
    int32_t copy;               /* the pending copy that fills it, or KVL_NO_COPY */
    int32_t host;               /* the host block that holds the same, or KVL_NO_HOST */
    int32_t pins;               /* pending copies that read it */
    int32_t user_pins;          /* kvleaf_blocks_pin */
    int32_t holds;              /* these, and those of the indexed blocks behind it */
    int16_t pinned_slots;       /* slots 0 .. pinned_slots-1 are what pending copies may need */
    int16_t priority;           /* these three from when it lost its last reference */
    uint64_t last_use, expires; /* milliseconds; expires 0 = never */
    int32_t tails, tail_tokens; /* work space of kvleaf_blocks_query, 0 outside it */
} kvl_block;

/* A list of blocks, first to last. All calls are O(1). */
typedef struct kvl_block_list {
    kvl_block *blocks;
    int32_t first, last, count;
} kvl_block_list;

void kvl_list_init(kvl_block_list *list, kvl_block *blocks);
/* Takes the first block; KVL_LIST_END where there is none. */
int32_t kvl_list_take(kvl_block_list *list);
/* Appends a block. False, and nothing is changed, where it is listed already. */
bool kvl_list_give(kvl_block_list *list, int32_t block);
/* The same, before one that is there; KVL_LIST_END: behind all. */
bool kvl_list_insert(kvl_block_list *list, int32_t block, int32_t before);
/* Takes a block from wherever it is. False, and nothing is changed, where it is not listed. */
bool kvl_list_remove(kvl_block_list *list, int32_t block);

/* A block of host memory for swapped sequences. */
typedef struct kvl_host_block {
    int32_t references;  /* swapped sequences whose table holds it */
    int32_t block;       /* the block that holds the same, or KVLEAF_NO_BLOCK */
    int32_t next_unused; /* in the list of unused ones */
} kvl_host_block;

/* The blocks of one group. */
typedef struct kvl_group {
    int32_t num_blocks;
    int32_t window; /* 0 = none */
    kvl_block *blocks;
    kvl_block_list free;                   /* in the order in which they were freed */
    kvl_block_list cached[KVL_PRIORITIES]; /* lowest first; each least recently used first, a chain deepest first */
    int32_t num_cached;
    int32_t indexed;
    int32_t used;              /* referred to, held, or withheld */
    int32_t pinned;            /* of these, held and not referred to */
    kvleaf_block_copy *copies; /* [max_sequences], pending: a sequence's table holds the destination of one at most */
    int32_t num_copies;
    uint64_t copies_done, evictions;
    kvl_host_block *hosts; /* [num_hosts] */
    int32_t num_hosts, hosts_used, first_unused_host;
    uint64_t swapped_out, swapped_in; /* blocks copied */
} kvl_group;

/* What spans say of the tokens of a block: a digest of what they said slot by slot, 0 where they said nothing. */
typedef struct kvl_content {
    uint64_t digest[2];
    int32_t end; /* the last slot that it speaks of, and 1 */
} kvl_content;

/* The prefix index (lib/blocks/index.h). */
typedef struct kvl_entry kvl_entry;
typedef struct kvl_index {
    kvl_entry *entries; /* [blocks of the primary group]; NULL = nothing is indexed */
    int32_t *partners; /* [the same][num_groups]: the blocks of the other groups; KVLEAF_NO_BLOCK where there is none */
    int32_t *buckets;  /* [num_buckets]: entries by hash, first of a chain */
    int32_t *roots;    /* [num_buckets]: entries without parent by salt, latest first */
    int64_t num_buckets;
    uint64_t serial;
    bool one_hash; /* all hashes are the same: for tests */
} kvl_index;

typedef enum kvl_residence {
    KVL_RESIDENT,
    KVL_LEAVING, /* between the begin and the end of a swap */
    KVL_SWAPPED, /* its tables name host blocks */
    KVL_RETURNING
} kvl_residence;

/* What an entry of a table becomes by the swap that is open. */
typedef struct kvl_swap_entry {
    int32_t group, index, host;
    int32_t block;
    bool found; /* the block holds the same already */
} kvl_swap_entry;

/* The swap that is open, and the memory of all: as many entries as host blocks. */
typedef struct kvl_swap {
    kvl_swap_entry *entries;
    kvleaf_swap_copy *copies;
    int32_t num_entries, num_copies;
    int32_t *ids;          /* [host blocks of the primary group][block_size] */
    kvl_content *contents; /* [host blocks of the primary group] */
    int32_t sequences;     /* swapped out */
} kvl_swap;

typedef struct kvl_sequence {
    int64_t committed, planned, extended; /* planned > committed if and only if it is in an open step */
    int64_t known;                        /* leading tokens whose ids are known */
    int64_t cached;                       /* found in the prefix cache */
    kvleaf_seq_params params;
    uint64_t mark;  /* the last call over several sequences that named it: finds one that is named twice */
    int32_t *table; /* [num_groups][capacity], kept by the slot when its sequence is destroyed */
    int32_t capacity;
    int32_t *spare; /* [num_groups][spare_capacity]: the table it takes next, by kvleaf_blocks_seq_rearrange */
    int32_t spare_capacity;
    int32_t count;                         /* of each group's entries: ceil(extended / block_size) */
    int32_t first_changed[KVL_MAX_GROUPS]; /* entries from here on differ from what kvl_sequence_uploaded was told of;
                                              that an entry left a window does not count */
    int32_t first_held[KVL_MAX_GROUPS];    /* entries before it are KVLEAF_NO_BLOCK */
    int32_t indexed;                       /* leading blocks whose entries, or identical ones, are in the index ... */
    int32_t tip;                           /* ... the last of them ... */
    uint64_t tip_serial;                   /* ... if it still has this serial */
    bool outdated;                         /* it has tokens from before kvleaf_blocks_prefix_clear */
    kvl_residence residence;
    int32_t peak_blocks;
    uint32_t generation;
    int32_t next_unused; /* in the list of unused slots; KVL_UNLISTED while it is live */
} kvl_sequence;

struct kvleaf_blocks {
    kvleaf_allocator allocator;
    int32_t block_size, max_sequences, max_blocks_per_seq, num_groups;
    int32_t block_shift; /* log2 of block_size, or -1: a division costs as much as all else that extend does */
    int32_t primary; /* the group whose blocks the index is about: the first without a window, else of the largest */
    uint64_t tag;    /* the manager's own bits of its handles */
    kvl_group groups[KVL_MAX_GROUPS];
    kvl_index index;
    int32_t *ids;            /* [blocks of the primary group][block_size] */
    kvl_content *contents;   /* [blocks of the primary group] */
    kvl_sequence *sequences; /* [max_sequences] */
    kvl_sequence *before;    /* [before_capacity]: work space of kvleaf_blocks_seq_rearrange */
    int32_t before_capacity;
    kvl_swap swap;
    int32_t first_unused; /* last in, first out, so that a warm table is used again */
    int32_t live;
    int64_t tokens;
    uint64_t mark;
    uint64_t looked_up, hits; /* tokens */
    kvleaf_eviction eviction;
    kvleaf_event_fn event;
    void *event_user;
    uint64_t (*now_ms)(void *user);
    void *now_user;
};

/* The sequence behind a handle. INVALID: 0, or no manager. FOREIGN, STALE. */
kvleaf_status kvl_sequence_find(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out);

/* A number below max_sequences that is the sequence's own while it lives. */
int32_t kvl_sequence_slot(const kvleaf_blocks *blocks, const kvl_sequence *sequence);

/* The sequence's table in a group; `count` entries of it are in use. */
static inline int32_t *kvl_sequence_table(const kvl_sequence *sequence, int32_t group)
{
    size_t at = (size_t)group * (size_t)sequence->capacity;
    return at > 0 ? sequence->table + at : sequence->table; /* which is NULL until an entry is needed */
}

/* Notes that the first `count` entries of a group's table are known elsewhere now; 0 makes all count as changed. */
void kvl_sequence_uploaded(kvl_sequence *sequence, int32_t group, int32_t count);

/* BUSY in an open step, or swapped out. */
kvleaf_status kvl_sequence_check_idle(const kvl_sequence *sequence, kvleaf_seq seq);

/* BUSY where it is swapped out. */
kvleaf_status kvl_sequence_check_resident(const kvl_sequence *sequence, kvleaf_seq seq);

/* As kvl_sequence_find, and checked to be idle. */
kvleaf_status kvl_sequence_find_idle(const kvleaf_blocks *blocks, kvleaf_seq seq, kvl_sequence **out);

/* The same for seqs[at]; INVALID where this call named it before. */
kvleaf_status kvl_sequence_find_once(const kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t at,
                                     kvl_sequence **out);

/* Makes room for `count` entries in its tables. */
kvleaf_status kvl_sequence_reserve(kvleaf_blocks *blocks, kvl_sequence *sequence, int32_t count);

/* Cuts a sequence that is in no open step, as kvleaf_blocks_seq_truncate; `length` is known to be in range. */
kvleaf_status kvl_sequence_cut(kvleaf_blocks *blocks, kvl_sequence *sequence, int64_t length);

/* Gives back the blocks before the windows of position `committed`. */
void kvl_sequence_leave_windows(kvleaf_blocks *blocks, kvl_sequence *sequence);

/* The first entry of a group's table that a row at `position` sees. */
int32_t kvl_first_seen(const kvleaf_blocks *blocks, int32_t group, int64_t position);

/* Takes note of how many blocks it holds. */
void kvl_sequence_note_peak(const kvleaf_blocks *blocks, kvl_sequence *sequence);

/* Makes a group's blocks and its lists. */
kvleaf_status kvl_group_create(kvleaf_blocks *blocks, int32_t group, const kvleaf_block_group *params);
void kvl_group_destroy(kvleaf_blocks *blocks, int32_t group);

/* INVALID where the group is out of range. */
kvleaf_status kvl_group_check(const kvleaf_blocks *blocks, int32_t group);

/* Blocks that could be taken. */
int32_t kvl_group_available(const kvl_group *group);

/* Takes the first free block, or evicts a cached one, with one reference. The caller knows that there is one. */
int32_t kvl_group_take(kvleaf_blocks *blocks, int32_t group);

/* Adds a reference. What the block holds is worth it: it is used or cached, or free and still linked to a host block.
 */
void kvl_group_refer(kvleaf_blocks *blocks, int32_t group, int32_t block);

/* Whether a reference to each of the ids can be dropped. INVALID for an id out of range or named more often than it has
 * references. */
kvleaf_status kvl_group_check_release(kvl_group *group, const int32_t *ids, int32_t count);

/* Drops a reference to each of ids[count-1] .. ids[0], in this order, and gives back what nothing holds any more, on
 * the terms of a sequence. */
void kvl_group_release(kvleaf_blocks *blocks, int32_t group, const int32_t *ids, int32_t count,
                       const kvleaf_seq_params *terms);

/* Whether a write at `slot` of a block needs a copy of the block first. */
bool kvl_group_must_copy(const kvl_group *group, int32_t block, int32_t slot);

/* Moves one reference from `block` to a block taken for it, whose first `slots` slots a pending copy will fill. Returns
 * the new block. The caller knows that one is free. */
int32_t kvl_group_copy_on_write(kvleaf_blocks *blocks, int32_t group, int32_t block, int32_t slots,
                                const kvleaf_seq_params *terms);

/* Makes a copy pending that a pin holds the source of. */
void kvl_group_fill(kvl_group *group, int32_t source, int32_t destination);

/* evict.c: milliseconds by the manager's clock. */
uint64_t kvl_blocks_now(const kvleaf_blocks *blocks);
/* Lists a block that nothing refers to or holds, and takes one out of its list. */
void kvl_group_list(kvleaf_blocks *blocks, int32_t group, int32_t block);
void kvl_group_unlist(kvleaf_blocks *blocks, int32_t group, int32_t block);
/* The cached block that goes next; there is one. */
int32_t kvl_group_victim(kvleaf_blocks *blocks, int32_t group);
/* Holds a block as kvleaf_blocks_pin does `count` times, without the ones before it; a negative count lets go. */
void kvl_group_hold(kvleaf_blocks *blocks, int32_t group, int32_t block, int32_t count);
/* Holds a block for a pending copy of its first slots, and ends that. */
void kvl_group_pin(kvleaf_blocks *blocks, int32_t group, int32_t block, int32_t slots);
void kvl_group_unpin(kvleaf_blocks *blocks, int32_t group, int32_t block);
/* Files a block that has just lost its last reference, on the terms of the sequence that gave it back. */
void kvl_group_settle(kvleaf_blocks *blocks, int32_t group, int32_t block, const kvleaf_seq_params *terms);
/* Whether a block is cached and its time is over. */
bool kvl_group_expired(const kvleaf_blocks *blocks, int32_t group, int32_t block);

/* The column of a table where a position is, and its slot in the block there. */
static inline int32_t kvl_column(const kvleaf_blocks *blocks, int64_t position)
{
    return (int32_t)(blocks->block_shift >= 0 ? position >> blocks->block_shift : position / blocks->block_size);
}

static inline int32_t kvl_slot(const kvleaf_blocks *blocks, int64_t position)
{
    return (int32_t)(position - (int64_t)kvl_column(blocks, position) * blocks->block_size);
}

/* The columns that some tokens take. */
static inline int32_t kvl_columns(const kvleaf_blocks *blocks, int64_t tokens)
{
    return kvl_column(blocks, tokens + blocks->block_size - 1);
}

static inline bool kvl_block_held(const kvl_block *block)
{
    return block->pins > 0 || block->holds > 0;
}

/* swap.c: makes a group's host blocks, and the work space for all. */
kvleaf_status kvl_swap_create_group(kvleaf_blocks *blocks, int32_t group, int32_t num_hosts);
kvleaf_status kvl_swap_create(kvleaf_blocks *blocks);
void kvl_swap_destroy(kvleaf_blocks *blocks);
/* As kvleaf_blocks_swap_out and _in, but a pending copy may fill a block that leaves: the caller makes the pending
 * copies before those of the swap. */
kvleaf_status kvl_swap_begin(kvleaf_blocks *blocks, kvleaf_seq seq, bool out, const kvleaf_swap_copy **copies,
                             int32_t *count);
/* The block no longer holds what its host block does. */
void kvl_swap_unlink(kvl_group *group, int32_t block);
/* Gives back the host blocks of a swapped sequence, whose tables hold nothing then. */
void kvl_swap_drop(kvleaf_blocks *blocks, kvl_sequence *sequence);

static inline int32_t *kvl_block_ids(const kvleaf_blocks *blocks, int32_t block)
{
    return blocks->ids + (size_t)block * (size_t)blocks->block_size;
}

#endif
