/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences and blocks of a cache: calls on its block manager. */
#include "cache/cache.h"

static kvleaf_status check_cache(const kvleaf_cache *cache)
{
    return cache ? KVLEAF_OK : kvl_fail_null("cache");
}

kvleaf_status kvleaf_seq_create(kvleaf_cache *cache, const kvleaf_seq_params *params, kvleaf_seq *out)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_create(cache->blocks, params, out);
}

kvleaf_status kvleaf_seq_extend(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_tokens *tokens, int64_t *cached)
{
    kvleaf_status status = check_cache(cache);
    if (!status)
        status = kvl_tail_check(&cache->tail);
    return status ? status : kvleaf_blocks_seq_extend(cache->blocks, seq, tokens, cached);
}

kvleaf_status kvleaf_can_extend(const kvleaf_cache *cache, kvleaf_seq seq, int64_t count, bool *out)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_can_extend(cache->blocks, seq, count, out);
}

kvleaf_status kvleaf_prefix_match(const kvleaf_cache *cache, const kvleaf_seq_params *params,
                                  const kvleaf_tokens *tokens, int64_t *matched)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_prefix_match(cache->blocks, params, tokens, matched);
}

kvleaf_status kvleaf_prefix_clear(kvleaf_cache *cache)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_prefix_clear(cache->blocks);
}

kvleaf_status kvleaf_seq_set_ids(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, const int32_t *ids, int64_t count)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_set_ids(cache->blocks, seq, start, ids, count);
}

kvleaf_status kvleaf_seq_rearrange(kvleaf_cache *cache, const kvleaf_seq *seqs, const int32_t *parents, int32_t n)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_rearrange(cache->blocks, seqs, parents, n);
}

kvleaf_status kvleaf_block_pin(kvleaf_cache *cache, int32_t group, int32_t block)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_pin(cache->blocks, group, block);
}

kvleaf_status kvleaf_block_unpin(kvleaf_cache *cache, int32_t group, int32_t block)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_unpin(cache->blocks, group, block);
}

kvleaf_status kvleaf_seq_fork(kvleaf_cache *cache, kvleaf_seq seq, int64_t pos, kvleaf_seq *child)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_fork(cache->blocks, seq, pos, child);
}

kvleaf_status kvleaf_seq_truncate(kvleaf_cache *cache, kvleaf_seq seq, int64_t length)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_truncate(cache->blocks, seq, length);
}

kvleaf_status kvleaf_seq_destroy(kvleaf_cache *cache, kvleaf_seq *seq)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_destroy(cache->blocks, seq);
}

kvleaf_status kvleaf_seq_query(const kvleaf_cache *cache, kvleaf_seq seq, kvleaf_seq_info *info)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_query(cache->blocks, seq, info);
}

kvleaf_status kvleaf_seq_table(const kvleaf_cache *cache, kvleaf_seq seq, int32_t group, int32_t *table,
                               int32_t capacity, int32_t *count)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_seq_table(cache->blocks, seq, group, table, capacity, count);
}

kvleaf_status kvleaf_cache_query(const kvleaf_cache *cache, kvleaf_blocks_stats *stats)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_query(cache->blocks, stats);
}

kvleaf_status kvleaf_cache_describe(const kvleaf_cache *cache, kvleaf_format format, char *buffer, size_t capacity,
                                    size_t *size)
{
    kvleaf_status status = check_cache(cache);
    return status ? status : kvleaf_blocks_describe(cache->blocks, format, buffer, capacity, size);
}

const kvleaf_blocks *kvleaf_cache_blocks(const kvleaf_cache *cache)
{
    return cache ? cache->blocks : NULL;
}
