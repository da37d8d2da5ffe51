/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens between a pool's blocks and rows in host memory. Runs of neighbouring blocks are moved in one piece, and taken
 * apart or put together on the host, so that every layout is served alike. */
#include "pool/pool.h"

#include <string.h>

#define RUN_BYTES (1 << 20) /* moved at once, if a block is not larger */

/* Where an element of a tile lies, and how many from it on lie one after the other. */
typedef struct place {
    uint32_t offset, together;
} place;

typedef struct transfer {
    const kvleaf_pool *pool;
    const kvl_rows *rows;
    kvl_chain *chain;
    bool write;
    int64_t from, to;      /* tokens that move */
    unsigned char *bytes;  /* of the rows; a write only reads them */
    unsigned char *blocks; /* room for a run */
    int64_t most;          /* blocks of it */
    size_t padded;         /* dims of a token in a tile, padding included */
    place *places[2];      /* K, V: [block_size][padded] */
} transfer;

uint64_t kvl_pool_rows_bytes(const kvleaf_pool *pool, int64_t count)
{
    const kvleaf_pool_params *p = &pool->params;
    uint64_t bytes = 2 * (uint64_t)p->num_layers * (uint64_t)p->head_dim_k * kvleaf_dtype_size(p->dtype);
    bool fits = kvl_mul(bytes, (uint64_t)p->num_kv_heads, &bytes) && kvl_mul(bytes, (uint64_t)count, &bytes);
    return fits ? bytes : UINT64_MAX;
}

static place *map_tile(const kvleaf_pool *pool, bool value, size_t padded)
{
    const kvleaf_pool_params *p = &pool->params;
    place *places = kvl_alloc(&pool->device->allocator, (size_t)p->block_size * padded, sizeof *places);
    for (int32_t token = 0; places && token < p->block_size; token++) {
        place *row = places + (size_t)token * padded;
        for (int32_t dim = (int32_t)padded - 1; dim >= 0; dim--) {
            size_t offset = kvleaf_layout_offset(p->layout, value, p->block_size, p->head_dim_k, token, dim);
            bool next = dim + 1 < (int32_t)padded && row[dim + 1].offset == offset + 1;
            row[dim] = (place){.offset = (uint32_t)offset, .together = next ? row[dim + 1].together + 1 : 1};
        }
    }
    return places;
}

/* One KV head of one token. What is written fills the padding with zeros, as append does. */
static void move_row(const transfer *t, const place *places, unsigned char *tile, unsigned char *row)
{
    size_t size = kvleaf_dtype_size(t->pool->params.dtype), dims = (size_t)t->pool->params.head_dim_k;
    for (size_t dim = 0; dim < t->padded;) {
        size_t end = dim < dims ? dims : t->padded;
        size_t count = places[dim].together < end - dim ? places[dim].together : end - dim;
        unsigned char *at = tile + places[dim].offset * size;
        if (!t->write && dim < dims)
            memcpy(row + dim * size, at, count * size);
        else if (t->write && dim < dims)
            memcpy(at, row + dim * size, count * size);
        else if (t->write)
            memset(at, 0, count * size);
        dim += count;
    }
}

/* The tokens of one block of a layer, K or V of them, whose tiles begin at `tiles`. */
static void move_side(const transfer *t, size_t layer, bool value, int64_t entry, unsigned char *tiles)
{
    const kvleaf_pool_params *p = &t->pool->params;
    size_t size = kvleaf_dtype_size(p->dtype), heads = (size_t)p->num_kv_heads;
    size_t row_bytes = (size_t)p->head_dim_k * size, tile_bytes = (size_t)p->block_size * t->padded * size;
    int64_t first = entry * p->block_size, end = first + p->block_size;
    for (int64_t token = first > t->from ? first : t->from; token < end && token < t->to; token++) {
        const place *places = t->places[value] + (size_t)(token - first) * t->padded;
        size_t row = ((2 * layer + value) * (size_t)t->rows->count + (size_t)(token - t->rows->start)) * heads;
        for (size_t head = 0; head < heads; head++)
            move_row(t, places, tiles + head * tile_bytes, t->bytes + (row + head) * row_bytes);
    }
}

/* Blocks that follow each other in the table and in the pool. */
static kvleaf_status move_run(const transfer *t, size_t layer, int64_t entry, int64_t count)
{
    int64_t block_size = t->pool->params.block_size;
    size_t block_bytes = (size_t)t->pool->block_bytes, size = block_bytes * (size_t)count;
    size_t offset = block_bytes * (size_t)t->rows->table[entry];
    bool whole = t->from <= entry * block_size && (entry + count) * block_size <= t->to;
    kvleaf_status status = KVLEAF_OK;
    if (!t->write || !whole)
        status = kvl_chain_read(t->chain, t->pool->memory[layer], offset, size, t->blocks, true);
    if (status)
        return status;
    for (int64_t i = 0; i < count; i++) {
        unsigned char *block = t->blocks + (size_t)i * block_bytes;
        move_side(t, layer, false, entry + i, block);
        move_side(t, layer, true, entry + i, block + block_bytes / 2);
    }
    return t->write ? kvl_chain_write_now(t->chain, t->pool->memory[layer], offset, size, t->blocks) : KVLEAF_OK;
}

static kvleaf_status move_layer(const transfer *t, size_t layer)
{
    const int32_t *table = t->rows->table;
    int64_t block_size = t->pool->params.block_size, end = kvl_ceil_div(t->to, block_size);
    kvleaf_status status = KVLEAF_OK;
    for (int64_t entry = t->from / block_size, count; !status && entry < end; entry += count) {
        count = 1;
        while (count < t->most && entry + count < end && table[entry + count] == table[entry] + count)
            count++;
        status = move_run(t, layer, entry, count);
    }
    return status;
}

static kvleaf_status move(transfer *t)
{
    const kvleaf_pool *pool = t->pool;
    const kvleaf_allocator *allocator = &pool->device->allocator;
    kvleaf_status status = KVLEAF_OK;
    if (t->from >= t->to)
        return KVLEAF_OK;
    int64_t block_size = pool->params.block_size;
    int64_t touched = kvl_ceil_div(t->to, block_size) - t->from / block_size,
            most = (int64_t)(RUN_BYTES / pool->block_bytes);
    t->most = most < 1 ? 1 : most < touched ? most : touched;
    t->padded = (size_t)(pool->block_bytes / 2 / kvleaf_dtype_size(pool->params.dtype)) /
                ((size_t)pool->params.num_kv_heads * (size_t)block_size);
    t->blocks = kvl_alloc(allocator, (size_t)t->most, (size_t)pool->block_bytes);
    t->places[0] = map_tile(pool, false, t->padded);
    t->places[1] = map_tile(pool, true, t->padded);
    if (!t->blocks || !t->places[0] || !t->places[1])
        status = kvl_fail_memory((size_t)t->most * (size_t)pool->block_bytes);
    for (size_t layer = 0; !status && layer < (size_t)pool->params.num_layers; layer++)
        status = move_layer(t, layer);
    kvl_free(allocator, t->places[1]);
    kvl_free(allocator, t->places[0]);
    kvl_free(allocator, t->blocks);
    return status;
}

kvleaf_status kvl_pool_read_rows(const kvleaf_pool *pool, const kvl_rows *rows, void *bytes, kvl_chain *chain)
{
    transfer t = {.pool = pool,
                  .rows = rows,
                  .chain = chain,
                  .from = rows->start,
                  .to = rows->start + rows->count,
                  .bytes = bytes};
    return move(&t);
}

kvleaf_status kvl_pool_write_rows(const kvleaf_pool *pool, const kvl_rows *rows, int64_t from, const void *bytes,
                                  kvl_chain *chain)
{
    transfer t = {.pool = pool,
                  .rows = rows,
                  .chain = chain,
                  .write = true,
                  .from = from > rows->start ? from : rows->start,
                  .to = rows->start + rows->count,
                  .bytes = (unsigned char *)bytes};
    return move(&t);
}
