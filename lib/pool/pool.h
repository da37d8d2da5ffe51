/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_POOL_H
#define KVL_POOL_H

/* What the layers above use of a pool. */

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

/* The pool's block copies as a step issues them: `pairs` is a device array of {src, dst} ints found at `first_int`, not
 * checked. Enqueues one launch a layer, waits on the list, returns no event unless asked. A copier has a kernel of its
 * own, and the pool must outlive it. */
kvleaf_status kvl_pool_copier_create(kvleaf_pool *pool, kvl_pool_copier **out);
void kvl_pool_copier_destroy(kvl_pool_copier **copier);
kvleaf_status kvl_pool_copier_run(kvl_pool_copier *copier, cl_mem pairs, int32_t first_int, int32_t count,
                                  cl_command_queue queue, cl_uint num_wait, const cl_event *wait_list,
                                  cl_event *event_out);
/* The same as the last commands of a chain. */
kvleaf_status kvl_pool_copier_chain(kvl_pool_copier *copier, cl_mem pairs, int32_t first_int, int32_t count,
                                    kvl_chain *chain);

#endif
