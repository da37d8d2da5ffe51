/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOUR_PICTURE_H
#define KVLEAF_TOUR_PICTURE_H

/* Who holds which slots of a pool, and how it is drawn. */

#include <kvleaf/blocks.h>

enum { PICTURE_SEQS = 8, PICTURE_BLOCKS = 32, PICTURE_BLOCK_SIZE = 16, PICTURE_TABLE = 16 };

typedef struct picture_seq {
    const char *label; /* what it is */
    int32_t length, num_blocks;
    int32_t table[PICTURE_TABLE];
} picture_seq;

typedef struct picture {
    int num_seqs; /* drawn with the letters A, B, ... */
    picture_seq seqs[PICTURE_SEQS];
    int32_t reserved; /* tokens a sequence that a contiguous cache would reserve */
    kvleaf_blocks_stats stats;
} picture;

/* Of a block: the sequences that hold it, as indices into seqs; returns their number, 0 = free. */
int picture_holders(const picture *p, int32_t block, int *holders);
/* Slots of a block that hold a token. */
int32_t picture_filled(const picture *p, int32_t block);
/* Blocks that the sequences would take without sharing. */
int32_t picture_unshared(const picture *p);

void picture_print(const picture *p);
/* False where the file can't be written. */
bool picture_write_svg(const picture *p, const char *path);

#endif
