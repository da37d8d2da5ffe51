/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CACHE_H
#define KVL_CACHE_H

/* The managed cache from inside. Plans keep their cache alive, the cache its pool and device. */

#include <kvleaf/cache.h>

#include "attention/engine.h"
#include "blocks/blocks.h"
#include "cache/tail.h"
#include "pool/pool.h"

typedef struct kvl_cache_layer {
    int32_t pool_layer;  /* whose keys and values it reads */
    bool owns;           /* and writes */
    float softmax_scale; /* resolved */
} kvl_cache_layer;

struct kvleaf_cache {
    kvleaf_device *device;
    kvleaf_pool *pool;
    kvleaf_blocks *blocks;
    kvl_geometry geometry;
    kvl_cache_layer *layers; /* [num_layers] */
    int32_t num_layers;
    int32_t num_blocks;
    int32_t max_sequences;
    int32_t columns; /* of the block table */
    cl_mem table;    /* int32 [max_sequences][columns]: a row is a sequence's slot in the block manager. A row is
                        written, from its first changed entry on, by the step that first needs it */
    kvl_tail tail;
    int32_t references; /* the application's and one a plan */
};

void kvl_cache_release(kvleaf_cache *cache);

typedef enum kvl_plan_state {
    KVL_PLAN_IDLE,
    KVL_PLAN_OPEN,
    KVL_PLAN_FAILED /* open; can only be rolled back */
} kvl_plan_state;

struct kvleaf_plan {
    kvleaf_cache *cache;
    kvl_engine *engine;
    kvl_pool_copier *copier;
    kvl_view *views; /* [pool layers] */
    int32_t max_entries, max_tokens, max_updates;
    kvl_plan_state state;
    int32_t num_entries; /* of the open step */
    kvleaf_seq *seqs;    /* [max_entries] */
    int32_t *num_q;      /* [max_entries] */
    kvl_step_seq *steps; /* [max_entries] */
};

#endif
