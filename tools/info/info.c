/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cli.h"
int main(int argc, char **argv)
{
    cli_shape shape = CLI_SHAPE_DEFAULTS;
    const cli_option options[] = {CLI_SHAPE_OPTIONS(shape)};
    cli program = {
        .name = "kvleaf-info",
        .summary =
            "Shows OpenCL platforms, devices and capabilities, and the kernel variant chosen for each operation.",
        .options = options,
        .num_options = sizeof options / sizeof *options};
    cli_parse(&program, argc, argv);
    cli_check_shape(&program, &shape);
    kvleaf_device *device;
    if (cli_device_open(&program, &device) != KVLEAF_OK)
        return CLI_FAILED;
    kvleaf_device_destroy(&device);
    return CLI_OK;
}
