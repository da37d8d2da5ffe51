/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks in host memory. A buffer made with CL_MEM_ALLOC_HOST_PTR and kept mapped is memory that drivers pin, to be
 * read into and written from at the bus's full rate. A kernel must not be given that buffer: NVIDIA's driver would move
 * it to the device. */
#include "pool/pool.h"

typedef struct side {
    cl_mem memory;
    unsigned char *bytes; /* where it is mapped */
} side;

struct kvl_host_pool {
    kvleaf_device *device;
    cl_command_queue queue; /* that it was mapped by */
    side *sides;            /* [num_sides] K, V of each layer */
    size_t num_sides, block_bytes;
};

static kvleaf_status make_side(kvl_host_pool *host, size_t bytes, side *out)
{
    const kvleaf_opencl *cl = host->device->cl;
    cl_int error = CL_SUCCESS;
    out->memory =
        cl->CreateBuffer(host->device->context, CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, bytes, NULL, &error);
    if (!out->memory)
        return kvl_fail_opencl("clCreateBuffer", error);
    out->bytes = cl->EnqueueMapBuffer(host->queue, out->memory, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0, bytes, 0, NULL,
                                      NULL, &error);
    return out->bytes ? KVLEAF_OK : kvl_fail_opencl("clEnqueueMapBuffer", error);
}

static kvleaf_status fill(kvl_host_pool *host, uint64_t bytes)
{
    kvleaf_device *device = host->device;
    cl_int error = CL_SUCCESS;
    if (bytes > device->caps.max_alloc_bytes)
        return kvl_fail(KVLEAF_UNSUPPORTED, "swap_blocks", (int64_t)bytes, (int64_t)device->caps.max_alloc_bytes,
                        "K of one layer takes %llu bytes, the device's largest buffer is %llu",
                        (unsigned long long)bytes, (unsigned long long)device->caps.max_alloc_bytes);
    host->sides = kvl_alloc(&device->allocator, host->num_sides, sizeof *host->sides);
    if (!host->sides)
        return kvl_fail_memory(host->num_sides * sizeof *host->sides);
    host->queue = device->cl->CreateCommandQueue(device->context, device->id, 0, &error);
    if (!host->queue)
        return kvl_fail_opencl("clCreateCommandQueue", error);
    kvleaf_status status = KVLEAF_OK;
    for (size_t i = 0; !status && i < host->num_sides; i++)
        status = make_side(host, (size_t)bytes, &host->sides[i]);
    return status;
}

kvleaf_status kvl_host_pool_create(const kvleaf_pool *like, int32_t num_blocks, kvl_host_pool **out)
{
    kvleaf_device *device = like->device;
    uint64_t bytes;
    if (!kvl_mul(like->block_bytes, (uint64_t)num_blocks, &bytes))
        bytes = UINT64_MAX;
    kvl_host_pool *host = kvl_alloc(&device->allocator, 1, sizeof *host);
    if (!host)
        return kvl_fail_memory(sizeof *host);
    host->device = device;
    host->num_sides = 2 * (size_t)like->params.num_layers;
    host->block_bytes = (size_t)like->block_bytes;
    kvleaf_status status = fill(host, bytes);
    if (status) {
        kvl_host_pool_destroy(&host, NULL, NULL);
        return status;
    }
    *out = host;
    return KVLEAF_OK;
}

void kvl_host_pool_destroy(kvl_host_pool **at, cl_command_queue queue, cl_event after)
{
    kvl_host_pool *host = at ? *at : NULL;
    if (!host)
        return;
    *at = NULL;
    const kvleaf_opencl *cl = host->device->cl;
    for (size_t i = 0; host->sides && i < host->num_sides; i++) {
        side *gone = &host->sides[i];
        if (gone->bytes) /* a command that holds the memory until those before it are done */
            cl->EnqueueUnmapMemObject(queue ? queue : host->queue, gone->memory, gone->bytes, after ? 1 : 0,
                                      after ? &after : NULL, NULL);
        if (gone->memory)
            cl->ReleaseMemObject(gone->memory);
    }
    if (host->queue)
        cl->ReleaseCommandQueue(host->queue);
    kvl_free(&host->device->allocator, host->sides);
    kvl_free(&host->device->allocator, host);
}

/* Blocks from copies[first] on that follow each other on both sides. */
static int32_t run_length(const kvleaf_swap_copy *copies, int32_t first, int32_t count)
{
    const kvleaf_swap_copy *at = copies + first;
    int32_t run = 1;
    while (first + run < count && at[run].group == at->group && at[run].block == at->block + run &&
           at[run].host == at->host + run)
        run++;
    return run;
}

kvleaf_status kvl_host_pool_copy(const kvl_host_pool *host, const kvleaf_pool *pool, int32_t group,
                                 const kvleaf_swap_copy *copies, int32_t count, bool out, kvl_chain *chain)
{
    kvleaf_status status = KVLEAF_OK;
    for (size_t i = 0; i < host->num_sides; i++)
        for (int32_t at = 0, run; !status && at < count; at += run) {
            run = run_length(copies, at, count);
            if (copies[at].group != group)
                continue;
            size_t offset = (size_t)copies[at].block * host->block_bytes, size = (size_t)run * host->block_bytes;
            unsigned char *bytes = host->sides[i].bytes + (size_t)copies[at].host * host->block_bytes;
            status = out ? kvl_chain_read(chain, pool->memory[i], offset, size, bytes, false)
                         : kvl_chain_write(chain, pool->memory[i], offset, size, bytes, NULL);
        }
    return status;
}
