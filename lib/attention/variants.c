/* SPDX-License-Identifier: Apache-2.0 */
#include "attention/variants.h"

#include "attention/trial.h"

#include <stddef.h>
#include <string.h>

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
    if (strstr(caps->platform_name, "rusticl"))
        return "llvmpipe takes minutes over explicit vectors";
    return geometry->device_tables ? "serves block tables that the host has checked" : NULL;
}

/* Rows or 16-token units: what the vector loads of decode and prefill are written for. */
static const char *needs_cpu_layout(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_cpu(caps, geometry);
    if (!why && (geometry->layout == KVLEAF_LAYOUT_DIM8 || geometry->layout == KVLEAF_LAYOUT_SWIZZLE8))
        why = "reads rows or the cpu16 layout, dim8 and swizzle8 are for GPUs";
    return why;
}

static const char *needs_paged_cpu(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_cpu(caps, geometry);
    if (!why && geometry->layout == KVLEAF_LAYOUT_SWIZZLE8)
        why = "the swizzle8 layout is for GPUs";
    return why ? why : needs_paged(caps, geometry);
}

/* Constants let the compiler unroll; packed layouts are pools, whose geometry is few programs. */
static const char *needs_packed(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    return geometry->layout == KVLEAF_LAYOUT_STRIDED
               ? "constants are for pools, a strided view takes the generic program"
               : NULL;
}

static const char *needs_dim8(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    (void)caps;
    if (geometry->layout != KVLEAF_LAYOUT_DIM8)
        return "16-byte loads need the dim8 layout";
    return geometry->kv_dtype == KVLEAF_F32 ? "16-byte loads are of 16-bit elements" : NULL;
}

/* Eight dims of a token together, of 16-bit elements. */
static const char *needs_chunks(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_paged(caps, geometry);
    if (why)
        return why;
    if (geometry->layout != KVLEAF_LAYOUT_DIM8 && geometry->layout != KVLEAF_LAYOUT_SWIZZLE8)
        return "16-byte stores need the dim8 or the swizzle8 layout";
    return geometry->kv_dtype == KVLEAF_F32 ? "16-byte stores are of 16-bit elements" : NULL;
}

#define SWIZZLE_DIMS    64
#define CPU_TILE_HEADS  6
#define CPU_PIECE_HEADS 96

static int32_t group_of(const kvl_geometry *geometry)
{
    return geometry->num_heads / geometry->num_kv_heads;
}

/* What all kernels on tensor cores serve. */
static const char *needs_tensor_cores(const kvl_geometry *geometry)
{
    if (geometry->kv_dtype == KVLEAF_F32)
        return "multiplies 16-bit elements";
    if (group_of(geometry) > kvl_tensor_core_group(geometry->head_dim))
        return "serves up to 16 query heads a KV head, above head_dim 128 up to 8";
    return geometry->device_tables ? "serves block tables that the host has checked" : NULL;
}

static const char *needs_hopper(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    if (caps->nvidia_capability != 90)
        return "for NVIDIA GPUs of compute capability 9.0";
    if (geometry->layout != KVLEAF_LAYOUT_SWIZZLE8)
        return "reads the swizzle8 layout";
    if (geometry->block_size != 8 && geometry->block_size % 16)
        return "serves block size 8 and multiples of 16";
    return needs_tensor_cores(geometry);
}

/* Prefill with three times 64 rows a work-group, for whose outputs there are registers up to this head_dim, */
static const char *needs_hopper_small(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_hopper(caps, geometry);
    return !why && geometry->head_dim > 128 ? "for head_dim up to 128" : why;
}

/* and with two times. */
static const char *needs_hopper_large(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_hopper(caps, geometry);
    return !why && geometry->head_dim <= 128 ? "for head_dim above 128" : why;
}

/* By documented instructions. */
static const char *needs_ampere(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    return caps->nvidia_capability < 80 ? "for NVIDIA GPUs from compute capability 8.0" : needs_tensor_cores(geometry);
}

static const char *needs_mma(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_ampere(caps, geometry);
    if (!why && geometry->layout != KVLEAF_LAYOUT_SWIZZLE8 && geometry->layout != KVLEAF_LAYOUT_DIM8)
        why = "reads the dim8 and the swizzle8 layout";
    if (!why && (geometry->head_dim > 128 || geometry->head_dim % 8))
        why = "serves head_dim up to 128, multiples of 8";
    return why;
}

/* From what lies in 16-byte chunks of eight dims: element by element it would be slower than others. */
static const char *needs_mma_decode(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_ampere(caps, geometry);
    if (!why && (geometry->layout == KVLEAF_LAYOUT_CPU16 || geometry->layout == KVLEAF_LAYOUT_DIM8))
        why = "reads rows, strided views and the swizzle8 layout";
    if (!why && geometry->layout != KVLEAF_LAYOUT_SWIZZLE8 && geometry->head_dim % 8)
        why = "serves rows of multiples of 8 dims";
    return why;
}

/* A layout that needs more registers for addresses, and outputs that leave room for them in 128. */
static const char *needs_mma_rows(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_mma_decode(caps, geometry);
    if (!why && (geometry->layout == KVLEAF_LAYOUT_SWIZZLE8 || !geometry->block_size))
        why = "for rows and strided views of blocks";
    if (!why && (geometry->head_dim > 128 || group_of(geometry) > 8))
        why = "for head_dim up to 128 and 8 query heads a KV head";
    return why;
}

/* Prefill with two times 16 rows a warp, for which queries in two parts leave no registers. */
static const char *needs_mma_wide(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_mma(caps, geometry);
    bool parts = geometry->q_dtype != geometry->kv_dtype && geometry->q_dtype != KVLEAF_BF16;
    return !why && parts ? "multiplies queries of K's dtype or bf16" : why;
}

/* As many as the kernel keeps a tree for, which is by the values a thread holds: LEVELS in nvidia/decode_shape.clh. */
static int32_t mma_run(const kvl_geometry *geometry)
{
    const int64_t threads = 128;
    int32_t group = group_of(geometry), pairs = 1;
    while (2 * pairs < group)
        pairs *= 2;
    int64_t padded = kvl_ceil_div(geometry->head_dim, SWIZZLE_DIMS) * SWIZZLE_DIMS;
    int64_t values = 2 * kvl_ceil_div(padded * pairs, threads);
    return values <= 4 ? 16 : 4;
}

/* Up to 16 parts, PART_SPLITS in nvidia/decode_shape.clh, of four splits and more. */
static int32_t hopper_run(const kvl_geometry *geometry)
{
    (void)geometry;
    return 64;
}

/* Combining the warps of a split takes the more time the more heads there are: longer splits then. */
static const char *needs_hopper_heads(const kvleaf_caps *caps, const kvl_geometry *geometry)
{
    const char *why = needs_hopper(caps, geometry);
    if (why)
        return why;
    return group_of(geometry) > 8 ? NULL : "for more than 8 query heads a KV head";
}

/* As many keys where a split has 1024. */
static int32_t hopper_long_run(const kvl_geometry *geometry)
{
    return hopper_run(geometry) / 4;
}

/* Where the nodes of the tree take at most 8 KiB of local memory; longer runs leave the compute units uneven. */
static int32_t portable_run(const kvl_geometry *geometry)
{
    return group_of(geometry) * geometry->head_dim <= 1024 ? 4 : 1;
}

/* The program doesn't know the geometry. */
static int32_t one_split(const kvl_geometry *geometry)
{
    (void)geometry;
    return 1;
}

/* By the query heads that a piece has room for: MOST_PIECE_HEADS in cpu/decode.cl, and its tiles of a group. */
static int32_t cpu_pairs(const kvl_geometry *geometry)
{
    int32_t group = group_of(geometry);
    int32_t tiles = (int32_t)kvl_ceil_div(group, CPU_TILE_HEADS);
    return CPU_PIECE_HEADS / (tiles * (int32_t)kvl_ceil_div(group, tiles));
}

static const kvl_variant append_table[] = {
    {.family = "append",
     .name = "portable",
     .file = "portable/append.cl",
     .kernels = {"kvl_append"},
     .refuses = needs_paged,
     .work_group = 64},
    {.family = "append",
     .name = "portable_vector",
     .file = "portable/append_vector.cl",
     .kernels = {"kvl_append"},
     .refuses = needs_chunks,
     .fixed = KVL_FIX_HEAD_DIM | KVL_FIX_BLOCK_SIZE,
     .work_group = 256,
     .item_tokens = 16},
    {.family = "append",
     .name = "cpu",
     .file = "cpu/append.cl",
     .kernels = {"kvl_append"},
     .refuses = needs_paged_cpu,
     .work_group = 1,
     .item_tokens = 16},
};

static const kvl_variant decode_table[] = {
    {.family = "decode",
     .name = "portable",
     .file = "portable/decode.cl",
     .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = never_refuses,
     .windows = true,
     .work_group = 128,
     .split_tokens = 256,
     .longest_run = one_split},
    {.family = "decode",
     .name = "portable_fixed",
     .file = "portable/decode.cl",
     .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_packed,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 128,
     .split_tokens = 256,
     .longest_run = portable_run,
     .unit_groups = 4},
    {.family = "decode",
     .name = "portable_vector",
     .file = "portable/decode.cl",
     .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_dim8,
     .fixed = FIX_ALL,
     .options = "-DVECTOR_LOADS=1",
     .windows = true,
     .work_group = 128,
     .split_tokens = 256,
     .longest_run = portable_run,
     .unit_groups = 4},
    {.family = "decode",
     .name = "nvidia_mma",
     .file = "nvidia/decode_mma.cl",
     .kernels = {"kvl_decode"},
     .refuses = needs_mma_decode,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 128,
     .min_work_group = 128,
     .split_tokens = 256,
     .longest_run = mma_run,
     .unit_groups = 3},
    {.family = "decode",
     .name = "nvidia_mma_rows",
     .file = "nvidia/decode_mma.cl",
     .kernels = {"kvl_decode"},
     .refuses = needs_mma_rows,
     .fixed = FIX_ALL,
     .options = "-DLIMITED_REGISTERS=1 -cl-nv-maxrregcount=128",
     .windows = true,
     .work_group = 128,
     .min_work_group = 128,
     .split_tokens = 256,
     .longest_run = mma_run,
     .unit_groups = 4},
    {.family = "decode",
     .name = "nvidia",
     .file = "nvidia/decode.cl",
     .kernels = {"kvl_decode"},
     .refuses = needs_hopper,
     .fixed = FIX_ALL,
     .options = "-DVECTOR_LOADS=1",
     .windows = true,
     .work_group = 384,
     .min_work_group = 384,
     .split_tokens = 256,
     .undocumented = true,
     .trial = kvl_trial_launch,
     .longest_run = hopper_run},
    {.family = "decode",
     .name = "nvidia_long",
     .file = "nvidia/decode.cl",
     .kernels = {"kvl_decode"},
     .refuses = needs_hopper_heads,
     .fixed = FIX_ALL,
     .options = "-DVECTOR_LOADS=1",
     .windows = true,
     .work_group = 384,
     .min_work_group = 384,
     .split_tokens = 1024,
     .undocumented = true,
     .trial = kvl_trial_launch,
     .longest_run = hopper_long_run},
    {.family = "decode",
     .name = "cpu",
     .file = "cpu/decode.cl",
     .kernels = {"kvl_decode", "kvl_fold"},
     .refuses = needs_cpu_layout,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 1,
     .persistent = true,
     .split_tokens = 512,
     .shared_pairs = cpu_pairs,
     .share_from = 2}, /* kvleaf-bench decode --shared-prefix 2048: PERFORMANCE.md */
};

/* By kvleaf-bench on an H200: 64 queries after 4096 keys by tiles of 16, 32 and 48, and prompts of 256 to 512. */
static const int32_t hopper_tile_costs[] = {90, 61, 78, 100};
static const int32_t hopper_large_tile_costs[] = {60, 72, 100};

static const kvl_variant prefill_table[] = {
    {.family = "prefill",
     .name = "portable",
     .file = "portable/prefill.cl",
     .kernels = {"kvl_prefill"},
     .refuses = never_refuses,
     .windows = true,
     .work_group = 64,
     .tile_rows = 16},
    {.family = "prefill",
     .name = "portable_fixed",
     .file = "portable/prefill.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_packed,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 128,
     .tile_rows = 64},
    {.family = "prefill",
     .name = "nvidia_mma",
     .file = "nvidia/prefill_mma.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_mma,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 256,
     .min_work_group = 256,
     .power_heads = true,
     .tile_rows = 128},
    {.family = "prefill",
     .name = "nvidia_mma_wide",
     .file = "nvidia/prefill_mma.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_mma_wide,
     .fixed = FIX_ALL,
     .windows = true,
     .options = "-DTILES=2",
     .work_group = 128,
     .min_work_group = 128,
     .power_heads = true,
     .tile_rows = 128},
    {.family = "prefill",
     .name = "nvidia_large",
     .file = "nvidia/prefill.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_hopper_large,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 384,
     .min_work_group = 384,
     .queued = true,
     .power_heads = true,
     .tile_rows = 128,
     .tile_parts = 2,
     .tile_costs = hopper_large_tile_costs,
     .undocumented = true,
     .trial = kvl_trial_launch},
    {.family = "prefill",
     .name = "nvidia",
     .file = "nvidia/prefill.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_hopper_small,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 512,
     .min_work_group = 512,
     .queued = true,
     .power_heads = true,
     .tile_rows = 192,
     .tile_parts = 3,
     .tile_costs = hopper_tile_costs,
     .undocumented = true,
     .trial = kvl_trial_launch},
    {.family = "prefill",
     .name = "cpu",
     .file = "cpu/prefill.cl",
     .kernels = {"kvl_prefill"},
     .refuses = needs_cpu_layout,
     .fixed = FIX_ALL,
     .windows = true,
     .work_group = 1,
     .persistent = true,
     .tile_rows = 192},
};

static const kvl_variant gather_table[] = {
    {.family = "gather",
     .name = "portable",
     .file = "portable/gather.cl",
     .kernels = {"kvl_gather"},
     .refuses = needs_paged,
     .work_group = 64},
    {.family = "gather",
     .name = "cpu",
     .file = "cpu/gather.cl",
     .kernels = {"kvl_gather"},
     .refuses = needs_paged_cpu,
     .work_group = 1,
     .item_tokens = 16},
};

static const kvl_variant merge_table[] = {
    {.family = "merge",
     .name = "portable",
     .file = "portable/merge.cl",
     .kernels = {"kvl_merge"},
     .refuses = never_refuses,
     .work_group = 64},
    {.family = "merge",
     .name = "cpu",
     .file = "cpu/merge.cl",
     .kernels = {"kvl_merge"},
     .refuses = needs_cpu,
     .work_group = 1},
};

#define TABLE(rows)                                                                                                    \
    {                                                                                                                  \
        rows, sizeof rows / sizeof *rows                                                                               \
    }

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

int32_t kvl_longest_run_keys(const kvl_variant *variant, const kvl_geometry *geometry)
{
    return variant->longest_run ? variant->longest_run(geometry) * variant->split_tokens : 0;
}
