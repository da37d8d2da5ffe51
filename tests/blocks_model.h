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
 * A model holds no pointers but the tokens' owner's: assigning it is a snapshot. */

#include <kvleaf/blocks.h>

enum {
    MODEL_GROUPS = 3,
    MODEL_BLOCKS = 48,
    MODEL_SEQUENCES = 12,
    MODEL_SLOTS = 7,
    MODEL_TOKENS = MODEL_BLOCKS * MODEL_SLOTS,
    MODEL_NO_BLOCK = -1 /* in a table: it left the window */
};

typedef struct model_token {
    int32_t id;       /* what it is, whether or not the manager was told */
    bool known;       /* it was */
    uint64_t key[2];  /* of the span it lies in, or 0 */
    int64_t place;    /* in that span */
    uint64_t content; /* of it and all before it */
} model_token;

typedef struct model_sequence {
    bool live;
    uint64_t user, salt, ttl_ms;
    int32_t priority;
    bool no_prefix;
    int64_t committed, planned, extended, cached;
    int32_t peak;
    model_token tokens[MODEL_TOKENS];
    int32_t count;
    int32_t table[MODEL_GROUPS][MODEL_BLOCKS];
} model_sequence;

/* What a manager is made with. */
typedef struct model_group_params {
    int32_t num_blocks, window;
    int32_t free_order[MODEL_BLOCKS], free_count;
} model_group_params;

typedef struct model_params {
    int32_t block_size, max_sequences, max_blocks_per_seq, num_groups;
    model_group_params groups[MODEL_GROUPS];
} model_params;

typedef struct model_group {
    int32_t free[MODEL_BLOCKS], num_free; /* to hand out, first to last */
    kvleaf_block_copy copies[MODEL_BLOCKS];
    int32_t num_copies;
    int32_t copied_slots[MODEL_BLOCKS]; /* leading slots that pending copies read */
    uint64_t copies_made;
    uint64_t memory[MODEL_BLOCKS][MODEL_SLOTS];
} model_group;

typedef struct model {
    model_params p;
    model_sequence sequences[MODEL_SEQUENCES];
    model_group groups[MODEL_GROUPS];
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
/* The device makes these pending copies, all at once. False: one that is not pending. */
bool model_make_copies(model *m, int32_t group, const kvleaf_block_copy *copies, int32_t count);

/* What can be asked of it. */
typedef struct model_counts {
    int32_t holders[MODEL_BLOCKS]; /* sequences whose table has it */
    int32_t slots[MODEL_BLOCKS];   /* of it, that hold a token of a sequence */
} model_counts;

void model_count(const model *m, int32_t group, model_counts *counts);
int32_t model_filler(const model *m, int32_t group, int32_t block); /* the pending copy that fills a block, or -1 */
void model_stats(const model *m, int32_t group, const model_counts *counts, kvleaf_blocks_stats *stats);
/* The content that the device holds for a committed token, through a pending copy where there is one. */
uint64_t model_read(const model *m, int32_t group, int32_t block, int64_t position);

#endif
