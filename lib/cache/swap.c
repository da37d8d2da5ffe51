/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of a sequence to host memory and back. The copies run in order with the cache's other commands, so that the
 * blocks they read, or the host's, may be handed out again as soon as they are enqueued. */
#include "cache/cache.h"

static kvleaf_status enqueue(kvleaf_cache *cache, const kvleaf_swap_copy *copies, int32_t count, bool out,
                             const kvleaf_exec *exec)
{
    kvl_tail_call call;
    kvleaf_status status = kvl_tail_begin(&cache->tail, exec, &call);
    if (status)
        return status;
    status = kvl_cache_copy_pending(cache, &call.chain);
    for (int32_t i = 0; !status && i < cache->num_groups; i++)
        status = kvl_host_pool_copy(cache->groups[i].host, cache->groups[i].pool, i, copies, count, out, &call.chain);
    return kvl_tail_end(&call, status);
}

static kvleaf_status swap(kvleaf_cache *cache, kvleaf_seq seq, bool out, const kvleaf_exec *exec)
{
    if (!cache)
        return kvl_fail_null("cache");
    kvleaf_status status = kvl_check_exec(cache->device, exec);
    if (!status)
        status = kvl_tail_check(&cache->tail);
    if (status)
        return status;
    if (!cache->groups[0].host)
        return kvl_fail(KVLEAF_UNSUPPORTED, "swap_blocks", 0, 1, "the cache was made with swap_blocks 0");
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = 0;
    status = kvl_swap_begin(cache->blocks, seq, out, &copies, &count);
    if (status)
        return status;
    status = enqueue(cache, copies, count, out, exec);
    kvleaf_blocks_swap_end(cache->blocks, seq, !status);
    if (!status)
        kvl_cache_copied(cache);
    return status;
}

kvleaf_status kvleaf_seq_swap_out(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_exec *exec)
{
    return swap(cache, seq, true, exec);
}

kvleaf_status kvleaf_seq_swap_in(kvleaf_cache *cache, kvleaf_seq seq, const kvleaf_exec *exec)
{
    return swap(cache, seq, false, exec);
}
