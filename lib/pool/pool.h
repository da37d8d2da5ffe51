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
    uint64_t layer_bytes;
    uint64_t block_bytes;    /* one block of one layer: K of all its heads, then V */
    cl_mem *memory;          /* [num_layers] */
    kvl_pool_copier *copier; /* of kvleaf_pool_copy_blocks */
    uint8_t *marks;          /* [num_blocks] what kvleaf_pool_copy_blocks has seen of a block; 0 between calls */
};

/* A pool is kept alive by the caches over it. */
void kvl_pool_retain(kvleaf_pool *pool);
void kvl_pool_release(kvleaf_pool *pool);
kvleaf_device *kvl_pool_device(const kvleaf_pool *pool);

/* What AUTO becomes: the device's best layout for a geometry with `group` query heads a KV head (0: few). `device` may
 * be NULL. */
kvleaf_layout kvl_layout_best(const kvleaf_device *device, kvleaf_dtype dtype, int32_t block_size, int32_t head_dim,
                              int32_t group);

/* Whether a layout takes this block size; where not, why. */
const char *kvl_layout_refuses(kvleaf_layout layout, int32_t block_size);

/* Block copies on the device: `pairs` is an array of {source, destination} ints found at `first_int`, not checked. */
typedef struct kvl_pool_copies {
    cl_mem pairs;
    int32_t first_int, count;
} kvl_pool_copies;

/* Makes them, in a launch a layer. A copier has a kernel of its own, and the pool must outlive it. */
kvleaf_status kvl_pool_copier_create(kvleaf_pool *pool, kvl_pool_copier **out);
void kvl_pool_copier_destroy(kvl_pool_copier **copier);
kvleaf_status kvl_pool_copier_chain(kvl_pool_copier *copier, const kvl_pool_copies *copies, kvl_chain *chain);

/* A buffer with pairs[count], which is read before the call returns. The caller releases it; launches that were
 * enqueued keep it. */
kvleaf_status kvl_pool_pairs(kvleaf_device *device, const kvleaf_block_copy *pairs, int32_t count, cl_mem *out);

/* Memory of the host, pinned where the driver does that, for blocks of a pool that are put aside. Destroying it waits
 * for the copies that are still in flight. */
typedef struct kvl_host_pool kvl_host_pool;
kvleaf_status kvl_host_pool_create(const kvleaf_pool *like, int32_t num_blocks, kvl_host_pool **out);
void kvl_host_pool_destroy(kvl_host_pool **host);
/* Moves those of the blocks that are of the group, out to host memory or back, all layers. Nothing is waited for. */
kvleaf_status kvl_host_pool_copy(kvl_host_pool *host, const kvleaf_pool *pool, int32_t group,
                                 const kvleaf_swap_copy *copies, int32_t count, bool out, kvl_chain *chain);

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
