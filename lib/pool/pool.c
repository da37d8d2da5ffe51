/* SPDX-License-Identifier: Apache-2.0 */
/* The pool object: sizes, creation, its buffers. */
#include "pool/pool.h"

enum { MAX_BLOCK_SIZE = 256, MAX_HEAD_DIM = 256, DEFAULT_BLOCK_SIZE = 16 };

/* All that the params decide. */
typedef struct pool_shape {
    kvleaf_pool_params params; /* resolved */
    uint64_t block_bytes, layer_bytes, total_bytes;
} pool_shape;

static kvleaf_status resolve_layout(const kvleaf_device *device, kvleaf_pool_params *p)
{
    switch (p->layout) {
    case KVLEAF_LAYOUT_AUTO:
        p->layout = kvl_layout_best(device, p->dtype, p->block_size, p->head_dim_k, p->num_heads / p->num_kv_heads);
        return KVLEAF_OK;
    case KVLEAF_LAYOUT_ROWS:
    case KVLEAF_LAYOUT_CPU16:
    case KVLEAF_LAYOUT_DIM8:
    case KVLEAF_LAYOUT_SWIZZLE8:
        break;
    default:
        return kvl_fail(KVLEAF_INVALID, "layout", p->layout, KVLEAF_LAYOUT_SWIZZLE8,
                        "layout is %d (%s), a pool takes auto, rows, cpu16, dim8 or swizzle8", (int)p->layout,
                        kvleaf_layout_name(p->layout));
    }
    const char *reason = kvl_layout_refuses(p->layout, p->block_size);
    if (reason)
        return kvl_fail(KVLEAF_INVALID, "block_size", p->block_size, p->layout == KVLEAF_LAYOUT_CPU16 ? 16 : 8,
                        "block_size is %d: %s", (int)p->block_size, reason);
    return KVLEAF_OK;
}

/* Defaults filled in and every field checked. */
static kvleaf_status resolve(const kvleaf_device *device, const kvleaf_pool_params *params, kvleaf_pool_params *p)
{
    kvleaf_status status = kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "params");
    if (status)
        return status;
    *p = *params;
    p->memory = NULL;
    if (p->num_layers == 0)
        p->num_layers = 1;
    if (p->block_size == 0)
        p->block_size = DEFAULT_BLOCK_SIZE;
    if (p->head_dim_v == 0)
        p->head_dim_v = p->head_dim_k;
    if (p->num_layers < 1)
        return kvl_fail_range("num_layers", p->num_layers, 1, INT32_MAX);
    if (p->num_blocks < 1)
        return kvl_fail_range("num_blocks", p->num_blocks, 1, INT32_MAX);
    if (p->block_size < 1 || p->block_size > MAX_BLOCK_SIZE)
        return kvl_fail_range("block_size", p->block_size, 1, MAX_BLOCK_SIZE);
    if (p->num_kv_heads < 1)
        return kvl_fail_range("num_kv_heads", p->num_kv_heads, 1, INT32_MAX);
    if (p->num_heads < 0 || p->num_heads % p->num_kv_heads)
        return kvl_fail(KVLEAF_INVALID, "num_heads", p->num_heads, p->num_kv_heads,
                        "num_heads is %d, must be a multiple of num_kv_heads, %d", (int)p->num_heads,
                        (int)p->num_kv_heads);
    if (p->head_dim_k < 1 || p->head_dim_k > MAX_HEAD_DIM)
        return kvl_fail_range("head_dim_k", p->head_dim_k, 1, MAX_HEAD_DIM);
    if (p->head_dim_v < 1 || p->head_dim_v > MAX_HEAD_DIM)
        return kvl_fail_range("head_dim_v", p->head_dim_v, 1, MAX_HEAD_DIM);
    if (p->head_dim_v != p->head_dim_k)
        return kvl_fail(KVLEAF_UNSUPPORTED, "head_dim_v", p->head_dim_v, p->head_dim_k,
                        "head_dim_v is %d, head_dim_k %d: only equal ones are served", (int)p->head_dim_v,
                        (int)p->head_dim_k);
    if (!kvleaf_dtype_size(p->dtype))
        return kvl_fail(KVLEAF_INVALID, "dtype", p->dtype, KVLEAF_F32, "dtype is %d, must be f16, bf16 or f32",
                        (int)p->dtype);
    return resolve_layout(device, p);
}

static kvleaf_status measure(const kvleaf_device *device, const kvleaf_pool_params *params, pool_shape *shape)
{
    kvleaf_status status = resolve(device, params, &shape->params);
    if (status)
        return status;
    const kvleaf_pool_params *p = &shape->params;
    uint64_t tile = kvleaf_layout_tile(p->layout, p->block_size, p->head_dim_k) * kvleaf_dtype_size(p->dtype);
    bool fits = kvl_mul(tile, 2 * (uint64_t)p->num_kv_heads, &shape->block_bytes) &&
                kvl_mul(shape->block_bytes, (uint64_t)p->num_blocks, &shape->layer_bytes) &&
                kvl_mul(shape->layer_bytes, (uint64_t)p->num_layers, &shape->total_bytes);
    if (!fits)
        return kvl_fail(KVLEAF_UNSUPPORTED, "layer_bytes", p->num_blocks, 0,
                        "%d layers of %d blocks take more bytes than 64 bits count", (int)p->num_layers,
                        (int)p->num_blocks);
    if (device && shape->layer_bytes > device->caps.max_alloc_bytes)
        return kvl_fail(KVLEAF_UNSUPPORTED, "layer_bytes", (int64_t)shape->layer_bytes,
                        (int64_t)device->caps.max_alloc_bytes,
                        "one layer takes %llu bytes, the device's largest buffer is %llu",
                        (unsigned long long)shape->layer_bytes, (unsigned long long)device->caps.max_alloc_bytes);
    return KVLEAF_OK;
}

kvleaf_status kvleaf_pool_size(const kvleaf_device *device, const kvleaf_pool_params *params, kvleaf_pool_bytes *out)
{
    kvleaf_status status = kvl_check_struct(out, out ? out->struct_size : 0, sizeof *out, "out");
    pool_shape shape;
    if (!status)
        status = measure(device, params, &shape);
    if (status)
        return status;
    out->total_bytes = shape.total_bytes;
    out->layer_bytes = shape.layer_bytes;
    out->block_bytes = shape.block_bytes;
    out->token_bytes = shape.block_bytes / (uint64_t)shape.params.block_size * (uint64_t)shape.params.num_layers;
    out->layout = shape.params.layout;
    return KVLEAF_OK;
}

/* The application's buffer of a layer, retained, if it is one of the device's context and large enough. */
static kvleaf_status adopt(kvleaf_pool *pool, cl_mem memory, int32_t layer)
{
    const kvleaf_opencl *cl = pool->device->cl;
    if (!memory)
        return kvl_fail(KVLEAF_INVALID, "memory", layer, pool->params.num_layers, "memory[%d] is null", (int)layer);
    cl_context context = NULL;
    size_t size = 0;
    cl_mem_object_type type = 0;
    cl_int error = cl->GetMemObjectInfo(memory, CL_MEM_CONTEXT, sizeof context, &context, NULL);
    if (error == CL_SUCCESS)
        error = cl->GetMemObjectInfo(memory, CL_MEM_TYPE, sizeof type, &type, NULL);
    if (error == CL_SUCCESS)
        error = cl->GetMemObjectInfo(memory, CL_MEM_SIZE, sizeof size, &size, NULL);
    if (error == CL_INVALID_MEM_OBJECT || (error == CL_SUCCESS && type != CL_MEM_OBJECT_BUFFER))
        return kvl_fail(KVLEAF_INVALID, "memory", layer, 0, "memory[%d] is no buffer", (int)layer);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetMemObjectInfo", error);
    if (context != pool->device->context)
        return kvl_fail(KVLEAF_FOREIGN, "memory", layer, 0,
                        "memory[%d] belongs to another context than the device object", (int)layer);
    if (size < pool->layer_bytes)
        return kvl_fail(KVLEAF_TOO_SMALL, "memory", (int64_t)size, (int64_t)pool->layer_bytes,
                        "memory[%d] has %zu bytes, %llu are needed", (int)layer, size,
                        (unsigned long long)pool->layer_bytes);
    error = cl->RetainMemObject(memory);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clRetainMemObject", error);
    pool->memory[layer] = memory;
    return KVLEAF_OK;
}

/* Fills a pool that holds its device; what it has got when something fails is released with it. */
static kvleaf_status fill(kvleaf_pool *pool, const cl_mem *memory)
{
    const kvleaf_allocator *allocator = &pool->device->allocator;
    size_t layers = (size_t)pool->params.num_layers;
    pool->memory = kvl_alloc(allocator, layers, sizeof *pool->memory);
    if (!pool->memory)
        return kvl_fail_memory(layers * sizeof *pool->memory);
    pool->marks = kvl_alloc(allocator, (size_t)pool->params.num_blocks, sizeof *pool->marks);
    if (!pool->marks)
        return kvl_fail_memory((size_t)pool->params.num_blocks);
    for (int32_t layer = 0; layer < pool->params.num_layers; layer++) {
        kvleaf_status status =
            memory ? adopt(pool, memory[layer], layer)
                   : kvl_device_buffer(pool->device, "layer_bytes", pool->layer_bytes, &pool->memory[layer]);
        if (status)
            return status;
    }
    return kvl_pool_copier_create(pool, &pool->copier);
}

kvleaf_status kvleaf_pool_create(kvleaf_device *device, const kvleaf_pool_params *params, kvleaf_pool **out)
{
    if (!device)
        return kvl_fail_null("device");
    if (!out)
        return kvl_fail_null("out");
    pool_shape shape;
    kvleaf_status status = measure(device, params, &shape);
    if (status)
        return status;
    kvleaf_pool *pool = kvl_alloc(&device->allocator, 1, sizeof *pool);
    if (!pool)
        return kvl_fail_memory(sizeof *pool);
    kvl_device_retain(device);
    pool->device = device;
    pool->references = 1;
    pool->params = shape.params;
    pool->layer_bytes = shape.layer_bytes;
    pool->block_bytes = shape.block_bytes;
    status = fill(pool, params->memory);
    if (status) {
        kvl_pool_release(pool);
        return status;
    }
    *out = pool;
    return KVLEAF_OK;
}

void kvl_pool_retain(kvleaf_pool *pool)
{
    kvl_mutex_lock(pool->device->mutex);
    pool->references++;
    kvl_mutex_unlock(pool->device->mutex);
}

void kvl_pool_release(kvleaf_pool *pool)
{
    kvleaf_device *device = pool->device;
    kvl_mutex_lock(device->mutex);
    int64_t references = --pool->references;
    kvl_mutex_unlock(device->mutex);
    if (references > 0)
        return;
    kvl_pool_copier_destroy(&pool->copier);
    for (int32_t layer = 0; pool->memory && layer < pool->params.num_layers; layer++)
        if (pool->memory[layer])
            device->cl->ReleaseMemObject(pool->memory[layer]);
    kvl_free(&device->allocator, pool->memory);
    kvl_free(&device->allocator, pool->marks);
    kvl_free(&device->allocator, pool);
    kvl_device_release(device);
}

void kvleaf_pool_destroy(kvleaf_pool **pool)
{
    if (!pool || !*pool)
        return;
    kvl_pool_release(*pool);
    *pool = NULL;
}

kvleaf_device *kvl_pool_device(const kvleaf_pool *pool)
{
    return pool->device;
}

kvleaf_status kvleaf_pool_query(const kvleaf_pool *pool, kvleaf_pool_params *params)
{
    if (!pool)
        return kvl_fail_null("pool");
    kvleaf_status status = kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "params");
    if (status)
        return status;
    *params = pool->params;
    return KVLEAF_OK;
}

kvleaf_status kvleaf_pool_memory(const kvleaf_pool *pool, int32_t layer, cl_mem *memory)
{
    if (!pool)
        return kvl_fail_null("pool");
    if (layer < 0 || layer >= pool->params.num_layers)
        return kvl_fail_range("layer", layer, 0, pool->params.num_layers - 1);
    if (!memory)
        return kvl_fail_null("memory");
    *memory = pool->memory[layer];
    return KVLEAF_OK;
}
