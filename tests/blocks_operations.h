/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BLOCKS_OPERATIONS_H
#define BLOCKS_OPERATIONS_H

/* The driver from inside: its choices, and the operations among which it chooses. */

#include "blocks_driver.h"
#include "blocks_pair.h"

enum { STEPS = 3, PROMPTS = 3, WORDS = 3, NO_STEP = -1 };

struct driver {
    blocks_pair pair;
    model before; /* the last operation, where allocations may fail */
    int32_t failing, stray;
    driver_tally tally;
    int32_t step[MODEL_SEQUENCES]; /* the open step that a sequence is in, or NO_STEP */
    int32_t ids[MODEL_TOKENS];     /* work space of an extend */
    int32_t prompts[PROMPTS][MODEL_TOKENS];
    int32_t prompt[MODEL_SEQUENCES];                            /* which of them a sequence follows */
    bool found[MODEL_GROUPS][MODEL_BLOCKS];                     /* blocks that the prefix index finds, by its events */
    uint64_t hashes[MODEL_BLOCKS][2], parents[MODEL_BLOCKS][2]; /* of those of the primary group */
    bool cached[MODEL_GROUPS][MODEL_BLOCKS];                    /* those that the eviction policy was told of */
    int32_t priority[MODEL_GROUPS][MODEL_BLOCKS];
    kvleaf_seq destroyed, foreign; /* handles that must be refused */
    kvleaf_blocks *other;          /* whose handle `foreign` is */
    uint64_t random;
    const uint8_t *bytes; /* NULL: random choices */
    size_t left;
};

/* A number below n. */
int32_t driver_choose(driver *d, int32_t n);
bool driver_one_in(driver *d, int32_t n);
/* A live sequence, or -1. */
int32_t driver_sequence(driver *d);
kvleaf_seq_params driver_seq_params(driver *d);
/* Fills d->ids with tokens of a prompt. */
void driver_ids(driver *d, int32_t prompt, int64_t from, int64_t count);
/* Up to two spans of some tokens; how many. */
int32_t driver_spans(driver *d, int64_t count, kvleaf_span spans[2]);
/* Compares an answer with the model's. False where nothing has happened, also because memory ran out. */
bool driver_answered(driver *d, kvleaf_status got, kvleaf_status expected);
/* Swaps a sequence out or in, and says in the end that it is done or not. */
void driver_swap(driver *d, int32_t at, bool out, bool done);
void driver_close_step(driver *d, int32_t step, bool commit);

void operate_create(driver *d);
void operate_match(driver *d);
void operate_set_ids(driver *d);
void operate_clear(driver *d);
void operate_pin(driver *d);
void operate_unpin(driver *d);
void operate_wait(driver *d);
void operate_extend(driver *d);
void operate_fork(driver *d);
void operate_truncate(driver *d);
void operate_destroy(driver *d);
void operate_copy_some(driver *d);
void operate_begin(driver *d);
void operate_commit(driver *d);
void operate_roll_back(driver *d);
void operate_misuse(driver *d);
void operate_rearrange(driver *d);
void operate_swap_out(driver *d);
void operate_swap_in(driver *d);

#endif
