/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_POOL_H
#define KVLEAF_POOL_H

/* Device-resident K/V storage of all layers. Order is [layer][block][K, V][kv_head][tile]: a layer is one cl_mem, in
 * which each block has its keys and behind them its values; a tile holds block_size tokens of one KV head. */

#include <kvleaf/device.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvleaf_pool kvleaf_pool;

/* Returns "rows", "cpu16", ... or "?". Any thread. */
KVLEAF_API const char *kvleaf_layout_name(kvleaf_layout layout);

typedef struct kvleaf_pool_params {
    uint32_t struct_size;
    int32_t num_layers;      /* K/V layers, >= 1; 0 = 1 */
    int32_t num_blocks;      /* >= 1 */
    int32_t block_size;      /* 1 .. 256; 0 = 16 */
    int32_t num_kv_heads;    /* >= 1 */
    int32_t num_heads;       /* query heads of its layers, a multiple, which AUTO goes by; 0 = few a KV head */
    int32_t head_dim_k;      /* 1 .. 256 */
    int32_t head_dim_v;      /* 0 = head_dim_k; another value is UNSUPPORTED */
    kvleaf_dtype dtype;
    kvleaf_layout layout;    /* AUTO, ROWS, CPU16, DIM8, SWIZZLE8 */
    const cl_mem *memory;    /* [num_layers] supplied by the application and retained, each at least
                                kvleaf_pool_size's layer_bytes long; NULL = the pool allocates */
} kvleaf_pool_params;

#define KVLEAF_POOL_PARAMS_INIT KVLEAF_INIT(kvleaf_pool_params)
#ifndef __cplusplus
#define kvleaf_pool_params(...) \
    (&(kvleaf_pool_params){ .struct_size = sizeof(kvleaf_pool_params), __VA_ARGS__ })
#endif

typedef struct kvleaf_pool_bytes {
    uint32_t struct_size;
    uint64_t total_bytes;    /* K and V of all layers */
    uint64_t layer_bytes;    /* one layer: one cl_mem */
    uint64_t block_bytes;    /* one block of one layer: block b has its keys at b * block_bytes, its values half of
                                that behind */
    uint64_t token_bytes;    /* K and V of one token in all layers, padding included */
    kvleaf_layout layout;    /* what AUTO became */
} kvleaf_pool_bytes;

/* Says how large a pool of these params would be; allocates nothing. `device` may be NULL (then AUTO is ROWS).
 * INVALID: a field out of range. UNSUPPORTED: layer_bytes over the device's largest buffer (the limit is named). */
KVLEAF_API kvleaf_status kvleaf_pool_size(const kvleaf_device *device, const kvleaf_pool_params *params,
                                          kvleaf_pool_bytes *out);

/* Makes the pool and builds its block-copy program. Contents start undefined. Retains the device.
 * As kvleaf_pool_size, and TOO_SMALL (supplied memory), NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_pool_create(kvleaf_device *device, const kvleaf_pool_params *params,
                                            kvleaf_pool **out);
/* NULL is safe; sets *pool to NULL. Work already enqueued keeps the buffers alive. */
KVLEAF_API void kvleaf_pool_destroy(kvleaf_pool **pool);

/* Fills *params with what the pool was made of (defaults and layout resolved, memory NULL). */
KVLEAF_API kvleaf_status kvleaf_pool_query(const kvleaf_pool *pool, kvleaf_pool_params *params);

/* The buffer of a layer, not retained for the caller. INVALID: layer out of range. */
KVLEAF_API kvleaf_status kvleaf_pool_memory(const kvleaf_pool *pool, int32_t layer, cl_mem *memory);

/* Element offset of (token-in-block, dim) inside the tile of a block and head, and the elements of a tile: the one
 * definition of the layout on the host. `value` = false for K, true for V. Any thread; arguments are not checked. */
KVLEAF_API size_t kvleaf_layout_offset(kvleaf_layout layout, bool value, int32_t block_size, int32_t head_dim,
                                       int32_t token, int32_t dim);
KVLEAF_API size_t kvleaf_layout_tile(kvleaf_layout layout, int32_t block_size, int32_t head_dim);

/* Copies whole blocks, all layers, K and V: dst[i] = src[i]. Sources and destinations must be disjoint.
 * `src`, `dst`: host arrays [count], read before the call returns. INVALID: an id out of range, a null, a block that
 * is both source and destination or twice a destination. Also the statuses of exec:
 * INVALID, FOREIGN. NO_MEMORY, DEVICE. */
KVLEAF_API kvleaf_status kvleaf_pool_copy_blocks(kvleaf_pool *pool, const int32_t *src, const int32_t *dst,
                                                 int32_t count, const kvleaf_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
