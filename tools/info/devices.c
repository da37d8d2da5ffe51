/* SPDX-License-Identifier: Apache-2.0 */
/* What the OpenCL loader lists. Each device is asked through a device object of the library, so that what is shown is
 * what the library sees. */
#include "info/info.h"

#include <stdio.h>
#include <string.h>

enum { MAX_PLATFORMS = 32, MAX_DEVICES = 64, TEXT_SIZE = 1024 };

static const char *type_name(cl_device_type type)
{
    return type & CL_DEVICE_TYPE_GPU           ? "gpu"
           : type & CL_DEVICE_TYPE_ACCELERATOR ? "accelerator"
           : type & CL_DEVICE_TYPE_CPU         ? "cpu"
                                               : "other";
}

static void print_size(const char *label, uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    int unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    printf("      %-18s %.4g %s\n", label, value, units[unit]);
}

static void print_device(const kvleaf_caps *caps, bool chosen)
{
    printf("  %s%s%s%s\n", cli_colour(chosen ? CLI_GREEN : CLI_BOLD), caps->device_name, cli_colour(CLI_PLAIN),
           chosen ? "  <- used below" : "");
    printf("      %-18s %s\n", "type", type_name(caps->type));
    printf("      %-18s %s\n", "driver", caps->driver_version);
    printf("      %-18s %s, OpenCL C %u.%u\n", "version", caps->device_version, caps->opencl_c_major,
           caps->opencl_c_minor);
    printf("      %-18s %u\n", "compute units", caps->compute_units);
    printf("      %-18s %zu\n", "work-group", caps->max_work_group_size);
    print_size("local memory", caps->local_bytes);
    print_size("global memory", caps->global_bytes);
    print_size("largest buffer", caps->max_alloc_bytes);
    printf("      %-18s %u floats\n", "native vector", caps->float_vector_width);
    printf("      %-18s %s\n", "half arithmetic", caps->has_fp16 ? "yes" : "no");
    printf("      %-18s %s\n", "sub-groups", caps->has_subgroups ? "yes" : "no");
}

static void row_device(const kvleaf_caps *caps, bool chosen)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "info", "device");
    cJSON_AddStringToObject(row, "platform", caps->platform_name);
    cJSON_AddStringToObject(row, "device", caps->device_name);
    cJSON_AddStringToObject(row, "type", type_name(caps->type));
    cJSON_AddStringToObject(row, "driver_version", caps->driver_version);
    cJSON_AddStringToObject(row, "device_version", caps->device_version);
    cJSON_AddNumberToObject(row, "opencl_c_major", caps->opencl_c_major);
    cJSON_AddNumberToObject(row, "opencl_c_minor", caps->opencl_c_minor);
    cJSON_AddNumberToObject(row, "vendor_id", caps->vendor_id);
    cJSON_AddNumberToObject(row, "compute_units", caps->compute_units);
    cJSON_AddNumberToObject(row, "max_work_group_size", (double)caps->max_work_group_size);
    cJSON_AddNumberToObject(row, "local_bytes", (double)caps->local_bytes);
    cJSON_AddNumberToObject(row, "global_bytes", (double)caps->global_bytes);
    cJSON_AddNumberToObject(row, "max_alloc_bytes", (double)caps->max_alloc_bytes);
    cJSON_AddNumberToObject(row, "float_vector_width", caps->float_vector_width);
    cJSON_AddBoolToObject(row, "has_fp16", caps->has_fp16);
    cJSON_AddBoolToObject(row, "has_subgroups", caps->has_subgroups);
    cJSON_AddBoolToObject(row, "chosen", chosen);
    cli_row(row);
}

static bool show_device(const cli *program, cl_device_id id, bool chosen)
{
    char name[TEXT_SIZE] = "?";
    cl_int error = CL_SUCCESS;
    kvleaf_device_params params = {.struct_size = sizeof params};
    kvleaf_caps caps = {.struct_size = sizeof caps};
    kvleaf_device *device = NULL;
    clGetDeviceInfo(id, CL_DEVICE_NAME, sizeof name - 1, name, NULL);
    params.device = id;
    params.context = clCreateContext(NULL, 1, &id, NULL, NULL, &error);
    if (!params.context) {
        fprintf(stderr, "%s: %s: no context, OpenCL error %d\n", program->name, name, error);
        return false;
    }
    kvleaf_status status = kvleaf_device_create(&params, &device);
    clReleaseContext(params.context);
    if (status != KVLEAF_OK || kvleaf_device_query(device, &caps) != KVLEAF_OK) {
        cli_fail(program, name);
        return false;
    }
    kvleaf_device_destroy(&device);
    if (program->json)
        row_device(&caps, chosen);
    else
        print_device(&caps, chosen);
    return true;
}

/* A driver that doesn't answer is named and passed over: it is the others that count. */
static bool show_platform(const cli *program, cl_platform_id platform, cl_device_id chosen)
{
    char name[TEXT_SIZE] = "?", version[TEXT_SIZE] = "?";
    cl_device_id devices[MAX_DEVICES];
    cl_uint count = 0;
    clGetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof name - 1, name, NULL);
    clGetPlatformInfo(platform, CL_PLATFORM_VERSION, sizeof version - 1, version, NULL);
    cl_int error = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, MAX_DEVICES, devices, &count);
    if (error != CL_SUCCESS && error != CL_DEVICE_NOT_FOUND)
        fprintf(stderr, "%s: platform %s doesn't list its devices, OpenCL error %d\n", program->name, name, error);
    if (error != CL_SUCCESS)
        count = 0;
    if (!program->json)
        printf("%s%s%s, %s%s\n", cli_colour(CLI_BOLD), name, cli_colour(CLI_PLAIN), version,
               count ? "" : ": no devices");
    bool right = true;
    for (cl_uint i = 0; i < count && i < MAX_DEVICES; i++)
        right = show_device(program, devices[i], devices[i] == chosen) && right;
    return right;
}

bool info_list(const cli *program, cl_device_id chosen)
{
    cl_platform_id platforms[MAX_PLATFORMS];
    cl_uint count = 0;
    cl_int error = clGetPlatformIDs(MAX_PLATFORMS, platforms, &count);
    if (error != CL_SUCCESS) {
        fprintf(stderr, "%s: clGetPlatformIDs failed with OpenCL error %d\n", program->name, error);
        return false;
    }
    bool right = true;
    for (cl_uint i = 0; i < count && i < MAX_PLATFORMS; i++)
        right = show_platform(program, platforms[i], chosen) && right;
    return right;
}
