/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens to and from host memory, and the block copies that calls outside a step have to make first. */
#include "cache/cache.h"

static kvleaf_status copy_pending(kvleaf_cache *cache, int32_t group, kvl_chain *chain)
{
    const kvleaf_block_copy *pairs = NULL;
    kvl_pool_copies copies = {0};
    kvleaf_status status = kvleaf_blocks_copies(cache->blocks, group, &pairs, &copies.count);
    if (status || !copies.count)
        return status;
    status = kvl_pool_pairs(cache->device, pairs, copies.count, &copies.pairs);
    if (status)
        return status;
    status = kvl_pool_copier_chain(cache->groups[group].copier, &copies, chain);
    cache->device->cl->ReleaseMemObject(copies.pairs); /* the enqueued launches keep it */
    return status;
}

kvleaf_status kvl_cache_copy_pending(kvleaf_cache *cache, kvl_chain *chain)
{
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = copy_pending(cache, i, chain);
    return status;
}

void kvl_cache_copied(kvleaf_cache *cache)
{
    for (int32_t i = 0; i < cache->num_groups; i++) {
        const kvleaf_block_copy *copies = NULL;
        int32_t count = 0;
        if (kvleaf_blocks_copies(cache->blocks, i, &copies, &count) == KVLEAF_OK)
            kvleaf_blocks_copies_done(cache->blocks, i, count);
    }
}

uint64_t kvleaf_cache_token_bytes(const kvleaf_cache *cache, int64_t count)
{
    uint64_t bytes = 0;
    for (int32_t i = 0; cache && count > 0 && i < cache->num_groups; i++)
        if (!kvl_add(bytes, kvl_pool_rows_bytes(cache->groups[i].pool, count), &bytes))
            return UINT64_MAX;
    return bytes;
}

/* A range of a sequence's tokens and their bytes. */
typedef struct range {
    kvleaf_cache *cache;
    kvl_sequence *sequence;
    int64_t start, count;
    unsigned char *bytes; /* an import only reads them */
    bool import;
    int64_t from; /* import: the first token to write */
} range;

static kvleaf_status move_range(const range *r, kvl_chain *chain)
{
    unsigned char *bytes = r->bytes;
    kvleaf_status status = kvl_cache_copy_pending(r->cache, chain);
    for (int32_t i = 0; !status && i < r->cache->num_groups; i++) {
        const kvleaf_pool *pool = r->cache->groups[i].pool;
        const kvl_rows rows = {.table = kvl_sequence_table(r->sequence, i), .start = r->start, .count = r->count};
        status = r->import ? kvl_pool_write_rows(pool, &rows, r->from, bytes, chain)
                           : kvl_pool_read_rows(pool, &rows, bytes, chain);
        bytes += kvl_pool_rows_bytes(pool, r->count);
    }
    return status;
}

static kvleaf_status run_range(const range *r, const kvleaf_exec *exec)
{
    kvl_tail_call call;
    kvleaf_status status = kvl_tail_begin(&r->cache->tail, exec, &call);
    if (!status)
        status = kvl_tail_end(&call, move_range(r, &call.chain));
    if (!status)
        kvl_cache_copied(r->cache);
    return status;
}

static kvleaf_status find_resident(const kvleaf_cache *cache, kvleaf_seq seq, kvl_sequence **out)
{
    kvleaf_status status = cache ? kvl_sequence_find(cache->blocks, seq, out) : kvl_fail_null("cache");
    return status ? status : kvl_sequence_check_resident(*out, seq);
}

/* What export and import have in common; `length` is the one the range must be within. */
static kvleaf_status check_range(const range *r, int64_t length, const kvleaf_exec *exec)
{
    kvleaf_status status = kvl_check_exec(r->cache->device, exec);
    if (!status)
        status = kvl_tail_check(&r->cache->tail);
    if (status)
        return status;
    if (r->count < 0 || r->count > length - r->start)
        return kvl_fail_range("count", r->count, 0, length - r->start);
    return r->count && !r->bytes ? kvl_fail_null("bytes") : KVLEAF_OK;
}

static kvleaf_status check_window(const range *r)
{
    int64_t first = r->start / r->cache->block_size;
    for (int32_t i = 0; r->count > 0 && i < r->cache->num_groups; i++)
        if (kvl_sequence_table(r->sequence, i)[first] == KVLEAF_NO_BLOCK)
            return kvl_fail(KVLEAF_INVALID, "start", r->start, 0, "token %lld has left the window of group %d",
                            (long long)r->start, i);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_seq_export(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, int64_t count, void *bytes,
                                uint64_t size, const kvleaf_exec *exec)
{
    range r = {.cache = cache, .start = start, .count = count, .bytes = bytes};
    kvleaf_status status = find_resident(cache, seq, &r.sequence);
    if (status)
        return status;
    if (start < 0 || start > r.sequence->committed)
        return kvl_fail_range("start", start, 0, r.sequence->committed);
    status = check_range(&r, r.sequence->committed, exec);
    if (!status)
        status = check_window(&r);
    if (status)
        return status;
    uint64_t needed = kvleaf_cache_token_bytes(cache, count);
    if (size < needed)
        return kvl_fail(KVLEAF_TOO_SMALL, "size", (int64_t)size, (int64_t)needed,
                        "size is %llu, %lld tokens take %llu bytes", (unsigned long long)size, (long long)count,
                        (unsigned long long)needed);
    return run_range(&r, exec);
}

kvleaf_status kvleaf_seq_import(kvleaf_cache *cache, kvleaf_seq seq, int64_t start, int64_t count, const void *bytes,
                                uint64_t size, const kvleaf_exec *exec)
{
    range r = {.cache = cache, .start = start, .count = count, .bytes = (unsigned char *)bytes, .import = true};
    kvleaf_status status = find_resident(cache, seq, &r.sequence);
    if (status)
        return status;
    r.from = r.sequence->committed;
    if (start < 0 || start > r.from)
        return kvl_fail_range("start", start, 0, r.from);
    status = check_range(&r, r.sequence->extended, exec);
    if (status)
        return status;
    uint64_t needed = kvleaf_cache_token_bytes(cache, count);
    if (size != needed)
        return kvl_fail(KVLEAF_INVALID, "size", (int64_t)size, (int64_t)needed,
                        "size is %llu, %lld tokens take %llu bytes", (unsigned long long)size, (long long)count,
                        (unsigned long long)needed);
    if (r.sequence->planned > r.from)
        return kvl_fail(KVLEAF_BUSY, "seq", 0, 0, "the sequence is in an open plan");
    int32_t num_q = (int32_t)(start + count - r.from);
    if (num_q <= 0)
        return KVLEAF_OK;
    status = kvleaf_blocks_step_begin(cache->blocks, &seq, &num_q, 1);
    if (status)
        return status;
    status = run_range(&r, exec);
    return status ? (kvleaf_blocks_step_rollback(cache->blocks, &seq, 1), status)
                  : kvleaf_blocks_step_commit(cache->blocks, &seq, NULL, 1);
}

kvleaf_status kvl_cache_read_rows(kvleaf_cache *cache, int32_t group, const kvl_rows *rows, void *bytes,
                                  const kvleaf_exec *exec)
{
    kvl_tail_call call;
    kvleaf_status status = kvl_tail_begin(&cache->tail, exec, &call);
    return status ? status
                  : kvl_tail_end(&call, kvl_pool_read_rows(cache->groups[group].pool, rows, bytes, &call.chain));
}

kvleaf_status kvl_cache_write_rows(kvleaf_cache *cache, int32_t group, const kvl_rows *rows, int64_t from,
                                   const void *bytes, const kvleaf_exec *exec)
{
    kvl_tail_call call;
    kvleaf_status status = kvl_tail_begin(&cache->tail, exec, &call);
    return status ? status
                  : kvl_tail_end(&call, kvl_pool_write_rows(cache->groups[group].pool, rows, from, bytes, &call.chain));
}
