/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_POOL_H
#define KVL_POOL_H

/* What the layers above use of a pool. */

#include <kvleaf/blocks.h>
#include <kvleaf/pool.h>

#include "device/chain.h"

typedef struct kvl_pool_copier kvl_pool_copier;

struct kvleaf_pool {
    kvleaf_device *device;
    int64_t references;        /* guarded by the device's mutex */
    kvleaf_pool_params params; /* defaults and layout resolved, memory NULL */
    uint64_t layer_bytes;      /* K (or V) of one layer */
    uint64_t block_bytes;      /* K (or V) of one block in one layer: all its heads */
    cl_mem *memory;            /* [num_layers * 2] K, V of each layer */
    kvl_pool_copier *copier;   /* of kvleaf_pool_copy_blocks */
    bool host;                 /* made by kvl_pool_create_host: it has no copier and no marks */
    uint8_t *marks;            /* [num_blocks] what kvleaf_pool_copy_blocks has seen of a block; 0 between calls */
};

/* A pool is kept alive by the caches over it. */
void kvl_pool_retain(kvleaf_pool *pool);
void kvl_pool_release(kvleaf_pool *pool);
kvleaf_device *kvl_pool_device(const kvleaf_pool *pool);

/* The device's best layout for a geometry: what AUTO becomes. `device` may be NULL. */
kvleaf_layout kvl_layout_best(const kvleaf_device *device, kvleaf_dtype dtype, int32_t block_size, int32_t head_dim);

/* Whether a layout takes this block size; where not, why. */
const char *kvl_layout_refuses(kvleaf_layout layout, int32_t block_size);

/* Memory of the host that the device's copies reach, for blocks of a pool that are put aside: a pool of the same
 * layers, geometry and layout. */
kvleaf_status kvl_pool_create_host(const kvleaf_pool *like, int32_t num_blocks, kvleaf_pool **out);

/* Block copies on the device: `pairs` is an array of {source, destination} ints found at `first_int`, not checked. The
 * two pools are of one geometry and layout; they may be the same. */
typedef struct kvl_pool_copies {
    const kvleaf_pool *from, *to;
    cl_mem pairs;
    int32_t first_int, count;
} kvl_pool_copies;

/* Makes copies between pools that are like `pool`, in a launch a layer. A copier has a kernel of its own; it must not
 * outlive the pool's device. */
kvleaf_status kvl_pool_copier_create(const kvleaf_pool *pool, kvl_pool_copier **out);
void kvl_pool_copier_destroy(kvl_pool_copier **copier);
kvleaf_status kvl_pool_copier_chain(kvl_pool_copier *copier, const kvl_pool_copies *copies, kvl_chain *chain);

/* A buffer with pairs[count], which is read before the call returns. The caller releases it; launches that were
 * enqueued keep it. */
kvleaf_status kvl_pool_pairs(kvleaf_device *device, const kvleaf_block_copy *pairs, int32_t count, cl_mem *out);

/* Tokens of a block table, and their bytes in host memory in the order [layer][K, V][token][KV head][dim], of the
 * pool's dtype, whatever the pool's layout. */
typedef struct kvl_rows {
    const int32_t *table; /* token t lies in block table[t / block_size]; every entry that is reached is a block */
    int64_t start, count; /* of the tokens that the bytes hold */
} kvl_rows;

/* UINT64_MAX where it is more. */
uint64_t kvl_pool_rows_bytes(const kvleaf_pool *pool, int64_t count);
/* Each waits for the device, behind the chain's other commands; the arguments are not checked. */
kvleaf_status kvl_pool_read_rows(const kvleaf_pool *pool, const kvl_rows *rows, void *bytes, kvl_chain *chain);
/* Writes those of the tokens that are `from` or later. The other tokens of their blocks keep their bytes. */
kvleaf_status kvl_pool_write_rows(const kvleaf_pool *pool, const kvl_rows *rows, int64_t from, const void *bytes,
                                  kvl_chain *chain);

#endif
