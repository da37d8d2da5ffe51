/* SPDX-License-Identifier: Apache-2.0 */
/* Picking a device for a program that has no OpenCL objects of its own. */
#include "device/program.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PLATFORMS = 32, MAX_DEVICES = 64, NAME_SIZE = 128, NO_PLATFORM = -1001 /* CL_PLATFORM_NOT_FOUND_KHR */ };

typedef struct candidate {
    cl_platform_id platform;
    cl_device_id device;
    int rank; /* lower is better */
    cl_uint units;
    char platform_name[NAME_SIZE], device_name[NAME_SIZE];
    bool tried;
} candidate;

typedef struct candidates {
    int count;
    candidate list[MAX_DEVICES];
} candidates;

static bool contains(const char *text, const char *part)
{
    size_t length = strlen(part);
    for (; *text; text++) {
        size_t same = 0;
        while (same < length && tolower((unsigned char)text[same]) == tolower((unsigned char)part[same]))
            same++;
        if (same == length)
            return true;
    }
    return length == 0;
}

/* Discrete GPU, other GPU, accelerator, CPU, anything else. */
static int rank_of(const kvleaf_opencl *cl, cl_device_id device)
{
    cl_device_type type = 0;
    cl_bool unified = CL_FALSE;
    cl->GetDeviceInfo(device, CL_DEVICE_TYPE, sizeof type, &type, NULL);
    cl->GetDeviceInfo(device, CL_DEVICE_HOST_UNIFIED_MEMORY, sizeof unified, &unified, NULL);
    if (type & CL_DEVICE_TYPE_GPU)
        return unified ? 1 : 0;
    if (type & CL_DEVICE_TYPE_ACCELERATOR)
        return 2;
    return type & CL_DEVICE_TYPE_CPU ? 3 : 4;
}

static bool is_usable(const kvleaf_opencl *cl, cl_device_id device)
{
    cl_bool available = CL_FALSE, compiler = CL_FALSE;
    return cl->GetDeviceInfo(device, CL_DEVICE_AVAILABLE, sizeof available, &available, NULL) == CL_SUCCESS &&
           cl->GetDeviceInfo(device, CL_DEVICE_COMPILER_AVAILABLE, sizeof compiler, &compiler, NULL) == CL_SUCCESS &&
           available && compiler;
}

static void add_platform(const kvleaf_opencl *cl, const kvl_logger *logger, cl_platform_id platform, candidates *all)
{
    char name[1024] = "";
    cl_device_id devices[MAX_DEVICES];
    cl_uint count = 0;
    cl_int error = cl->GetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof name - 1, name, NULL);
    if (error == CL_SUCCESS)
        error = cl->GetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, MAX_DEVICES, devices, &count);
    if (error != CL_SUCCESS) {
        if (error != CL_DEVICE_NOT_FOUND)
            kvl_log(logger, KVLEAF_LOG_WARNING, "OpenCL platform \"%s\" is passed over: error %d", name, error);
        return;
    }
    for (cl_uint i = 0; i < count && i < MAX_DEVICES && all->count < MAX_DEVICES; i++) {
        candidate *c = &all->list[all->count];
        char device_name[1024] = "";
        if (cl->GetDeviceInfo(devices[i], CL_DEVICE_NAME, sizeof device_name - 1, device_name, NULL) != CL_SUCCESS ||
            !is_usable(cl, devices[i])) {
            kvl_log(logger, KVLEAF_LOG_WARNING, "a device of \"%s\" is passed over: not available", name);
            continue;
        }
        *c = (candidate){.platform = platform, .device = devices[i], .rank = rank_of(cl, devices[i])};
        cl->GetDeviceInfo(devices[i], CL_DEVICE_MAX_COMPUTE_UNITS, sizeof c->units, &c->units, NULL);
        snprintf(c->platform_name, sizeof c->platform_name, "%.*s", NAME_SIZE - 1, name);
        snprintf(c->device_name, sizeof c->device_name, "%.*s", NAME_SIZE - 1, device_name);
        all->count++;
    }
}

static kvleaf_status list_candidates(const kvleaf_opencl *cl, const kvl_logger *logger, candidates *all)
{
    cl_platform_id platforms[MAX_PLATFORMS];
    cl_uint count = 0;
    cl_int error = cl->GetPlatformIDs(MAX_PLATFORMS, platforms, &count);
    if (error == NO_PLATFORM || (error == CL_SUCCESS && count == 0)) {
        return kvl_fail(KVLEAF_DEVICE, "select", NO_PLATFORM, 0,
                        "no OpenCL platform on this machine: install a driver, such as pocl-opencl-icd for the CPU");
    }
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetPlatformIDs", error);
    for (cl_uint i = 0; i < count && i < MAX_PLATFORMS; i++)
        add_platform(cl, logger, platforms[i], all);
    if (all->count == 0)
        return kvl_fail(KVLEAF_DEVICE, "select", 0, 0, "%u OpenCL platforms, but no usable device on any of them",
                        count);
    return KVLEAF_OK;
}

static candidate *best_untried(candidates *all, const char *select)
{
    candidate *best = NULL;
    for (int i = 0; i < all->count; i++) {
        candidate *c = &all->list[i];
        if (c->tried || (select && !contains(c->platform_name, select) && !contains(c->device_name, select)))
            continue;
        if (!best || c->rank < best->rank || (c->rank == best->rank && c->units > best->units))
            best = c;
    }
    return best;
}

static kvleaf_status fail_select(const kvleaf_device_params *params, const candidates *all)
{
    kvl_text names = {.allocator = &params->allocator};
    for (int i = 0; i < all->count; i++)
        kvl_text_format(&names, "%s%s (%s)", i ? "; " : "", all->list[i].device_name, all->list[i].platform_name);
    kvleaf_status status = kvl_fail(KVLEAF_INVALID, "select", 0, all->count, "no device matches \"%s\"; there are: %s",
                                    params->select, names.failed ? "?" : names.data);
    kvl_text_free(&names);
    return status;
}

kvleaf_status kvl_device_create_apart(const kvleaf_device_params *params, cl_platform_id platform, cl_device_id id,
                                      kvleaf_device **out)
{
    const kvleaf_opencl *cl = params->opencl ? params->opencl : kvleaf_opencl_loader();
    const cl_context_properties properties[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)platform, 0};
    cl_int error = CL_SUCCESS;
    kvleaf_device_params own = *params;
    own.device = id;
    own.context = cl->CreateContext(properties, 1, &id, NULL, NULL, &error);
    if (!own.context)
        return kvl_fail_opencl("clCreateContext", error);
    kvleaf_status status = kvleaf_device_create(&own, out);
    cl->ReleaseContext(own.context); /* the device object holds it now */
    return status;
}

kvleaf_status kvleaf_device_open(const kvleaf_device_params *params, kvleaf_device **out)
{
    kvleaf_status status = kvl_device_check_params(params);
    if (status != KVLEAF_OK)
        return status;
    if (!out)
        return kvl_fail_null("out");
    const kvleaf_opencl *cl = params->opencl ? params->opencl : kvleaf_opencl_loader();
    kvl_logger logger = {params->log, params->log_user, params->log_level};
    candidates *all = kvl_alloc(&params->allocator, 1, sizeof *all);
    kvl_error_state *before = kvl_error_save(&params->allocator);
    if (!all || !before) {
        kvl_free(&params->allocator, all);
        kvl_free(&params->allocator, before);
        return kvl_fail_memory(sizeof *all);
    }
    status = list_candidates(cl, &logger, all);
    candidate *c = status == KVLEAF_OK ? best_untried(all, params->select) : NULL;
    if (status == KVLEAF_OK && !c)
        status = fail_select(params, all);
    /* A driver that lists a device and then can't open it gives way to the next best. */
    for (; c; c = best_untried(all, params->select)) {
        c->tried = true;
        status = kvl_device_create_apart(params, c->platform, c->device, out);
        if (status == KVLEAF_OK || status == KVLEAF_INVALID)
            break;
        kvl_log(&logger, KVLEAF_LOG_WARNING, "%s can't be opened: %s", c->device_name, kvleaf_last_error()->message);
    }
    if (status == KVLEAF_OK)
        kvl_error_restore(&params->allocator, before);
    else
        kvl_free(&params->allocator, before);
    kvl_free(&params->allocator, all);
    return status;
}
