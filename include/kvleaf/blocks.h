/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_BLOCKS_H
#define KVLEAF_BLOCKS_H

/* The block manager: free list, reference counts, sequences, block tables, copy-on-write, accounting.
 * Host only: nothing here needs OpenCL, so a scheduler process can use it alone (libkvleaf-blocks).
 *
 * A sequence has three lengths in tokens, committed <= planned <= extended. `extend` takes blocks for new tokens,
 * `plan` says which of them a step computes, `commit` makes them count, `rollback` returns them to "extended".
 *
 * Layers that differ in K/V geometry or window need block tables of their own: a manager has one group of blocks for
 * each, and every sequence a table in every group. extend takes blocks in all groups or in none.
 *
 * Thread rule of everything here: one thread at a time per manager; different managers concurrently. */

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
    const int32_t *free_order;   /* the blocks to hand out, in this order; copied; NULL = 0 .. num_blocks-1 */
    int32_t free_count;          /* entries of free_order; blocks it leaves out are never handed out and count as
                                    used. 0 with free_order NULL = num_blocks */
} kvleaf_block_group;

typedef struct kvleaf_blocks_params {
    uint32_t struct_size;
    int32_t num_blocks;          /* 1 .. 2^31-1 */
    int32_t block_size;          /* tokens a block, 1 .. 256; 0 = 16 */
    int32_t max_sequences;       /* live at once; 0 = 256 */
    int32_t max_blocks_per_seq;  /* columns of a block table; 0 = the largest group's num_blocks */
    const int32_t *free_order;   /* as kvleaf_block_group, and so is the next one */
    int32_t free_count;
    kvleaf_allocator allocator;
    const kvleaf_block_group *groups; /* [num_groups], copied; NULL = one group of the fields above */
    int32_t num_groups;          /* 1 .. 16; 0 with groups NULL */
} kvleaf_blocks_params;

#define KVLEAF_BLOCKS_PARAMS_INIT KVLEAF_INIT(kvleaf_blocks_params)
#ifndef __cplusplus
#define kvleaf_blocks_params(...) \
    (&(kvleaf_blocks_params){ .struct_size = sizeof(kvleaf_blocks_params), __VA_ARGS__ })
#endif

typedef struct kvleaf_seq_params {
    uint32_t struct_size;
    uint64_t user;               /* the application's own mark, returned by kvleaf_blocks_seq_query */
} kvleaf_seq_params;

/* Tokens to add. `ids` NULL: their ids are not known (yet). */
typedef struct kvleaf_tokens {
    uint32_t struct_size;
    const int32_t *ids;          /* [count], or NULL */
    int64_t count;               /* >= 0 */
} kvleaf_tokens;

/* A whole-block copy the device has to make before the step's writes. */
typedef struct kvleaf_block_copy {
    int32_t src, dst;
} kvleaf_block_copy;

/* Counts of all groups together, or of one. */
typedef struct kvleaf_blocks_stats {
    uint32_t struct_size;
    int32_t total, used, cached, free;   /* blocks; total = used + cached + free after every call */
    int32_t pinned;                      /* of used: sources of pending copies that no sequence refers to */
    int32_t sequences;
    int64_t tokens;                      /* extended lengths of all sequences, shared tokens counted once a sequence */
    int64_t slots_wasted;                /* slots of used blocks that hold no token of any sequence; blocks left out
                                            of free_order are not counted */
    uint64_t copies;                     /* copy-on-write copies handed out since creation */
} kvleaf_blocks_stats;

typedef struct kvleaf_seq_info {
    uint32_t struct_size;
    int64_t committed, planned, extended;   /* tokens */
    int32_t num_blocks;                     /* entries of a block table in use */
    int32_t blocks_unique, blocks_shared;   /* blocks in all groups: reference count 1, above 1 */
    uint64_t user;
} kvleaf_seq_info;

/* Makes a manager. INVALID: a field out of range, an id twice or out of range in free_order. NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_create(const kvleaf_blocks_params *params, kvleaf_blocks **out);
/* NULL is safe; sets *blocks to NULL. */
KVLEAF_API void kvleaf_blocks_destroy(kvleaf_blocks **blocks);

/* Makes an empty sequence. TOO_SMALL: max_sequences are live. `params` may be NULL. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_create(kvleaf_blocks *blocks, const kvleaf_seq_params *params,
                                                  kvleaf_seq *out);

/* Adds tokens and takes the blocks for them, the block of a copy-on-write included, in all groups; all or nothing.
 * *cached (may be NULL) receives how many of them need no computing because their blocks were found in the prefix
 * cache. NO_BLOCKS: too few available, nothing changed. TOO_SMALL: beyond max_blocks_per_seq. BUSY: the sequence is
 * in an open plan. INVALID, FOREIGN, STALE. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_extend(kvleaf_blocks *blocks, kvleaf_seq seq, const kvleaf_tokens *tokens,
                                                  int64_t *cached);

/* *out = whether an extend by `count` tokens would find its blocks now. Changes nothing. */
KVLEAF_API kvleaf_status kvleaf_blocks_can_extend(const kvleaf_blocks *blocks, kvleaf_seq seq, int64_t count,
                                                  bool *out);

/* Makes *child share the first `pos` tokens of `seq`, and its `user`; no block is taken, the partial last one is shared
 * too. Works beside an open step of `seq`.
 * INVALID: pos < 0 or beyond the committed length. TOO_SMALL: max_sequences are live. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_fork(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t pos,
                                                kvleaf_seq *child);

/* Cuts the sequence to `length` tokens (all three lengths) and gives the blocks behind back, deepest first.
 * INVALID: length < 0 or beyond the extended length. BUSY: in an open plan. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_truncate(kvleaf_blocks *blocks, kvleaf_seq seq, int64_t length);

/* Destroys the sequence, gives its blocks back, sets *seq to 0. STALE: destroyed before. BUSY: in an open plan. */
KVLEAF_API kvleaf_status kvleaf_blocks_seq_destroy(kvleaf_blocks *blocks, kvleaf_seq *seq);

/* Copies up to `capacity` block ids of the sequence's table in a group to `table` and sets *count to the number in use.
 * TOO_SMALL: capacity < *count (then nothing is copied; *count is set). `table` may be NULL with capacity 0. */
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

typedef enum kvleaf_format {
    KVLEAF_FORMAT_TEXT = 0,      /* a character a block; then a line or more a sequence */
    KVLEAF_FORMAT_SVG = 1
} kvleaf_format;

/* Writes the block map, NUL-terminated, to buffer[capacity]: each block's state, each sequence's tables. *size = bytes
 * needed, the NUL included. TOO_SMALL: capacity < *size, nothing is written. `buffer` may be NULL with capacity 0.
 * NO_MEMORY. */
KVLEAF_API kvleaf_status kvleaf_blocks_describe(const kvleaf_blocks *blocks, kvleaf_format format, char *buffer,
                                                size_t capacity, size_t *size);

/* Opens a step for n distinct sequences: num_q[i] of the tokens behind the committed length are computed by it
 * (1 .. extended - committed). All or nothing. INVALID: a num_q out of range, a sequence twice. BUSY: a sequence is
 * in another open step. */
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
 * truncated, with everything extended behind them; where all are accepted, what is extended behind them stays.
 * INVALID: accepted[i] < 0 or > num_q[i]; a sequence not in a step; a copy that the tokens rely on is still pending. */
KVLEAF_API kvleaf_status kvleaf_blocks_step_commit(kvleaf_blocks *blocks, const kvleaf_seq *seqs,
                                                   const int32_t *accepted, int32_t n);
/* Closes the step without effect: the tokens stay extended and uncomputed. */
KVLEAF_API kvleaf_status kvleaf_blocks_step_rollback(kvleaf_blocks *blocks, const kvleaf_seq *seqs, int32_t n);

#ifdef __cplusplus
}
#endif
#endif
