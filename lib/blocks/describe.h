/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_DESCRIBE_H
#define KVL_DESCRIBE_H

/* What the two formats of kvleaf_blocks_describe draw. */

#include "blocks/blocks.h"

enum { KVL_LOOK_HOLDERS = 4 };

typedef enum kvl_block_state {
    KVL_BLOCK_FREE,
    KVL_BLOCK_CACHED,
    KVL_BLOCK_USED,
    KVL_BLOCK_PINNED,   /* and no sequence refers to it */
    KVL_BLOCK_WITHHELD, /* left out of free_order */
    KVL_BLOCK_HOST      /* in host memory, of a swapped sequence */
} kvl_block_state;

typedef struct kvl_look {
    kvl_block_state state;
    int32_t references;
    int32_t tokens;                    /* the most that a sequence has in it */
    int32_t holders[KVL_LOOK_HOLDERS]; /* slots of the first sequences that refer to it */
} kvl_look;

typedef struct kvl_picture {
    const kvleaf_blocks *blocks;
    kvl_look *looks[KVL_MAX_GROUPS]; /* [num_blocks] of each group */
    int32_t shared[KVL_MAX_GROUPS];  /* blocks of a group with more than one reference */
    kvleaf_blocks_stats stats[KVL_MAX_GROUPS];
    /* The text goes here while it fits, and is counted in any case. */
    char *buffer;
    size_t capacity, size;
} kvl_picture;

void kvl_picture_put(kvl_picture *picture, const char *format, ...) KVL_PRINTF(2, 3);
void kvl_picture_svg(kvl_picture *picture);

#endif
