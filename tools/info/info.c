/* SPDX-License-Identifier: Apache-2.0 */
#include "info/info.h"

#include "pool/pool.h"

#include <stdio.h>

static const char *const layouts[] = {"auto", "strided", "rows", "cpu16", "dim8", "swizzle8", NULL};

/* AUTO is what a pool of this geometry gets; contiguous K/V has no packed layout. */
static kvleaf_layout resolve_layout(const cli *program, const kvleaf_device *device, const cli_shape *shape, int layout)
{
    if (shape->block_size == 0) {
        if (layout != KVLEAF_LAYOUT_AUTO && layout != KVLEAF_LAYOUT_STRIDED)
            cli_usage(program, "--layout is %s, but contiguous K/V (--block-size 0) is strided", layouts[layout]);
        return KVLEAF_LAYOUT_STRIDED;
    }
    if (layout == KVLEAF_LAYOUT_AUTO)
        return kvl_layout_best(device, (kvleaf_dtype)shape->kv_dtype, shape->block_size, shape->head_dim,
                               shape->heads / shape->kv_heads);
    const char *refuses =
        layout == KVLEAF_LAYOUT_STRIDED ? NULL : kvl_layout_refuses((kvleaf_layout)layout, shape->block_size);
    if (refuses)
        cli_usage(program, "--layout is %s: %s", layouts[layout], refuses);
    return (kvleaf_layout)layout;
}

int main(int argc, char **argv)
{
    cli_shape shape = CLI_SHAPE_DEFAULTS;
    int layout = KVLEAF_LAYOUT_AUTO;
    const cli_option options[] = {
        CLI_SHAPE_OPTIONS(shape),
        {"layout", "NAME", "of K and V; auto = what a pool takes", CLI_CHOICE, &layout, 0, 0, layouts},
    };
    cli program = {.name = "kvleaf-info",
                   .summary =
                       "Shows the OpenCL platforms and devices of this machine, what they can do, and for a geometry "
                       "the kernel\nvariant that serves each operation and why the others were passed over.",
                   .notes = "KVLEAF_VARIANT (globs of variant keys) and KVLEAF_KERNEL_DIR are heeded.",
                   .options = options,
                   .num_options = sizeof options / sizeof *options};
    cli_parse(&program, argc, argv);
    cli_check_shape(&program, &shape);
    kvleaf_device *device = NULL;
    if (cli_device_open(&program, &device) != KVLEAF_OK)
        return CLI_FAILED;
    const kvl_geometry geometry = {.q_dtype = (kvleaf_dtype)shape.q_dtype,
                                   .kv_dtype = (kvleaf_dtype)shape.kv_dtype,
                                   .out_dtype = (kvleaf_dtype)shape.q_dtype,
                                   .layout = resolve_layout(&program, device, &shape, layout),
                                   .num_heads = shape.heads,
                                   .num_kv_heads = shape.kv_heads,
                                   .head_dim = shape.head_dim,
                                   .block_size = shape.block_size,
                                   .window = shape.window,
                                   .softcap = (float)shape.softcap};
    bool right = info_list(&program, kvleaf_device_id(device));
    right = info_variants(&program, device, &geometry) && right;
    kvleaf_device_destroy(&device);
    return right ? CLI_OK : CLI_FAILED;
}
