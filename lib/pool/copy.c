/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of whole blocks, all layers: a step's, and an application's own. */
#include "device/chain.h"
#include "device/variant.h"
#include "pool/pool.h"

struct kvl_pool_copier {
    kvleaf_pool *pool;
    cl_kernel kernel;
    size_t pieces; /* work-groups that share a block */
    size_t work_group;
};

/* A multiple of 4, since a key and a value are in it. */
static uint64_t geometry_block_bytes(const kvl_geometry *g)
{
    return 2 * (uint64_t)kvleaf_layout_tile(g->layout, g->block_size, g->head_dim) * kvleaf_dtype_size(g->kv_dtype) *
           (uint64_t)g->num_kv_heads;
}

static const char *refuses_16(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    return geometry_block_bytes(geometry) % 16 ? "moves units of 16 bytes, the block's bytes are no multiple" : NULL;
}

static const char *refuses_cpu(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    if (!(caps->type & CL_DEVICE_TYPE_CPU))
        return "is for CPU devices";
    return geometry_block_bytes(geometry) % 64 ? "moves units of 64 bytes, the block's bytes are no multiple" : NULL;
}

#define PORTABLE(name_, refuses_, unit)                                                                                \
    {                                                                                                                  \
        .family = "copy", .name = name_, .file = "portable/copy.cl", .kernels = {"kvl_copy_blocks"},                   \
        .refuses = refuses_, .options = "-DUNIT=" unit, .work_group = 64                                               \
    }

static const kvl_variant variants[] = {
    PORTABLE("portable_4", NULL, "4"),
    PORTABLE("portable_16", refuses_16, "16"),
    {.family = "copy",
     .name = "cpu",
     .file = "cpu/copy.cl",
     .kernels = {"kvl_copy_blocks"},
     .refuses = refuses_cpu,
     .work_group = 1},
};

/* Bytes a work-item moves: enough to pay for its start. */
enum { CPU_ITEM_BYTES = 16384, PORTABLE_ITEM_BYTES = 64 };

kvleaf_status kvl_pool_copier_create(kvleaf_pool *pool, kvl_pool_copier **out)
{
    kvleaf_device *device = pool->device;
    const kvleaf_pool_params *p = &pool->params;
    kvl_geometry geometry = {
        .q_dtype = p->dtype,
        .kv_dtype = p->dtype,
        .out_dtype = p->dtype,
        .layout = p->layout,
        .num_heads = p->num_kv_heads,
        .num_kv_heads = p->num_kv_heads,
        .head_dim = p->head_dim_k,
        .block_size = p->block_size,
    };
    kvl_chosen chosen;
    kvleaf_status status =
        kvl_variant_choose(device, variants, (int)(sizeof variants / sizeof *variants), &geometry, &chosen);
    if (status)
        return status;
    kvl_pool_copier *copier = kvl_alloc(&device->allocator, 1, sizeof *copier);
    if (!copier)
        return kvl_fail_memory(sizeof *copier);
    copier->pool = pool;
    copier->work_group = (size_t)chosen.work_group;
    bool scalar = chosen.variant->work_group == 1; /* a work-item a work-group, as CPUs like it */
    uint64_t piece = scalar ? CPU_ITEM_BYTES : (uint64_t)PORTABLE_ITEM_BYTES * copier->work_group;
    copier->pieces = (size_t)(pool->block_bytes / piece);
    if (copier->pieces == 0)
        copier->pieces = 1;
    status = kvl_device_kernel(device, chosen.program, chosen.variant->kernels[0], &copier->kernel);
    if (status) {
        kvl_free(&device->allocator, copier);
        return status;
    }
    *out = copier;
    return KVLEAF_OK;
}

void kvl_pool_copier_destroy(kvl_pool_copier **copier)
{
    if (!copier || !*copier)
        return;
    kvleaf_device *device = (*copier)->pool->device;
    device->cl->ReleaseKernel((*copier)->kernel);
    kvl_free(&device->allocator, *copier);
    *copier = NULL;
}

static kvleaf_status copy_layer(kvl_pool_copier *copier, const kvl_pool_copies *copies, size_t layer, kvl_chain *chain)
{
    cl_int first_int = copies->first_int;
    cl_ulong block_bytes = copier->pool->block_bytes;
    const kvl_arg args[] = {
        KVL_ARG(copier->pool->memory[layer]),
        KVL_ARG(copies->pairs),
        KVL_ARG(first_int),
        KVL_ARG(block_bytes),
    };
    kvleaf_status status =
        kvl_kernel_args(copier->pool->device, copier->kernel, args, (int)(sizeof args / sizeof *args));
    if (status)
        return status;
    size_t global[2] = {copier->pieces * copier->work_group, (size_t)copies->count};
    size_t local[2] = {copier->work_group, 1};
    return kvl_chain_kernel(chain, copier->kernel, 2, global, local, false);
}

kvleaf_status kvl_pool_copier_chain(kvl_pool_copier *copier, const kvl_pool_copies *copies, kvl_chain *chain)
{
    kvleaf_status status = KVLEAF_OK;
    size_t layers = (size_t)copier->pool->params.num_layers;
    for (size_t layer = 0; !status && copies->count > 0 && layer < layers; layer++)
        status = copy_layer(copier, copies, layer, chain);
    return status;
}

kvleaf_status kvl_pool_pairs(kvleaf_device *device, const kvleaf_block_copy *pairs, int32_t count, cl_mem *out)
{
    cl_int error = CL_SUCCESS;
    size_t bytes = (size_t)count * sizeof *pairs;
    *out = device->cl->CreateBuffer(device->context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, bytes, (void *)pairs,
                                    &error);
    return *out ? KVLEAF_OK : kvl_fail_opencl("clCreateBuffer", error);
}

enum { MARK_SOURCE = 1, MARK_DESTINATION = 2 };

/* Writes {src, dst} pairs. An id out of range, or a block that is both source and destination or twice destination,
 * where the result would hang on the order of the copies, is INVALID. */
static kvleaf_status pair_up(kvleaf_pool *pool, const int32_t *src, const int32_t *dst, int32_t count,
                             kvleaf_block_copy *pairs)
{
    int32_t num_blocks = pool->params.num_blocks;
    for (int32_t i = 0; i < count; i++) {
        if (src[i] < 0 || src[i] >= num_blocks)
            return kvl_fail(KVLEAF_INVALID, "src", src[i], num_blocks, "src[%d] is block %d, the pool has %d", (int)i,
                            (int)src[i], (int)num_blocks);
        if (dst[i] < 0 || dst[i] >= num_blocks)
            return kvl_fail(KVLEAF_INVALID, "dst", dst[i], num_blocks, "dst[%d] is block %d, the pool has %d", (int)i,
                            (int)dst[i], (int)num_blocks);
        pairs[i] = (kvleaf_block_copy){.src = src[i], .dst = dst[i]};
    }
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; i < count; i++)
        pool->marks[src[i]] = MARK_SOURCE;
    for (int32_t i = 0; i < count && !status; i++) {
        if (pool->marks[dst[i]])
            status = kvl_fail(KVLEAF_INVALID, "dst", dst[i], 0, "dst[%d], block %d, is also a %s", (int)i, (int)dst[i],
                              pool->marks[dst[i]] == MARK_SOURCE ? "source" : "destination before");
        else
            pool->marks[dst[i]] = MARK_DESTINATION;
    }
    for (int32_t i = 0; i < count; i++)
        pool->marks[src[i]] = pool->marks[dst[i]] = 0;
    return status;
}

static kvleaf_status upload_pairs(kvleaf_pool *pool, const int32_t *src, const int32_t *dst, int32_t count, cl_mem *out)
{
    const kvleaf_allocator *allocator = &pool->device->allocator;
    kvleaf_block_copy *pairs = kvl_alloc(allocator, (size_t)count, sizeof *pairs);
    if (!pairs)
        return kvl_fail_memory((size_t)count * sizeof *pairs);
    kvleaf_status status = pair_up(pool, src, dst, count, pairs);
    if (!status)
        status = kvl_pool_pairs(pool->device, pairs, count, out);
    kvl_free(allocator, pairs);
    return status;
}

kvleaf_status kvleaf_pool_copy_blocks(kvleaf_pool *pool, const int32_t *src, const int32_t *dst, int32_t count,
                                      const kvleaf_exec *exec)
{
    if (!pool)
        return kvl_fail_null("pool");
    kvleaf_status status = kvl_check_exec(pool->device, exec);
    if (status)
        return status;
    if (count < 0 || count > pool->params.num_blocks)
        return kvl_fail_range("count", count, 0, pool->params.num_blocks);
    if (count > 0 && !src)
        return kvl_fail_null("src");
    if (count > 0 && !dst)
        return kvl_fail_null("dst");
    cl_mem pairs = NULL;
    if (count > 0)
        status = upload_pairs(pool, src, dst, count, &pairs);
    if (status)
        return status;
    kvl_chain chain;
    status = kvl_chain_begin(&chain, pool->device, exec);
    if (!status) {
        const kvl_pool_copies copies = {.pairs = pairs, .count = count};
        status = kvl_chain_end(&chain, kvl_pool_copier_chain(pool->copier, &copies, &chain));
    }
    if (pairs)
        pool->device->cl->ReleaseMemObject(pairs); /* the enqueued launches keep it */
    return status;
}
