/* SPDX-License-Identifier: Apache-2.0 */
#include "attention/variants.h"

#include <stddef.h>

#define FIX_ALL (KVL_FIX_HEAD_DIM | KVL_FIX_GROUP | KVL_FIX_BLOCK_SIZE)

static const char *never_refuses(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    (void)geometry;
    return NULL;
}

static const char *needs_paged(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    return geometry->block_size ? NULL : "contiguous K/V have no slots or blocks";
}

static const char *needs_cpu(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    if (!(caps->type & CL_DEVICE_TYPE_CPU))
        return "for CPUs: one work-item a work-group with explicit vectors";
    return geometry->device_tables ? "serves block tables that the host has checked" : NULL;
}

/* Rows or 16-token units: what the vector loads of decode and prefill are written for. */
static const char *needs_cpu_layout(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    if (geometry->layout == KVLEAF_LAYOUT_DIM8)
        return "reads rows or the cpu16 layout, dim8 is for GPUs";
    return needs_cpu(caps, geometry);
}

static const char *needs_paged_cpu(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_paged(caps, geometry);
    return why ? why : needs_cpu(caps, geometry);
}

/* Constants let the compiler unroll; packed layouts are pools, whose geometry is few programs. */
static const char *needs_packed(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    return geometry->layout == KVLEAF_LAYOUT_STRIDED ? "constants are for pools, a strided view takes the generic program"
                                                     : NULL;
}

static const char *needs_dim8(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    if (geometry->layout != KVLEAF_LAYOUT_DIM8)
        return "16-byte loads need the dim8 layout";
    return geometry->kv_dtype == KVLEAF_F32 ? "16-byte loads are of 16-bit elements" : NULL;
}

static const kvl_variant append_table[] = {
    {.family = "append", .name = "portable", .file = "portable/append.cl", .kernels = {"kvl_append"},
     .refuses = needs_paged, .work_group = 64},
    {.family = "append", .name = "cpu", .file = "cpu/append.cl", .kernels = {"kvl_append"},
     .refuses = needs_paged_cpu, .work_group = 1, .item_tokens = 16},
};

static const kvl_variant decode_table[] = {
    {.family = "decode", .name = "portable", .file = "portable/decode.cl", .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = never_refuses, .work_group = 128, .split_tokens = 256},
    {.family = "decode", .name = "portable_fixed", .file = "portable/decode.cl", .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_packed, .fixed = FIX_ALL, .work_group = 128, .split_tokens = 256},
    {.family = "decode", .name = "portable_vector", .file = "portable/decode.cl", .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_dim8, .fixed = FIX_ALL, .options = "-DVECTOR_LOADS=1", .work_group = 128, .split_tokens = 256},
    {.family = "decode", .name = "cpu", .file = "cpu/decode.cl", .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_cpu_layout, .fixed = FIX_ALL, .work_group = 1, .persistent = true, .split_tokens = 512},
};

static const kvl_variant prefill_table[] = {
    {.family = "prefill", .name = "portable", .file = "portable/prefill.cl", .kernels = {"kvl_prefill"},
     .refuses = never_refuses, .work_group = 64, .tile_rows = 16},
    {.family = "prefill", .name = "portable_fixed", .file = "portable/prefill.cl", .kernels = {"kvl_prefill"},
     .refuses = needs_packed, .fixed = FIX_ALL, .work_group = 64, .tile_rows = 16},
    {.family = "prefill", .name = "cpu", .file = "cpu/prefill.cl", .kernels = {"kvl_prefill"},
     .refuses = needs_cpu_layout, .fixed = FIX_ALL, .work_group = 1, .persistent = true, .tile_rows = 192},
};

static const kvl_variant gather_table[] = {
    {.family = "gather", .name = "portable", .file = "portable/gather.cl", .kernels = {"kvl_gather"},
     .refuses = needs_paged, .work_group = 64},
    {.family = "gather", .name = "cpu", .file = "cpu/gather.cl", .kernels = {"kvl_gather"},
     .refuses = needs_paged_cpu, .work_group = 1, .item_tokens = 16},
};

static const kvl_variant merge_table[] = {
    {.family = "merge", .name = "portable", .file = "portable/merge.cl", .kernels = {"kvl_merge"},
     .refuses = never_refuses, .work_group = 64},
    {.family = "merge", .name = "cpu", .file = "cpu/merge.cl", .kernels = {"kvl_merge"},
     .refuses = needs_cpu, .work_group = 1},
};

#define TABLE(rows) {rows, sizeof rows / sizeof *rows}

static const struct {
    const kvl_variant *rows;
    int count;
} tables[KVL_OPERATIONS] = {
    [KVL_APPEND] = TABLE(append_table), [KVL_DECODE] = TABLE(decode_table), [KVL_PREFILL] = TABLE(prefill_table),
    [KVL_GATHER] = TABLE(gather_table), [KVL_MERGE] = TABLE(merge_table),
};

const char *kvl_operation_name(kvl_operation operation)
{
    return tables[operation].rows->family;
}

const kvl_variant *kvl_variants(kvl_operation operation, int *count)
{
    *count = tables[operation].count;
    return tables[operation].rows;
}
