/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CACHE_H
#define KVL_CACHE_H

/* The managed cache from inside. Plans keep their cache alive, the cache its pools and device. */

#include <kvleaf/cache.h>

#include "attention/engine.h"
#include "blocks/blocks.h"
#include "cache/tail.h"
#include "pool/pool.h"

/* Layers of one K/V geometry and window: a pool, a block table a sequence. */
typedef struct kvl_cache_group {
    kvl_geometry geometry;
    kvleaf_pool *pool;
    kvl_host_pool *host; /* of blocks that are swapped out; NULL = no swap */
    kvl_pool_copier *copier;
    int32_t num_layers; /* with keys and values of their own */
    int32_t num_blocks;
    cl_mem table; /* int32 [max_sequences][columns]: a row is a sequence's slot in the block manager. A row is written,
                     from its first changed entry on, by the step that first needs it */
} kvl_cache_group;

typedef struct kvl_cache_layer {
    int32_t group;
    int32_t pool_layer;  /* of the group's pool: whose keys and values it reads */
    bool owns;           /* and writes */
    float softmax_scale; /* resolved */
} kvl_cache_layer;

struct kvleaf_cache {
    kvleaf_device *device;
    kvleaf_blocks *blocks;
    kvl_cache_group *groups; /* [num_groups] */
    int32_t num_groups;
    kvl_cache_layer *layers; /* [num_layers] */
    int32_t num_layers;
    int32_t block_size;
    int32_t max_sequences;
    int32_t columns; /* of each block table */
    kvl_tail tail;
    int32_t references; /* the application's and one a plan */
};

void kvl_cache_release(kvleaf_cache *cache);

/* Checks the layers against each other and the pools, and fills in groups and layers. */
kvleaf_status kvl_cache_form_groups(kvleaf_cache *cache, const kvleaf_cache_params *params);

/* Enqueues the copies that the manager has pending, in all groups. They stay pending until kvl_cache_copied. */
kvleaf_status kvl_cache_copy_pending(kvleaf_cache *cache, kvl_chain *chain);
void kvl_cache_copied(kvleaf_cache *cache);

/* K and V of tokens of a block table of a group, to and from rows in host memory (kvl_pool_read_rows, _write_rows), in
 * order with the cache's other calls; waits for the device. exec is checked already, and no copy is pending. */
kvleaf_status kvl_cache_read_rows(kvleaf_cache *cache, int32_t group, const kvl_rows *rows, void *bytes,
                                  const kvleaf_exec *exec);
kvleaf_status kvl_cache_write_rows(kvleaf_cache *cache, int32_t group, const kvl_rows *rows, int64_t from,
                                   const void *bytes, const kvleaf_exec *exec);

typedef enum kvl_plan_state {
    KVL_PLAN_IDLE,
    KVL_PLAN_OPEN,
    KVL_PLAN_FAILED /* open; can only be rolled back */
} kvl_plan_state;

/* A plan's part for one group. */
typedef struct kvl_plan_group {
    kvl_engine *engine;
    kvl_view *views; /* [layers of the group's pool] */
    int32_t max_updates;
    int32_t num_copies; /* of the step that is being built */
    bool gone;          /* of the open step: blocks of its sequences left the window */
} kvl_plan_group;

struct kvleaf_plan {
    kvleaf_cache *cache;
    kvl_plan_group *groups; /* [cache->num_groups] */
    int32_t max_entries, max_tokens;
    kvl_plan_state state;
    int32_t num_entries;      /* of the open step */
    kvleaf_seq *seqs;         /* [max_entries] */
    int32_t *num_q;           /* [max_entries] */
    kvl_sequence **sequences; /* [max_entries], those of seqs while a step is being built */
    kvl_step_seq *steps;      /* [max_entries], of the group that is being built */
};

#endif
