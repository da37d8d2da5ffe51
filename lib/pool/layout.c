/* SPDX-License-Identifier: Apache-2.0 */
/* Where an element of K or V lies inside its tile: the twin of cl_kernels/common/layout.clh. */
#include "pool/pool.h"

enum {
    CPU16_TOKENS = 16, /* of a unit */
    CPU16_PART = 64,   /* dims of a part of V */
    DIM8_DIMS = 8,     /* that lie together in K */
    SWIZZLE8_TOKENS = 8,
    SWIZZLE8_DIMS = 64 /* of a row: 8 chunks of 8 */
};

static size_t round_up(size_t x, size_t unit)
{
    return (x + unit - 1) / unit * unit;
}

static size_t cpu16_offset(bool value, size_t head_dim, size_t token, size_t dim)
{
    size_t padded = round_up(head_dim, CPU16_TOKENS);
    size_t unit = token / CPU16_TOKENS * CPU16_TOKENS * padded;
    if (!value)
        return unit + dim * CPU16_TOKENS + token % CPU16_TOKENS;
    size_t part = dim / CPU16_PART * CPU16_PART;
    size_t width = padded - part < CPU16_PART ? padded - part : CPU16_PART;
    return unit + part * CPU16_TOKENS + token % CPU16_TOKENS * width + dim % CPU16_PART;
}

static size_t swizzle8_offset(size_t head_dim, size_t token, size_t dim)
{
    size_t padded = round_up(head_dim, SWIZZLE8_DIMS), row = token % SWIZZLE8_TOKENS;
    size_t chunk = dim % SWIZZLE8_DIMS / 8 ^ row;
    return token / SWIZZLE8_TOKENS * SWIZZLE8_TOKENS * padded + dim / SWIZZLE8_DIMS * SWIZZLE8_TOKENS * SWIZZLE8_DIMS +
           row * SWIZZLE8_DIMS + chunk * 8 + dim % 8;
}

size_t kvleaf_layout_offset(kvleaf_layout layout, bool value, int32_t block_size, int32_t head_dim, int32_t token,
                            int32_t dim)
{
    size_t t = (size_t)token, d = (size_t)dim;
    switch (layout) {
    case KVLEAF_LAYOUT_CPU16:
        return cpu16_offset(value, (size_t)head_dim, t, d);
    case KVLEAF_LAYOUT_DIM8:
        if (value)
            return t * round_up((size_t)head_dim, DIM8_DIMS) + d;
        return (d / DIM8_DIMS * (size_t)block_size + t) * DIM8_DIMS + d % DIM8_DIMS;
    case KVLEAF_LAYOUT_SWIZZLE8:
        return swizzle8_offset((size_t)head_dim, t, d);
    default:
        return t * (size_t)head_dim + d;
    }
}

size_t kvleaf_layout_tile(kvleaf_layout layout, int32_t block_size, int32_t head_dim)
{
    size_t padding = layout == KVLEAF_LAYOUT_CPU16      ? CPU16_TOKENS
                     : layout == KVLEAF_LAYOUT_DIM8     ? DIM8_DIMS
                     : layout == KVLEAF_LAYOUT_SWIZZLE8 ? SWIZZLE8_DIMS
                                                        : 1;
    return (size_t)block_size * round_up((size_t)head_dim, padding);
}

const char *kvleaf_layout_name(kvleaf_layout layout)
{
    switch (layout) {
    case KVLEAF_LAYOUT_AUTO:
        return "auto";
    case KVLEAF_LAYOUT_STRIDED:
        return "strided";
    case KVLEAF_LAYOUT_ROWS:
        return "rows";
    case KVLEAF_LAYOUT_CPU16:
        return "cpu16";
    case KVLEAF_LAYOUT_DIM8:
        return "dim8";
    case KVLEAF_LAYOUT_SWIZZLE8:
        return "swizzle8";
    }
    return "?";
}

const char *kvl_layout_refuses(kvleaf_layout layout, int32_t block_size)
{
    if (layout == KVLEAF_LAYOUT_CPU16 && block_size % CPU16_TOKENS)
        return "layout cpu16 takes block sizes that are multiples of 16";
    if (layout == KVLEAF_LAYOUT_DIM8 && block_size % DIM8_DIMS)
        return "layout dim8 takes block sizes that are multiples of 8";
    if (layout == KVLEAF_LAYOUT_SWIZZLE8 && block_size % SWIZZLE8_TOKENS)
        return "layout swizzle8 takes block sizes that are multiples of 8";
    return NULL;
}

kvleaf_layout kvl_layout_best(const kvleaf_device *device, kvleaf_dtype dtype, int32_t block_size, int32_t head_dim,
                              int32_t group)
{
    cl_device_type type = device ? device->caps.type : 0;
    bool tensor_cores = device && device->caps.nvidia_capability >= 80 && group <= kvl_tensor_core_group(head_dim);
    if (tensor_cores && dtype != KVLEAF_F32 && head_dim >= SWIZZLE8_DIMS / 2 &&
        !kvl_layout_refuses(KVLEAF_LAYOUT_SWIZZLE8, block_size))
        return KVLEAF_LAYOUT_SWIZZLE8;
    if ((type & CL_DEVICE_TYPE_CPU) && !kvl_layout_refuses(KVLEAF_LAYOUT_CPU16, block_size))
        return KVLEAF_LAYOUT_CPU16;
    if ((type & CL_DEVICE_TYPE_GPU) && !kvl_layout_refuses(KVLEAF_LAYOUT_DIM8, block_size))
        return KVLEAF_LAYOUT_DIM8;
    return KVLEAF_LAYOUT_ROWS;
}
