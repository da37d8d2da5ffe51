/* SPDX-License-Identifier: Apache-2.0 */
/* The caller-level API: checks of params and batches, over the engine. */
#include "attention/attention.h"

#include "pool/pool.h"

#include <limits.h>
#include <math.h>

#define DEFAULT_SEQS    64
#define DEFAULT_TOKENS  4096
#define DEFAULT_CONTEXT 8192
#define DEFAULT_STEPS   2
#define MOST_SPLIT      512 /* keys of a decode split at most */
#define MAX_HEAD_DIM    256
#define MAX_BLOCK_SIZE  256
#define MAX_HEADS       65536
#define MAX_SEQS        (1 << 20)

static int32_t or_default(int32_t value, int32_t fallback)
{
    return value ? value : fallback;
}

static kvleaf_status check_range(const char *field, int64_t value, int64_t low, int64_t high)
{
    return value < low || value > high ? kvl_fail_range(field, value, low, high) : KVLEAF_OK;
}

static kvleaf_status unsupported(const char *field, const char *limit)
{
    return kvl_fail(KVLEAF_UNSUPPORTED, field, 1, 0, "%s is not served yet, must be %s", field, limit);
}

static kvleaf_status check_features(const kvleaf_attention_params *params)
{
    if (params->head_dim_v && params->head_dim_v != params->head_dim_k)
        return kvl_fail(KVLEAF_UNSUPPORTED, "head_dim_v", params->head_dim_v, params->head_dim_k,
                        "head_dim_v is %d, only head_dim_k (%d) is served", params->head_dim_v, params->head_dim_k);
    if (params->sinks)
        return unsupported("sinks", "NULL");
    return kvl_check_scores(params->softmax_scale, params->softcap, -1);
}

static kvleaf_status check_geometry(const kvleaf_attention_params *params)
{
    const struct {
        const char *field;
        int64_t value, low, high;
    } checks[] = {
        {"num_kv_heads", params->num_kv_heads, 1, MAX_HEADS},
        {"num_heads", params->num_heads, 1, MAX_HEADS},
        {"head_dim_k", params->head_dim_k, 1, MAX_HEAD_DIM},
        {"block_size", params->block_size, 0, MAX_BLOCK_SIZE},
        {"q_dtype", params->q_dtype, KVLEAF_F16, KVLEAF_F32},
        {"kv_dtype", params->kv_dtype, KVLEAF_F16, KVLEAF_F32},
        {"out_dtype", params->out_dtype, KVLEAF_F16, KVLEAF_F32},
        {"layout", params->layout, KVLEAF_LAYOUT_AUTO, KVLEAF_LAYOUT_SWIZZLE8},
        {"max_seqs", params->max_seqs, 0, MAX_SEQS},
        {"max_tokens", params->max_tokens, 0, INT_MAX / 8},
        {"max_context", params->max_context, 0, INT_MAX / 2},
        {"window", params->window, 0, INT_MAX / 2},
        {"max_decode_keys", params->max_decode_keys, 0, INT64_MAX / 2},
        {"steps_in_flight", params->steps_in_flight, 0, 1024},
        {"device_tables", params->device_tables, 0, 1},
        {"sharing", params->sharing, KVLEAF_SHARING_AUTO, KVLEAF_SHARING_ALWAYS},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        kvleaf_status status = check_range(checks[i].field, checks[i].value, checks[i].low, checks[i].high);
        if (status)
            return status;
    }
    if (params->num_heads % params->num_kv_heads)
        return kvl_fail(KVLEAF_INVALID, "num_heads", params->num_heads, params->num_kv_heads,
                        "num_heads is %d, no multiple of num_kv_heads %d", params->num_heads, params->num_kv_heads);
    return KVLEAF_OK;
}

static kvleaf_status check_layout(const kvl_geometry *geometry)
{
    if (geometry->layout == KVLEAF_LAYOUT_STRIDED)
        return KVLEAF_OK;
    if (!geometry->block_size)
        return kvl_fail(KVLEAF_INVALID, "layout", geometry->layout, KVLEAF_LAYOUT_STRIDED,
                        "layout is %s, contiguous K/V (block_size 0) must be strided",
                        kvleaf_layout_name(geometry->layout));
    const char *why = kvl_layout_refuses(geometry->layout, geometry->block_size);
    return why ? kvl_fail(KVLEAF_INVALID, "block_size", geometry->block_size, 0, "block_size is %d, layout %s: %s",
                          geometry->block_size, kvleaf_layout_name(geometry->layout), why)
               : KVLEAF_OK;
}

static unsigned operations_of(int32_t block_size)
{
    unsigned paged = 1u << KVL_APPEND | 1u << KVL_GATHER;
    return 1u << KVL_DECODE | 1u << KVL_PREFILL | 1u << KVL_MERGE | (block_size ? paged : 0);
}

/* Params with every default filled in. */
static kvleaf_status resolve(const kvleaf_attention_params *params, kvl_engine_params *out)
{
    kvleaf_status status =
        params ? kvl_check_struct(params, params->struct_size, sizeof *params, "params") : kvl_fail_null("params");
    if (!status)
        status = check_geometry(params);
    if (!status)
        status = check_features(params);
    if (status)
        return status;
    kvl_geometry geometry = {
        .q_dtype = params->q_dtype,
        .kv_dtype = params->kv_dtype,
        .out_dtype = params->out_dtype,
        .layout = params->layout == KVLEAF_LAYOUT_AUTO ? KVLEAF_LAYOUT_STRIDED : params->layout,
        .num_heads = params->num_heads,
        .num_kv_heads = params->num_kv_heads,
        .head_dim = params->head_dim_k,
        .block_size = params->block_size,
        .window = params->window,
        .softcap = params->softcap,
        .device_tables = params->device_tables != 0,
    };
    *out = (kvl_engine_params){
        .geometry = geometry,
        .operations = operations_of(params->block_size),
        .max_seqs = or_default(params->max_seqs, DEFAULT_SEQS),
        .max_tokens = or_default(params->max_tokens, DEFAULT_TOKENS),
        .max_context = or_default(params->max_context, DEFAULT_CONTEXT),
        .max_decode_keys = params->max_decode_keys,
        .steps_in_flight = or_default(params->steps_in_flight, DEFAULT_STEPS),
        .sharing = params->sharing,
    };
    int64_t seen = geometry.window ? 2 * (int64_t)geometry.window + MOST_SPLIT : out->max_context;
    if (!out->max_decode_keys)
        out->max_decode_keys = out->max_seqs * (seen < out->max_context ? seen : out->max_context);
    if (geometry.block_size && !geometry.device_tables)
        out->max_table = (int64_t)out->max_seqs * kvl_ceil_div(out->max_context, geometry.block_size);
    return check_layout(&geometry);
}

kvleaf_status kvleaf_attention_size(const kvleaf_device *device, const kvleaf_attention_params *params,
                                    uint64_t *device_bytes, uint64_t *host_bytes)
{
    kvl_engine_params resolved;
    if (!device || !device_bytes || !host_bytes)
        return kvl_fail_null(!device ? "device" : !device_bytes ? "device_bytes" : "host_bytes");
    kvleaf_status status = resolve(params, &resolved);
    if (!status)
        status = kvl_engine_size(device, &resolved, device_bytes, host_bytes);
    if (!status)
        *host_bytes += (uint64_t)resolved.max_seqs * sizeof(kvl_step_seq) + sizeof(struct kvleaf_attention);
    return status;
}

kvleaf_status kvleaf_attention_create(kvleaf_device *device, const kvleaf_attention_params *params,
                                      kvleaf_attention **out)
{
    if (!device || !out)
        return kvl_fail_null(!device ? "device" : "out");
    kvl_engine_params resolved;
    kvleaf_status status = resolve(params, &resolved);
    if (status)
        return status;
    kvleaf_attention *attention = kvl_alloc(&device->allocator, 1, sizeof *attention);
    if (!attention)
        return kvl_fail_memory(sizeof *attention);
    attention->device = device;
    attention->params = resolved;
    attention->softmax_scale =
        params->softmax_scale > 0 ? params->softmax_scale : 1.0f / sqrtf((float)params->head_dim_k);
    attention->seqs = kvl_alloc(&device->allocator, (size_t)resolved.max_seqs, sizeof *attention->seqs);
    status = attention->seqs ? kvl_engine_create(device, &resolved, &attention->engine)
                             : kvl_fail_memory((size_t)resolved.max_seqs * sizeof *attention->seqs);
    if (status) {
        kvl_free(&device->allocator, attention->seqs);
        kvl_free(&device->allocator, attention);
        return status;
    }
    kvl_device_retain(device);
    *out = attention;
    return KVLEAF_OK;
}

void kvleaf_attention_destroy(kvleaf_attention **at)
{
    kvleaf_attention *attention = at ? *at : NULL;
    if (!attention)
        return;
    *at = NULL;
    kvleaf_device *device = attention->device;
    kvl_engine_destroy(&attention->engine);
    kvl_free(&device->allocator, attention->seqs);
    kvl_free(&device->allocator, attention);
    kvl_device_release(device);
}

const char *kvleaf_attention_variant(const kvleaf_attention *attention, const char *operation)
{
    return attention && operation ? kvl_engine_variant(attention->engine, operation) : "";
}

kvleaf_status kvl_attention_begin(kvleaf_attention *attention, const kvleaf_exec *exec, kvl_chain *chain)
{
    if (!attention)
        return kvl_fail_null("attention");
    kvleaf_status status = kvl_check_exec(attention->device, exec);
    return status ? status : kvl_chain_begin(chain, attention->device, exec);
}

/* Starts a call that reads or writes a view, which it checks. `paged`: what it needs blocks for, or NULL. */
static kvleaf_status begin_with_view(kvleaf_attention *attention, const kvleaf_kv_view *view, const kvleaf_exec *exec,
                                     const char *paged, kvl_chain *chain, kvl_view *bound)
{
    kvleaf_status status = kvl_attention_begin(attention, exec, chain);
    if (status)
        return status;
    if (paged && !attention->params.geometry.block_size)
        return kvl_fail(KVLEAF_INVALID, "block_size", 0, 1, "contiguous K/V (block_size 0) %s", paged);
    return kvl_engine_view(attention->engine, view, bound);
}

kvleaf_status kvleaf_attention_append(kvleaf_attention *attention, const kvleaf_tensor *k, const kvleaf_tensor *v,
                                      const kvleaf_kv_view *view, const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvl_view bound;
    kvleaf_status status = begin_with_view(attention, view, exec, "have no slots to append to", &chain, &bound);
    const kvl_fresh fresh = {k, v};
    return status ? status : kvl_chain_end(&chain, kvl_engine_append(attention->engine, &fresh, &bound, &chain));
}

kvleaf_status kvleaf_attention_attend(kvleaf_attention *attention, const kvleaf_tensor *q, const kvleaf_kv_view *view,
                                      const kvleaf_tensor *out, const kvleaf_tensor *lse, const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvl_view bound;
    kvleaf_status status = begin_with_view(attention, view, exec, NULL, &chain, &bound);
    return status ? status
                  : kvl_chain_end(&chain, kvl_engine_attend(attention->engine, q, &bound, out, lse,
                                                            attention->softmax_scale, &chain));
}

kvleaf_status kvleaf_attention_append_attend(kvleaf_attention *attention, const kvleaf_tensor *k,
                                             const kvleaf_tensor *v, const kvleaf_tensor *q, const kvleaf_kv_view *view,
                                             const kvleaf_tensor *out, const kvleaf_tensor *lse,
                                             const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvl_view bound;
    kvleaf_status status = begin_with_view(attention, view, exec, "have no slots to append to", &chain, &bound);
    const kvl_fresh fresh = {k, v};
    return status ? status
                  : kvl_chain_end(&chain, kvl_engine_append_attend(attention->engine, &fresh, q, &bound, out, lse,
                                                                   attention->softmax_scale, &chain));
}

kvleaf_status kvleaf_attention_gather(kvleaf_attention *attention, const kvleaf_kv_view *view, const kvleaf_tensor *k,
                                      const kvleaf_tensor *v, const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvl_view bound;
    kvleaf_status status = begin_with_view(attention, view, exec, "need no gathering", &chain, &bound);
    return status ? status : kvl_chain_end(&chain, kvl_engine_gather(attention->engine, &bound, k, v, &chain));
}

kvleaf_status kvleaf_attention_merge(kvleaf_attention *attention, int32_t n, int32_t rows, const kvleaf_tensor *outs,
                                     int64_t out_part_stride, const kvleaf_tensor *lses, int64_t lse_part_stride,
                                     const kvleaf_tensor *out, const kvleaf_tensor *lse, const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvleaf_status status = kvl_attention_begin(attention, exec, &chain);
    if (status)
        return status;
    const kvl_merge merge = {.n = n,
                             .rows = rows,
                             .outs = outs,
                             .lses = lses,
                             .out_part_stride = out_part_stride,
                             .lse_part_stride = lse_part_stride,
                             .out = out,
                             .lse = lse};
    return kvl_chain_end(&chain, kvl_engine_merge(attention->engine, &merge, &chain));
}

kvleaf_status kvleaf_pool_view(const kvleaf_pool *pool, int32_t layer, kvleaf_kv_view *out)
{
    cl_mem memory = NULL;
    kvleaf_status status = kvl_check_struct(out, out ? out->struct_size : 0, sizeof *out, "out");
    if (!status)
        status = kvleaf_pool_memory(pool, layer, &memory);
    if (status)
        return status;
    const kvleaf_pool_params *params = &pool->params;
    *out = (kvleaf_kv_view){
        .struct_size = sizeof *out,
        .k = {.handle = memory, .dtype = params->dtype},
        .v = {.handle = memory, .offset = pool->block_bytes / 2, .dtype = params->dtype},
        .block_stride = (int64_t)(pool->block_bytes / kvleaf_dtype_size(params->dtype)),
        .layout = params->layout,
        .num_blocks = params->num_blocks,
    };
    return KVLEAF_OK;
}
