/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the caller's tensors and views before anything is enqueued, and of what is made of scores. */
#include "attention/state.h"

#include <math.h>

#define PACKED_ALIGNMENT 16 /* bytes: vector loads of the packed layouts */

static int64_t or_packed(int64_t stride, int64_t packed)
{
    return stride ? stride : packed;
}

static kvleaf_status buffer_size(const kvl_engine *engine, const char *name, cl_mem memory, const kvl_bound *beside,
                                 uint64_t *bytes)
{
    if (beside && memory == beside->memory) {
        *bytes = beside->bytes;
        return KVLEAF_OK;
    }
    const kvleaf_opencl *cl = engine->device->cl;
    cl_context context = NULL;
    size_t size = 0;
    cl_int error = cl->GetMemObjectInfo(memory, CL_MEM_CONTEXT, sizeof context, &context, NULL);
    if (!error)
        error = cl->GetMemObjectInfo(memory, CL_MEM_SIZE, sizeof size, &size, NULL);
    if (error == CL_INVALID_MEM_OBJECT)
        return kvl_fail(KVLEAF_INVALID, name, error, 0, "%s.handle is no OpenCL buffer", name);
    if (error)
        return kvl_fail_opencl("clGetMemObjectInfo", error);
    if (context != engine->device->context)
        return kvl_fail(KVLEAF_FOREIGN, name, 0, 0, "%s is a buffer of another OpenCL context", name);
    *bytes = size;
    return KVLEAF_OK;
}

kvleaf_status kvl_check_dtype(const char *name, kvleaf_dtype given, kvleaf_dtype wanted)
{
    if (given == wanted)
        return KVLEAF_OK;
    return kvl_fail(KVLEAF_INVALID, name, given, wanted, "%s.dtype is %s, must be %s", name, kvleaf_dtype_name(given),
                    kvleaf_dtype_name(wanted));
}

kvleaf_status kvl_check_scores(float softmax_scale, float softcap, int32_t layer)
{
    bool right = softmax_scale >= 0 && !isinf(softmax_scale);
    const char *field = right ? "softcap" : "softmax_scale";
    double value = (double)(right ? softcap : softmax_scale);
    if (value >= 0 && !isinf(value))
        return KVLEAF_OK;
    return layer < 0 ? kvl_fail(KVLEAF_INVALID, field, 0, 0, "%s is %g, must be finite and not negative", field, value)
                     : kvl_fail(KVLEAF_INVALID, field, layer, 0, "layer %d has %s %g, must be finite and not negative",
                                (int)layer, field, value);
}

/* Handle, dtype and offset of a tensor: binds its buffer, and as the view's first number its offset. */
static kvleaf_status check_handle(const kvl_engine *engine, const char *name, const kvleaf_tensor *tensor,
                                  const kvl_bound *beside, kvl_bound *out)
{
    if (!tensor)
        return kvl_fail_null(name);
    if (tensor->memory != KVLEAF_MEMORY_CL)
        return kvl_fail(KVLEAF_UNSUPPORTED, name, tensor->memory, 0, "%s.memory is %d, only cl_mem (0) is served", name,
                        (int)tensor->memory);
    if (!tensor->handle)
        return kvl_fail(KVLEAF_INVALID, name, 0, 0, "%s.handle is null", name);
    size_t size = kvleaf_dtype_size(tensor->dtype);
    if (!size)
        return kvl_fail(KVLEAF_INVALID, name, tensor->dtype, KVLEAF_F32, "%s.dtype is %d, no dtype", name,
                        (int)tensor->dtype);
    if (tensor->offset % size)
        return kvl_fail(KVLEAF_INVALID, name, (int64_t)tensor->offset, (int64_t)size,
                        "%s.offset is %llu bytes, must be a multiple of the element size %zu", name,
                        (unsigned long long)tensor->offset, size);
    *out = (kvl_bound){.memory = tensor->handle, .view = {{(cl_long)(tensor->offset / size)}}};
    return buffer_size(engine, name, tensor->handle, beside, &out->bytes);
}

/* How many elements a tensor's buffer holds in all. */
static int64_t elements_of(const kvl_bound *bound, kvleaf_dtype dtype)
{
    return (int64_t)(bound->bytes / kvleaf_dtype_size(dtype));
}

/* Index behind the last element of count_a x count_b runs of `run` elements; false where it overflows. */
static bool extent(int64_t first, int64_t count_a, int64_t stride_a, int64_t count_b, int64_t stride_b, int64_t run,
                   int64_t *end)
{
    uint64_t a, b, sum;
    if (!kvl_mul((uint64_t)(count_a - 1), (uint64_t)stride_a, &a) ||
        !kvl_mul((uint64_t)(count_b - 1), (uint64_t)stride_b, &b) || !kvl_add(a, b, &sum) ||
        !kvl_add(sum, (uint64_t)first + (uint64_t)run, &sum) || sum > INT64_MAX)
        return false;
    *end = (int64_t)sum;
    return true;
}

static kvleaf_status too_small(const char *name, int64_t needed, int64_t there)
{
    return kvl_fail(KVLEAF_TOO_SMALL, name, there, needed, "%s holds %lld elements, the call reaches %lld", name,
                    (long long)there, (long long)needed);
}

static kvleaf_status negative_stride(const char *name, int64_t stride)
{
    return kvl_fail(KVLEAF_INVALID, name, stride, 0, "%s has a negative stride, %lld", name, (long long)stride);
}

/* Two runs of an output may share no element, or results would depend on which is written last. */
static bool disjoint(const kvl_expect *expect, int64_t token_stride, int64_t head_stride)
{
    bool heads_inside = head_stride >= expect->dim || expect->heads == 1;
    bool tokens_inside = token_stride >= expect->dim || expect->tokens == 1;
    bool token_major = expect->tokens == 1 || token_stride >= (expect->heads - 1) * head_stride + expect->dim;
    bool head_major = expect->heads == 1 || head_stride >= (expect->tokens - 1) * token_stride + expect->dim;
    return (heads_inside && token_major) || (tokens_inside && head_major);
}

kvleaf_status kvl_bind_tensor(const kvl_engine *engine, const kvleaf_tensor *tensor, const kvl_expect *expect,
                              kvl_bound *out)
{
    kvleaf_status status = check_handle(engine, expect->name, tensor, expect->beside, out);
    if (status)
        return status;
    int64_t first = out->view.s[0], elements = elements_of(out, tensor->dtype);
    int64_t head_stride = or_packed(tensor->head_stride, expect->dim);
    int64_t token_stride = or_packed(tensor->token_stride, expect->heads * expect->dim);
    if (head_stride < 0 || token_stride < 0)
        return negative_stride(expect->name, head_stride < 0 ? head_stride : token_stride);
    int64_t end = 0;
    if (expect->tokens > 0) {
        if (!extent(first, expect->tokens, token_stride, expect->heads, head_stride, expect->dim, &end))
            return kvl_fail(KVLEAF_INVALID, expect->name, token_stride, 0, "%s's strides overflow", expect->name);
        if (end > elements)
            return too_small(expect->name, end, elements);
        if (expect->output && !disjoint(expect, token_stride, head_stride))
            return kvl_fail(KVLEAF_INVALID, expect->name, token_stride, expect->dim,
                            "%s's strides %lld and %lld make its rows overlap", expect->name, (long long)token_stride,
                            (long long)head_stride);
    }
    out->view = (cl_long4){{first, token_stride, head_stride, 0}};
    return KVLEAF_OK;
}

static kvleaf_status check_aligned(const char *name, const cl_long4 *view, size_t size)
{
    int64_t unit = PACKED_ALIGNMENT / (int64_t)size;
    for (int i = 0; i < 4; i++) {
        if (view->s[i] % unit)
            return kvl_fail(
                KVLEAF_INVALID, name, view->s[i], unit,
                "%s of a packed layout has an offset or stride of %lld elements, must be a multiple of %d bytes", name,
                (long long)view->s[i], PACKED_ALIGNMENT);
    }
    return KVLEAF_OK;
}

/* K or V of a view; V beside K. Contiguous: `blocks` is the number of tokens and a tile is one token's row. */
static kvleaf_status bind_side(const kvl_engine *engine, const kvleaf_kv_view *view, const kvl_bound *keys,
                               kvl_bound *out)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    const kvleaf_tensor *tensor = keys ? &view->v : &view->k;
    const char *name = keys ? "view.v" : "view.k";
    int64_t heads = geometry->num_kv_heads, dim = geometry->head_dim;
    kvleaf_status status = check_handle(engine, name, tensor, keys, out);
    if (!status)
        status = kvl_check_dtype(name, tensor->dtype, geometry->kv_dtype);
    if (status)
        return status;
    int64_t first = out->view.s[0], elements = elements_of(out, tensor->dtype);
    bool packed = geometry->layout != KVLEAF_LAYOUT_STRIDED, paged = geometry->block_size > 0;
    int64_t tile =
        packed ? (int64_t)kvleaf_layout_tile(geometry->layout, geometry->block_size, geometry->head_dim) : dim;
    int64_t head_stride = or_packed(tensor->head_stride, tile);
    int64_t token_stride = packed ? 0 : or_packed(tensor->token_stride, heads * dim);
    int64_t blocks = paged ? view->num_blocks : engine->now.total_k;
    int64_t block_stride =
        paged ? or_packed(view->block_stride, heads * (packed ? tile : dim * geometry->block_size)) : token_stride;
    if (head_stride < 0 || token_stride < 0 || block_stride < 0)
        return negative_stride(name, head_stride < 0 ? head_stride : token_stride < 0 ? token_stride : block_stride);
    uint64_t rows = 0;
    int64_t end = 0, inside = packed || !paged ? 0 : geometry->block_size - 1;
    if (blocks > 0) {
        if (!kvl_mul((uint64_t)inside, (uint64_t)token_stride, &rows) || rows > INT64_MAX / 2 ||
            !extent(first, blocks, block_stride, heads, head_stride, (int64_t)rows + tile, &end))
            return kvl_fail(KVLEAF_INVALID, name, block_stride, 0, "%s's strides overflow", name);
        if (end > elements)
            return too_small(name, end, elements);
    }
    out->view = (cl_long4){{first, block_stride, token_stride, head_stride}};
    if (packed && geometry->layout != KVLEAF_LAYOUT_ROWS)
        return check_aligned(name, &out->view, kvleaf_dtype_size(geometry->kv_dtype));
    return KVLEAF_OK;
}

kvleaf_status kvl_engine_view(const kvl_engine *engine, const kvleaf_kv_view *view, kvl_view *out)
{
    kvleaf_status status =
        view ? kvl_check_struct(view, view->struct_size, sizeof *view, "view") : kvl_fail_null("view");
    if (status)
        return status;
    kvleaf_layout layout = view->layout == KVLEAF_LAYOUT_AUTO ? KVLEAF_LAYOUT_STRIDED : view->layout;
    if (layout != engine->params.geometry.layout)
        return kvl_fail(KVLEAF_INVALID, "view.layout", layout, engine->params.geometry.layout,
                        "view.layout is %s, the attention object was made for %s", kvleaf_layout_name(layout),
                        kvleaf_layout_name(engine->params.geometry.layout));
    if (engine->params.geometry.block_size && view->num_blocks < engine->now.num_blocks)
        return kvl_fail(KVLEAF_INVALID, "view.num_blocks", view->num_blocks, engine->now.num_blocks,
                        "view.num_blocks is %d, the planned batch has ids up to %d", view->num_blocks,
                        engine->now.num_blocks - 1);
    kvl_bound k = {.memory = NULL}, v = k;
    status = bind_side(engine, view, NULL, &k);
    if (!status)
        status = bind_side(engine, view, &k, &v);
    if (!status)
        *out = (kvl_view){.k = k.memory, .k_view = k.view, .v = v.memory, .v_view = v.view};
    return status;
}
