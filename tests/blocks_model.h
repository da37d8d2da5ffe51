/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BLOCKS_MODEL_H
#define BLOCKS_MODEL_H

/* A block manager as plain and slow as can be, written from kvleaf/blocks.h: lists are arrays, everything is found by
 * walking, counts are counted when they are asked for. It answers what the real one must answer and holds what the real
 * one must hold, block for block.
 *
 * It also is the device: each slot of each block holds the content of a token, a number that follows from everything
 * the token's keys and values would depend on (the salt, and all ids and contents up to it). Commits write it, copies
 * and swaps move it, so that a block that is handed out too early, a lost copy or a wrong hit shows as a wrong number.
 *
 * A model holds no pointers: assigning it is a snapshot. */

#include <kvleaf/blocks.h>

enum {
    MODEL_GROUPS = 3,
    MODEL_BLOCKS = 48,
    MODEL_SEQUENCES = 12,
    MODEL_SLOTS = 7,
    MODEL_TOKENS = MODEL_BLOCKS * MODEL_SLOTS,
    MODEL_HOSTS = 24,
    MODEL_CHILDREN = 8, /* that are looked at for the longest match inside a block */
    MODEL_NONE = -1     /* no block, no entry */
};

typedef struct model_token {
    int32_t id; /* what it is, whether or not the manager was told */
    bool known; /* it was */
    bool in_span;
    uint64_t key[2];
    uint64_t content; /* of it and all before it */
} model_token;

/* How a sequence's blocks are found and kept. */
typedef struct model_terms {
    uint64_t salt, ttl_ms;
    int32_t priority;
    bool no_prefix;
} model_terms;

typedef struct model_sequence {
    bool live;
    uint64_t user;
    model_terms terms;
    int64_t committed, planned, extended, cached;
    int32_t peak;
    model_token tokens[MODEL_TOKENS];
    int32_t count;
    int32_t table[MODEL_GROUPS][MODEL_BLOCKS]; /* of blocks; of host blocks while it is swapped out */
    bool swapped;
    int32_t indexed; /* leading blocks that the index has, its own or identical ones ... */
    int32_t tip;     /* ... and the entry of the last of them ... */
    uint64_t serial; /* ... if it is still this one */
    bool outdated;   /* the index was cleared since it began */
} model_sequence;

/* What spans said of the slots of a block, one after the other, and 1 behind the last slot they spoke of. */
typedef struct model_said {
    uint64_t digest; /* 0 = nothing */
    int32_t end;
} model_said;

/* A block that the prefix index finds. An entry is named by its block in the primary group. */
typedef struct model_entry {
    uint64_t serial; /* ascending; 0 = no entry */
    uint64_t salt;
    int32_t parent;
    int32_t ids[MODEL_SLOTS];
    uint64_t digest;
    int32_t block[MODEL_GROUPS];
} model_entry;

/* What a manager is made with. */
typedef struct model_group_params {
    int32_t num_blocks, window, swap_blocks;
    int32_t free_order[MODEL_BLOCKS]; /* of all blocks */
} model_group_params;

typedef struct model_params {
    int32_t block_size, max_sequences, max_blocks_per_seq, num_groups;
    bool no_prefix_cache, policy;
    model_group_params groups[MODEL_GROUPS];
} model_params;

/* A block of host memory. */
typedef struct model_host {
    bool used;
    int32_t number; /* the manager's; MODEL_NONE where nothing was copied, so that it is not told */
    int32_t block;  /* that holds the same, or MODEL_NONE */
    uint64_t memory[MODEL_SLOTS];
    model_said said; /* these two in the primary group */
    bool known[MODEL_SLOTS];
} model_host;

/* A list of blocks, first to last. */
typedef struct model_list {
    int32_t blocks[MODEL_BLOCKS], count;
} model_list;

typedef struct model_group {
    model_list free;   /* in the order in which they were freed */
    model_list cached; /* the least recently used first */
    model_list copies_src, copies_dst;
    int32_t copied_slots[MODEL_BLOCKS]; /* leading slots that pending copies read */
    int32_t pins[MODEL_BLOCKS];         /* the application's */
    int32_t priority[MODEL_BLOCKS];     /* from when it was given back */
    uint64_t expires[MODEL_BLOCKS];     /* likewise; 0 = never */
    uint64_t copies_made, evictions, swapped_out, swapped_in;
    model_host hosts[MODEL_HOSTS];
    uint64_t memory[MODEL_BLOCKS][MODEL_SLOTS];
} model_group;

typedef struct model {
    model_params p;
    int32_t primary;
    model_sequence sequences[2 * MODEL_SEQUENCES]; /* and what they were, while they are rearranged */
    model_group groups[MODEL_GROUPS];
    model_entry entries[MODEL_BLOCKS];
    model_said said[MODEL_BLOCKS];         /* of the primary group, and so is the next one */
    bool known[MODEL_BLOCKS][MODEL_SLOTS]; /* ids */
    uint64_t serial, looked_up, hits, now_ms;
} model;

void model_init(model *m, const model_params *params);

/* Each of these answers as the call of the same name, and does what it does. Sequences are places in `sequences`. */
kvleaf_status model_create(model *m, const kvleaf_seq_params *params, int32_t *made);
/* `ids` are what the tokens are, told or not: tokens->ids may be NULL. */
kvleaf_status model_extend(model *m, int32_t seq, const kvleaf_tokens *tokens, const int32_t *ids, int64_t *cached);
bool model_can_extend(const model *m, int32_t seq, int64_t count);
kvleaf_status model_fork(model *m, int32_t seq, int64_t pos, int32_t *child);
kvleaf_status model_truncate(model *m, int32_t seq, int64_t length);
kvleaf_status model_destroy(model *m, int32_t seq);
kvleaf_status model_begin(model *m, const int32_t *seqs, const int32_t *num_q, int32_t n);
kvleaf_status model_commit(model *m, const int32_t *seqs, const int32_t *accepted, int32_t n);
kvleaf_status model_rollback(model *m, const int32_t *seqs, int32_t n);
kvleaf_status model_set_ids(model *m, int32_t seq, int64_t start, const int32_t *ids, int64_t count);
kvleaf_status model_rearrange(model *m, const int32_t *seqs, const int32_t *parents, int32_t n);
/* The answer of the begin; then, where that is OK, all of the swap: the copies that were listed are made, and the end
 * says done or not. False: they are not those that have to be made. */
kvleaf_status model_swap_out_status(const model *m, int32_t seq);
bool model_swap_out(model *m, int32_t seq, const kvleaf_swap_copy *copies, int32_t count, bool done);
kvleaf_status model_swap_in_status(const model *m, int32_t seq);
bool model_swap_in(model *m, int32_t seq, const kvleaf_swap_copy *copies, int32_t count, bool done);
kvleaf_status model_pin(model *m, int32_t group, int32_t block);
kvleaf_status model_unpin(model *m, int32_t group, int32_t block);
int64_t model_prefix_match(const model *m, const kvleaf_seq_params *params, const kvleaf_tokens *tokens);
void model_prefix_clear(model *m);
/* The device makes these pending copies, all at once. False: one that is not pending. */
bool model_make_copies(model *m, int32_t group, const kvleaf_block_copy *copies, int32_t count);

/* What can be asked of it. */
typedef struct model_counts {
    int32_t holders[MODEL_BLOCKS]; /* sequences whose table has it */
    int32_t slots[MODEL_BLOCKS];   /* of it, that hold a token of a sequence */
} model_counts;

void model_count(const model *m, int32_t group, model_counts *counts);
void model_stats(const model *m, int32_t group, const model_counts *counts, kvleaf_blocks_stats *stats);
int64_t model_known(const model_sequence *s);
/* The content that the device holds for a committed token, through a pending copy where there is one. */
uint64_t model_read(const model *m, int32_t group, int32_t block, int64_t position);

/* Between the model's own files. */
int32_t model_blocks_for(const model *m, int64_t tokens);
int32_t model_holders(const model *m, int32_t group, int32_t block);
bool model_named_before(const int32_t *seqs, int32_t at);
/* In an open step. */
bool model_is_planned(const model_sequence *s);
void model_cut(model *m, model_sequence *s, int64_t length);
/* Gives back what lies before the windows of the next token. */
void model_move_windows(model *m, model_sequence *s);
void model_note_peak(const model *m, model_sequence *s);
/* The first entry of a table that the window of the token at `position` needs. */
int32_t model_first_needed(const model *m, int32_t group, int64_t position);
/* The pending copy that fills a block, or MODEL_NONE. */
int32_t model_filler(const model_group *g, int32_t block);
bool model_is_listed(const model *m, int32_t group, int32_t block);
bool model_has_expired(const model *m, int32_t group, int32_t block);
int32_t model_find_entry(const model *m, int32_t parent, uint64_t salt, const model_token *tokens, uint64_t digest);
/* A block's content is about to change: no host block holds the same. */
void model_unlink(model *m, int32_t group, int32_t block);
void model_drop_hosts(model *m, model_sequence *s);
int32_t model_hosts_used(const model *m, int32_t group);
/* What finds a block, or MODEL_NONE. */
int32_t model_entry_of(const model *m, int32_t group, int32_t block);
int32_t model_take(model *m, int32_t group);
/* The eviction policy that stands in for an application's: the highest number goes, but it does not know every block.
 */
static inline bool model_policy_knows(int32_t block)
{
    return block % 4 != 0;
}
bool model_is_pinned(const model *m, int32_t group, int32_t block);
/* One more token of a span. */
void model_say(model_said *said, int32_t slot, const uint64_t key[2]);
/* After a table lost a block, on the terms of its sequence. */
void model_lose(model *m, int32_t group, int32_t block, const model_terms *terms);
/* Files a block anew that is held by something else than tables now, or no more. */
void model_refile(model *m, int32_t group, int32_t block);
void model_end_copy(model *m, int32_t group, int32_t at);
void model_leave_index(model *m, int32_t group, int32_t block);
void model_follow(model *m, model_sequence *s);
void model_shorten(model *m, model_sequence *s, int32_t blocks);

/* What the index holds of some tokens: whole blocks, then tokens inside the next one. */
typedef struct model_hit {
    int32_t chain[MODEL_BLOCKS], blocks;
    int32_t partial, partial_tokens;
} model_hit;

/* `s`: the sequence that they would extend, NULL: a new one. */
model_hit model_find(const model *m, const model_terms *terms, const model_sequence *s, const model_token *tokens,
                     int64_t count);
/* Blocks that could be taken beside those of the hit. */
int32_t model_available(const model *m, int32_t group, const model_hit *hit, int64_t start);

#endif
