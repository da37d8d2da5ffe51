/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_BLOCKS_H
#define KVLEAF_BLOCKS_H

/* The block manager: free list, reference counts, sequences, block tables, copy-on-write, prefix cache, eviction, swap,
 * accounting. Host only: nothing here needs OpenCL, so a scheduler process can use it alone (libkvleaf-blocks).
 *
 * A sequence has three lengths in tokens, committed <= planned <= extended. `extend` takes blocks for new tokens,
 * `plan` says which of them a step computes, `commit` makes them count, `rollback` returns them to "extended".
 *
 * Blocks are free (nothing in them is worth keeping), cached (no sequence refers to them, but the prefix index finds
 * them), or used (referred to, pinned, or withheld). Free and cached ones are available: extend takes free ones first,
 * then evicts cached ones.
 *
 * Layers that differ in K/V geometry or window need block tables of their own: a manager has one group of blocks for
 * each, and every sequence a table in every group. extend takes blocks in all groups or in none.
 *
 * Thread rule of everything here: one thread at a time per manager; different managers concurrently. Callbacks run on
 * the calling thread and must not call into the same manager. */

#include <kvleaf/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvleaf_blocks kvleaf_blocks;

/* A sequence handle: slot and generation. 0 is none; one that was destroyed is KVLEAF_STALE, one of another
 * manager KVLEAF_FOREIGN. */
typedef uint64_t kvleaf_seq;

/* Entry of a block table whose block was given back because it lies before every future window. */
#define KVLEAF_NO_BLOCK (-1)

/* One group: the blocks of the layers that share a K/V geometry and a window. */
typedef struct kvleaf_block_group {
    int32_t num_blocks;          /* 1 .. 2^31-1 */
    int32_t window;              /* tokens a row sees, itself included; 0 = all. Blocks wholly before the window of the
                                    next token are given back by commit */
    const int32_t *free_order;   /* the blocks to hand out, in this order; copied; NULL = 0 .. num_blocks-1 */
    int32_t free_count;          /* entries of free_order; blocks it leaves out are never handed out and count as
                                    used. 0 with free_order NULL = num_blocks */
    int32_t swap_blocks;         /* blocks that the host memory for swapped sequences holds; 0 = no swap */
} kvleaf_block_group;

/* A cached block as an eviction policy sees it. */
typedef struct kvleaf_cached_block {
    int32_t group, block;
    int32_t depth;               /* its place in its chain: 0 is a prompt's first block */
    int32_t children;            /* indexed blocks that continue it */
    int32_t priority;            /* of the last sequence that gave it back */
    uint64_t last_use_ms;        /* by the manager's clock */
    uint64_t expires_ms;         /* 0 = never */
    uint64_t hash[2];            /* low, high: XXH3-128 of its chain */
} kvleaf_cached_block;

/* An eviction policy: which cached block goes when no free one is left. The manager tells it of every block that
 * becomes cached and of every one that stops being so (found again, evicted, pinned, written to). Any of the functions
 * may be NULL. */
typedef struct kvleaf_eviction {
    void *user;
    void (*added)(void *user, const kvleaf_cached_block *block);
    void (*removed)(void *user, int32_t group, int32_t block);
    /* Returns a block of the group that was added and not removed; with any other answer the manager chooses. */
    int32_t (*victim)(void *user, int32_t group);
} kvleaf_eviction;

typedef enum kvleaf_event_type {
    KVLEAF_EVENT_STORED = 0,     /* a block entered the prefix index */
    KVLEAF_EVENT_REMOVED = 1,    /* a block left it */
    KVLEAF_EVENT_CLEARED = 2     /* all left it at once */
} kvleaf_event_type;

/* A change of the prefix index, for routers that keep a copy of it. Each group tells of its own blocks. */
typedef struct kvleaf_event {
    kvleaf_event_type type;
    int32_t group, block;
    uint64_t hash[2];            /* low, high */
    uint64_t parent[2];          /* of the block before it; 0, 0 at a prompt's first block */
    uint64_t salt;
    const int32_t *ids;          /* STORED: its tokens [count], valid during the call; else NULL */
    int32_t count;
} kvleaf_event;

typedef void (*kvleaf_event_fn)(void *user, const kvleaf_event *event);

typedef struct kvleaf_blocks_params {
    uint32_t struct_size;
    int32_t num_blocks;          /* 1 .. 2^31-1 */
    int32_t block_size;          /* tokens a block, 1 .. 256; 0 = 16 */
    int32_t max_sequences;       /* live at once, swapped ones included; 0 = 256 */
    int32_t max_blocks_per_seq;  /* columns of a block table; 0 = the largest group's num_blocks */
    const int32_t *free_order;   /* as kvleaf_block_group, and so are free_count, window and
                                    swap_blocks */
    int32_t free_count;
    kvleaf_allocator allocator;
    int32_t window;
    int32_t swap_blocks;
    const kvleaf_block_group *groups; /* [num_groups], copied; NULL = one group of the fields above */
    int32_t num_groups;          /* 1 .. 16; 0 with groups NULL */
    int32_t no_prefix_cache;     /* 1 = nothing is indexed */
    const kvleaf_eviction *eviction;  /* copied; NULL = lowest priority first, among those least recently used first;
                                         where the first one of a priority has expired, it goes before */
    kvleaf_event_fn event;       /* NULL = none */
    void *event_user;
    uint64_t (*now_ms)(void *user);   /* the clock that time-to-live is measured by; NULL = the system's */
    void *now_user;
} kvleaf_blocks_params;

#define KVLEAF_BLOCKS_PARAMS_INIT KVLEAF_INIT(kvleaf_blocks_params)
#ifndef __cplusplus
#define kvleaf_blocks_params(...) \
    (&(kvleaf_blocks_params){ .struct_size = sizeof(kvleaf_blocks_params), __VA_ARGS__ })
#endif

/* Priorities of cached blocks: 0 is the usual one, lower ones go first. */
#define KVLEAF_PRIORITY_LOW  (-4)
#define KVLEAF_PRIORITY_HIGH 3

typedef struct kvleaf_seq_params {
    uint32_t struct_size;
    uint64_t user;               /* the application's own mark, returned by kvleaf_blocks_seq_query */
    uint64_t salt;               /* sequences of different salts never find each other's blocks: a tenant, an adapter;
                                    compared exactly */
    int32_t priority;            /* of the blocks it leaves in the prefix cache, LOW .. HIGH */
    int32_t no_prefix;           /* 1 = finds nothing in the prefix cache, and leaves nothing there */
    uint64_t ttl_ms;             /* how long a block that it leaves is found after its last use; 0 = until evicted */
} kvleaf_seq_params;

/* Content that token ids don't name, such as an image behind placeholder tokens: tokens start .. start + count - 1 of
 * a kvleaf_tokens. The key, the application's hash of the content, joins the hashes of the blocks that hold them. */
typedef struct kvleaf_span {
    int64_t start, count;
    uint64_t key[2];
} kvleaf_span;

/* Tokens to add. `ids` NULL: their ids are not known (yet): kvleaf_blocks_seq_set_ids. */
typedef struct kvleaf_tokens {
    uint32_t struct_size;
    const int32_t *ids;          /* [count], or NULL; INT32_MIN = this one is not known */
    int64_t count;               /* >= 0 */
    const kvleaf_span *spans;    /* [num_spans], ascending, not overlapping; NULL = none */
    int32_t num_spans;
} kvleaf_tokens;

/* A whole-block copy the device has to make before the step's writes. */
typedef struct kvleaf_block_copy {
    int32_t src, dst;
} kvleaf_block_copy;

/* A block that goes to host memory or comes back. */
typedef struct kvleaf_swap_copy {
    int32_t group, block;        /* on the device */
    int32_t host;                /* in the host's memory for swapped blocks, 0 .. swap_blocks-1 of the group */
} kvleaf_swap_copy;

/* Counts of all groups together, or of one. */
typedef struct kvleaf_blocks_stats {
    uint32_t struct_size;
    int32_t total, used, cached, free;   /* blocks; total = used + cached + free after every call */
    int32_t pinned;                      /* of used: no sequence refers to them; sources of pending copies, and
                                            kvleaf_blocks_pin, the ones before a pinned one in the index included */
    int32_t sequences;                   /* live, swapped ones included */
    int32_t swapped;                     /* of these */
    int32_t indexed;                     /* blocks that the prefix index finds, used ones included */
    int32_t host_total, host_used;       /* blocks of host memory for swapped sequences */
    int64_t tokens;                      /* extended lengths of all sequences, shared tokens counted once a sequence */
    int64_t slots_wasted;                /* slots of used blocks that hold no token of any sequence; blocks left out
                                            of free_order are not counted */
    /* Since creation: */
    uint64_t copies;                     /* copy-on-write and partial-match copies handed out */
    uint64_t looked_up, hits;            /* tokens that extend was given ids for, and of these, found */
    uint64_t evictions;                  /* cached blocks taken for something else */
    uint64_t swapped_out, swapped_in;    /* blocks copied */
} kvleaf_blocks_stats;

typedef struct kvleaf_seq_info {
    uint32_t struct_size;
    int64_t committed, planned, extended;   /* tokens */
    int32_t num_blocks;                     /* entries of a block table in use, KVLEAF_NO_BLOCK ones included */
    int32_t blocks_unique, blocks_shared;   /* blocks in all groups: reference count 1, above 1 */
    uint64_t user;
    uint64_t salt;
    int64_t cached;                         /* tokens that were found in the prefix cache, all extends together */
    int64_t known;                          /* leading tokens whose ids are known */
    int32_t swapped;                        /* 1 = in host memory */
    int32_t peak_blocks;                    /* the most blocks it has held, all groups together */
} kvleaf_seq_info;

/* Makes a manager. INVALID: a field out of range, an id twice or out of range in free_order. NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_create(const kvleaf_blocks_params *params, kvleaf_blocks **out);
/* NULL is safe; sets *blocks to NULL. */
KVLEAF_API void kvleaf_blocks_destroy(kvleaf_blocks **blocks);

/* Makes an empty sequence. TOO_SMALL: max_sequences are live. `params` may be NULL. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_create(kvleaf_blocks *blocks, const kvleaf_seq_params *params,
                                                  kvleaf_seq *out);

/* Adds tokens and takes the blocks for them, the block of a copy-on-write included, in all groups; all or nothing.
 * *cached (may be NULL) receives how many of them need no computing because they were found in the prefix cache: they
 * are committed at once. Looked up are tokens with ids, from the edge of a block on, where all before it is committed
 * and indexed: whole blocks, then the longest match inside the next one (by a copy; among the 8 latest continuations,
 * up to the first span); at least one of the tokens is left to compute.
 * NO_BLOCKS: too few available, nothing changed. TOO_SMALL: beyond max_blocks_per_seq. BUSY: the sequence is in an open
 * plan, or swapped out. INVALID, FOREIGN, STALE, NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_extend(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_tokens *tokens,
                                                  int64_t *cached);

/* *matched = how many of these tokens a new sequence of these params (may be NULL) would find in the prefix cache now.
 * Changes nothing, not even the order of eviction. INVALID: ids NULL and count > 0. */
KVLEAF_API kvleaf_status kvleaf_blocks_prefix_match(const kvleaf_blocks *blocks, const kvleaf_seq_params *params,
                                                    const kvleaf_tokens *tokens, int64_t *matched);

/* Empties the prefix index: cached blocks become free, used ones are found no more, and nothing that a sequence with
 * computed tokens adds to them is, until it is cut to 0. */
KVLEAF_API kvleaf_status kvleaf_blocks_prefix_clear(kvleaf_blocks *blocks);

/* Says the ids of tokens `start` .. start + count - 1 that were extended without, or changes those of uncommitted
 * ones. Committed blocks that are full and known enter the index. INVALID: a range beyond the extended length, one that
 * would change a known committed id, or (where all groups have windows) ids that went with their blocks. BUSY: in an
 * open plan, or swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_set_ids(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t start,
                                                   const int32_t *ids, int64_t count);

/* Copies the ids of tokens start .. start + count - 1 to `ids`. INVALID: beyond the known ones, or (where all groups
 * have windows) ids that went with their blocks. BUSY: swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_ids(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t start,
                                               int32_t *ids, int64_t count);

/* *out = whether an extend by `count` tokens would find its blocks now, prefix hits left aside. Changes nothing.
 * BUSY: swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_can_extend(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count,
                                                  bool *out);

/* Makes *child share the first `pos` tokens of `seq`, and its params; no block is taken, the partial last one is shared
 * too. Works beside an open step of `seq`.
 * INVALID: pos < 0 or beyond the committed length, or so far back that a block in its window is gone. BUSY: swapped
 * out. TOO_SMALL: max_sequences are live. NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_fork(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos,
                                                kvleaf_seq *child);

/* Rearranges n live sequences at once, as a step of beam search does: afterwards seqs[i] holds what seqs[parents[i]]
 * held before, its `user` apart. Only reference counts change; a parent that nobody names gives its blocks back, last.
 * INVALID: a parent out of 0 .. n-1, a sequence twice, one with uncommitted tokens. BUSY: in an open plan, or swapped
 * out. NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_rearrange(kvleaf_blocks *blocks, const kvleaf_seq *seqs,
                                                     const int32_t *parents, int32_t n);

/* Cuts the sequence to `length` tokens (all three lengths) and gives the blocks behind back, deepest first.
 * INVALID: length < 0 or beyond the extended length, or so far back that a block in its window is gone (0 is always
 * right). BUSY: in an open plan, or swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_truncate(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t length);

/* Destroys the sequence, gives its blocks back, sets *seq to 0. STALE: destroyed before. BUSY: in an open plan. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_destroy(kvleaf_blocks *blocks, kvleaf_seq *seq);

/* Copies up to `capacity` block ids of the sequence's table in a group to `table` and sets *count to the number in use.
 * TOO_SMALL: capacity < *count (then nothing is copied; *count is set). `table` may be NULL with capacity 0. BUSY:
 * swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_table(const kvleaf_blocks *blocks, kvleaf_seq seq, int32_t group,
                                                 int32_t *table, int32_t capacity, int32_t *count);

/* Fills *info (info->struct_size set by the caller). */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_query(const kvleaf_blocks *blocks, kvleaf_seq seq, kvleaf_seq_info *info);

/* Fills *stats (stats->struct_size set by the caller) with the counts of all groups. */
KVLEAF_API kvleaf_status kvleaf_blocks_query(const kvleaf_blocks *blocks, kvleaf_blocks_stats *stats);
/* The same of one group; sequences and tokens are those of the manager. INVALID: group out of range. */
KVLEAF_API kvleaf_status kvleaf_blocks_query_group(const kvleaf_blocks *blocks, int32_t group,
                                                   kvleaf_blocks_stats *stats);

/* Returns the reference count of a block, or -1 where `group` or `block` is out of range. */
KVLEAF_API int32_t kvleaf_blocks_refcount(const kvleaf_blocks *blocks, int32_t group, int32_t block);

/* Holds a used or cached block until it is unpinned as often: it is not evicted, nor are those before it in its chain,
 * and it stays in the index, if it is there, until that is cleared. INVALID: out of range, a free block. */
KVLEAF_API kvleaf_status kvleaf_blocks_pin(kvleaf_blocks *blocks, int32_t group, int32_t block);
/* INVALID: out of range, a block that is not pinned. */
KVLEAF_API kvleaf_status kvleaf_blocks_unpin(kvleaf_blocks *blocks, int32_t group, int32_t block);

typedef enum kvleaf_format {
    KVLEAF_FORMAT_TEXT = 0,      /* a character a block; then a line or more a sequence */
    KVLEAF_FORMAT_SVG = 1
} kvleaf_format;

/* Writes the block map, NUL-terminated, to buffer[capacity]: each block's state, each sequence's tables. *size = bytes
 * needed, the NUL included. TOO_SMALL: capacity < *size, nothing is written. `buffer` may be NULL with capacity 0.
 * NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_describe(const kvleaf_blocks *blocks, kvleaf_format format, char *buffer,
                                                size_t capacity, size_t *size);

/* Begins to swap a sequence to host memory (out) or back. *copies: the blocks to copy, valid until swap_end; a block
 * that sequences share goes once, and one that is still on the device when it is wanted back is not copied. Between
 * begin and end no other call on the manager. While it is out, a sequence can only be queried, swapped in and
 * destroyed. Out: NO_BLOCKS: host memory is full; UNSUPPORTED: a group without swap_blocks; INVALID: out already.
 * Back: NO_BLOCKS; INVALID: not out. BUSY: in an open plan, or a pending copy fills one of its blocks. */
KVLEAF_API kvleaf_status kvleaf_blocks_swap_out(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_swap_copy **copies,
                                                int32_t *count);
KVLEAF_API kvleaf_status kvleaf_blocks_swap_in(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_swap_copy **copies,
                                               int32_t *count);
/* Ends it: `done` says that the copies were made or enqueued (before anything that could write those blocks); false
 * returns to before the begin, but cached blocks that were evicted for it stay evicted, and are free. INVALID: no swap
 * of the sequence has begun. */
KVLEAF_API kvleaf_status kvleaf_blocks_swap_end(kvleaf_blocks *blocks, kvleaf_seq seq, bool done);

/* Opens a step for n distinct sequences: num_q[i] of the tokens behind the committed length are computed by it
 * (1 .. extended - committed). All or nothing. INVALID: a num_q out of range, a sequence twice. BUSY: a sequence is
 * in another open step, or swapped out. */
KVLEAF_API kvleaf_status kvleaf_blocks_step_begin(kvleaf_blocks *blocks, const kvleaf_seq *seqs, const int32_t *num_q,
                                                  int32_t n);

/* The copies that must be made in a group before any write of the step: *copies points into the manager, valid until
 * the next call on it. Every copy the manager has pending is listed, whatever sequence it belongs to. */
KVLEAF_API kvleaf_status kvleaf_blocks_copies(const kvleaf_blocks *blocks, int32_t group,
                                              const kvleaf_block_copy **copies, int32_t *count);
/* Says that the first `count` copies of that list were enqueued or made; their sources are no longer held. INVALID:
 * count < 0 or more than are pending. */
KVLEAF_API kvleaf_status kvleaf_blocks_copies_done(kvleaf_blocks *blocks, int32_t group, int32_t count);

/* Closes the step. Of each sequence's planned tokens the first accepted[i] (NULL = all) become committed; the rest is
 * truncated, with everything extended behind them; where all are accepted, what is extended behind them stays. Full
 * blocks of known ids enter the prefix index; blocks that left every future window are given back.
 * INVALID: accepted[i] < 0 or > num_q[i]; a sequence not in a step; a copy that the tokens rely on is still pending. */
KVLEAF_API kvleaf_status kvleaf_blocks_step_commit(kvleaf_blocks *blocks, const kvleaf_seq *seqs,
                                                   const int32_t *accepted, int32_t n);
/* Closes the step without effect: the tokens stay extended and uncomputed. */
KVLEAF_API kvleaf_status kvleaf_blocks_step_rollback(kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t n);

#ifdef __cplusplus
}
#endif
#endif
