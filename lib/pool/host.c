/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks in host memory. The memory is the library's own; a buffer made over it with CL_MEM_USE_HOST_PTR and never used
 * makes drivers pin it, so that it is read into and written from at the bus's full rate and without waiting. A kernel
 * must not be given that buffer, nor is it mapped: NVIDIA's driver would make room for it on the device, too. */
#include "pool/pool.h"

#define PAGE 4096 /* what drivers want such memory to be aligned to */

typedef struct host_layer {
    void *allocated;
    unsigned char *bytes; /* [num_blocks][block_bytes], aligned */
    cl_mem pinned;
} host_layer;

struct kvl_host_pool {
    kvleaf_device *device;
    host_layer *layers; /* [num_layers] */
    size_t num_layers, block_bytes;
    cl_event busy; /* stands for all copies that were enqueued; NULL = none were */
};

static kvleaf_status make_layer(const kvl_host_pool *host, size_t bytes, host_layer *out)
{
    kvleaf_device *device = host->device;
    cl_int error = CL_SUCCESS;
    out->allocated = kvl_alloc(&device->allocator, bytes + PAGE, 1);
    if (!out->allocated)
        return kvl_fail_memory(bytes + PAGE);
    out->bytes = (unsigned char *)out->allocated + (PAGE - (uintptr_t)out->allocated % PAGE);
    out->pinned =
        device->cl->CreateBuffer(device->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, bytes, out->bytes, &error);
    return out->pinned ? KVLEAF_OK : kvl_fail_opencl("clCreateBuffer", error);
}

kvleaf_status kvl_host_pool_create(const kvleaf_pool *like, int32_t num_blocks, kvl_host_pool **out)
{
    kvleaf_device *device = like->device;
    uint64_t bytes = 0, limit = device->caps.max_alloc_bytes;
    if (!kvl_mul(like->block_bytes, (uint64_t)num_blocks, &bytes) || bytes > limit)
        return kvl_fail(KVLEAF_UNSUPPORTED, "swap_blocks", num_blocks, (int64_t)(limit / like->block_bytes),
                        "swap_blocks is %d, %llu is what the device's largest buffer takes", num_blocks,
                        (unsigned long long)(limit / like->block_bytes));
    kvl_host_pool *host = kvl_alloc(&device->allocator, 1, sizeof *host);
    if (!host)
        return kvl_fail_memory(sizeof *host);
    host->device = device;
    host->num_layers = (size_t)like->params.num_layers;
    host->block_bytes = (size_t)like->block_bytes;
    host->layers = kvl_alloc(&device->allocator, host->num_layers, sizeof *host->layers);
    kvleaf_status status = host->layers ? KVLEAF_OK : kvl_fail_memory(host->num_layers * sizeof *host->layers);
    for (size_t i = 0; !status && i < host->num_layers; i++)
        status = make_layer(host, (size_t)bytes, &host->layers[i]);
    if (status) {
        kvl_host_pool_destroy(&host);
        return status;
    }
    *out = host;
    return KVLEAF_OK;
}

void kvl_host_pool_destroy(kvl_host_pool **at)
{
    kvl_host_pool *host = at ? *at : NULL;
    if (!host)
        return;
    *at = NULL;
    const kvleaf_opencl *cl = host->device->cl;
    const kvleaf_allocator *allocator = &host->device->allocator;
    if (host->busy) {
        cl->WaitForEvents(1, &host->busy);
        cl->ReleaseEvent(host->busy);
    }
    for (size_t i = 0; host->layers && i < host->num_layers; i++) {
        if (host->layers[i].pinned)
            cl->ReleaseMemObject(host->layers[i].pinned);
        kvl_free(allocator, host->layers[i].allocated);
    }
    kvl_free(allocator, host->layers);
    kvl_free(allocator, host);
}

/* Blocks from copies[first] on that follow each other on both sides, upwards or (step -1) downwards. */
static int32_t run_length(const kvleaf_swap_copy *copies, int32_t first, int32_t count, int32_t step)
{
    const kvleaf_swap_copy *at = copies + first;
    int32_t run = 1;
    while (first + run < count && at[run].group == at->group && at[run].block == at->block + step * run &&
           at[run].host == at->host + step * run)
        run++;
    return run;
}

static kvleaf_status copy_all(const kvl_host_pool *host, const kvleaf_pool *pool, int32_t group,
                              const kvleaf_swap_copy *copies, int32_t count, bool out, kvl_chain *chain)
{
    kvleaf_status status = KVLEAF_OK;
    for (size_t i = 0; i < host->num_layers; i++)
        for (int32_t at = 0, run; !status && at < count; at += run) {
            int32_t up = run_length(copies, at, count, 1), down = run_length(copies, at, count, -1);
            run = up > down ? up : down;
            if (copies[at].group != group)
                continue;
            const kvleaf_swap_copy *lowest = &copies[up > down ? at : at + run - 1];
            size_t offset = (size_t)lowest->block * host->block_bytes, size = (size_t)run * host->block_bytes;
            unsigned char *bytes = host->layers[i].bytes + (size_t)lowest->host * host->block_bytes;
            status = out ? kvl_chain_read(chain, pool->memory[i], offset, size, bytes, false)
                         : kvl_chain_write(chain, pool->memory[i], offset, size, bytes, NULL);
        }
    return status;
}

kvleaf_status kvl_host_pool_copy(kvl_host_pool *host, const kvleaf_pool *pool, int32_t group,
                                 const kvleaf_swap_copy *copies, int32_t count, bool out, kvl_chain *chain)
{
    cl_event busy = NULL;
    kvleaf_status status = copy_all(host, pool, group, copies, count, out, chain);
    kvleaf_status marked = kvl_chain_mark(chain, &busy); /* also for what went before a failure */
    if (marked)
        host->device->cl->Finish(chain->queue); /* nothing else says when the memory is left alone */
    else if (host->busy)
        host->device->cl->ReleaseEvent(host->busy);
    if (!marked)
        host->busy = busy;
    return status ? status : marked;
}
