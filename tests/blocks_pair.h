/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BLOCKS_PAIR_H
#define BLOCKS_PAIR_H

/* A block manager and the model of it, the operations that were done on both, and their comparison. */

#include "blocks/blocks.h"
#include "blocks_model.h"

enum { PAIR_NOTES = 24, PAIR_NOTE_SIZE = 160 };

typedef struct blocks_pair {
    kvleaf_blocks *real;
    model m;
    kvleaf_seq handles[MODEL_SEQUENCES];
    uint64_t seed;
    int64_t operations;
    char notes[PAIR_NOTES][PAIR_NOTE_SIZE]; /* the last operations, in a ring */
} blocks_pair;

#if defined(__GNUC__)
#define PAIR_PRINTF __attribute__((format(printf, 2, 3)))
#define PAIR_WRONG  __attribute__((format(printf, 2, 3), noreturn))
#else
#define PAIR_PRINTF
#define PAIR_WRONG
#endif

/* Notes an operation that is about to be done. */
void pair_note(blocks_pair *pair, const char *format, ...) PAIR_PRINTF;
/* Prints what is wrong, the seed and the last operations, and aborts. */
void pair_wrong(const blocks_pair *pair, const char *format, ...) PAIR_WRONG;
/* Compares all that can be asked, and what the manager holds inside. */
void pair_compare(const blocks_pair *pair);

#endif
