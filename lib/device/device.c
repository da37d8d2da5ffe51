/* SPDX-License-Identifier: Apache-2.0 */
/* A device object: an application's context and device, what they can do, and how long they are kept. */
#include "device/program.h"

#include <stdio.h>
#include <string.h>

size_t kvleaf_dtype_size(kvleaf_dtype dtype)
{
    switch (dtype) {
    case KVLEAF_F16:
    case KVLEAF_BF16:
        return 2;
    case KVLEAF_F32:
        return 4;
    }
    return 0;
}

const char *kvleaf_dtype_name(kvleaf_dtype dtype)
{
    switch (dtype) {
    case KVLEAF_F16:
        return "f16";
    case KVLEAF_BF16:
        return "bf16";
    case KVLEAF_F32:
        return "f32";
    }
    return "?";
}

/* Reads a fixed-size property into *value, which stays as it was on failure. */
static cl_int read_info(const kvleaf_device *device, cl_device_info what, void *value, size_t size)
{
    return device->cl->GetDeviceInfo(device->id, what, size, value, NULL);
}

/* A string property, cut to fit; empty where it can't be read. */
static void read_string(const kvleaf_device *device, cl_device_info what, char *out, size_t size)
{
    char value[1024];
    size_t length = 0;
    out[0] = 0;
    if (device->cl->GetDeviceInfo(device->id, what, sizeof value, value, &length) == CL_SUCCESS && length > 0)
        snprintf(out, size, "%.*s", (int)(length < sizeof value ? length : sizeof value), value);
}

static bool has_word(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += length) {
        if ((at == list || at[-1] == ' ') && (at[length] == 0 || at[length] == ' '))
            return true;
    }
    return false;
}

static kvleaf_status read_extensions(kvleaf_device *device)
{
    const kvleaf_opencl *cl = device->cl;
    size_t size = 0;
    cl_int error = cl->GetDeviceInfo(device->id, CL_DEVICE_EXTENSIONS, 0, NULL, &size);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetDeviceInfo", error);
    char *list = kvl_alloc(&device->allocator, size + 1, 1);
    if (!list)
        return kvl_fail_memory(size + 1);
    error = cl->GetDeviceInfo(device->id, CL_DEVICE_EXTENSIONS, size, list, NULL);
    device->caps.has_fp16 = has_word(list, "cl_khr_fp16");
    device->caps.has_subgroups = has_word(list, "cl_khr_subgroups") || has_word(list, "cl_intel_subgroups");
    kvl_free(&device->allocator, list);
    return error == CL_SUCCESS ? KVLEAF_OK : kvl_fail_opencl("clGetDeviceInfo", error);
}

static void read_names(kvleaf_device *device, cl_platform_id platform)
{
    kvleaf_caps *caps = &device->caps;
    char version[128], value[1024];
    size_t length = 0;
    if (device->cl->GetPlatformInfo(platform, CL_PLATFORM_NAME, sizeof value, value, &length) == CL_SUCCESS &&
        length > 0)
        snprintf(caps->platform_name, sizeof caps->platform_name, "%.*s", (int)length, value);
    read_string(device, CL_DEVICE_NAME, caps->device_name, sizeof caps->device_name);
    read_string(device, CL_DRIVER_VERSION, caps->driver_version, sizeof caps->driver_version);
    read_string(device, CL_DEVICE_VERSION, caps->device_version, sizeof caps->device_version);
    read_string(device, CL_DEVICE_OPENCL_C_VERSION, version, sizeof version);
    if (sscanf(version, "OpenCL C %u.%u", &caps->opencl_c_major, &caps->opencl_c_minor) != 2)
        caps->opencl_c_major = 1, caps->opencl_c_minor = 2;
}

/* Of cl_nv_device_attribute_query, whose header is not everywhere. */
enum { NVIDIA_VENDOR = 0x10de, CAPABILITY_MAJOR_NV = 0x4000, CAPABILITY_MINOR_NV = 0x4001 };

static uint64_t capped(uint64_t limit, uint64_t cap)
{
    return cap && cap < limit ? cap : limit;
}

static kvleaf_status read_caps(kvleaf_device *device, const kvleaf_device_params *params)
{
    kvleaf_caps *caps = &device->caps;
    cl_platform_id platform = NULL;
    cl_ulong local = 0, alloc = 0, global = 0;
    size_t group = 0, items[16] = {0};
    cl_uint width = 0, major = 0, minor = 0;
    const struct {
        cl_device_info what;
        void *value;
        size_t size;
    } reads[] = {
        {CL_DEVICE_PLATFORM, &platform, sizeof platform},
        {CL_DEVICE_TYPE, &caps->type, sizeof caps->type},
        {CL_DEVICE_VENDOR_ID, &caps->vendor_id, sizeof caps->vendor_id},
        {CL_DEVICE_MAX_COMPUTE_UNITS, &caps->compute_units, sizeof caps->compute_units},
        {CL_DEVICE_MAX_WORK_GROUP_SIZE, &group, sizeof group},
        {CL_DEVICE_MAX_WORK_ITEM_SIZES, items, sizeof items},
        {CL_DEVICE_LOCAL_MEM_SIZE, &local, sizeof local},
        {CL_DEVICE_MAX_MEM_ALLOC_SIZE, &alloc, sizeof alloc},
        {CL_DEVICE_GLOBAL_MEM_SIZE, &global, sizeof global},
        {CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT, &width, sizeof width},
    };
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
        cl_int error = read_info(device, reads[i].what, reads[i].value, reads[i].size);
        if (error != CL_SUCCESS)
            return kvl_fail_opencl("clGetDeviceInfo", error);
    }
    caps->struct_size = sizeof *caps;
    caps->max_work_group_size = (size_t)capped(capped(group, items[0]), params->max_work_group_size);
    caps->local_bytes = capped(local, params->max_local_bytes);
    caps->max_alloc_bytes = capped(alloc, params->max_alloc_bytes);
    caps->global_bytes = global;
    caps->float_vector_width = width;
    if (caps->vendor_id == NVIDIA_VENDOR && !read_info(device, CAPABILITY_MAJOR_NV, &major, sizeof major) &&
        !read_info(device, CAPABILITY_MINOR_NV, &minor, sizeof minor))
        caps->nvidia_capability = 10 * major + minor;
    read_names(device, platform);
    return read_extensions(device);
}

static kvleaf_status copy_text(kvleaf_device *device, const char *text, char **out)
{
    if (!text)
        return KVLEAF_OK;
    size_t size = strlen(text) + 1;
    *out = kvl_alloc(&device->allocator, size, 1);
    if (!*out)
        return kvl_fail_memory(size);
    memcpy(*out, text, size);
    return KVLEAF_OK;
}

/* Whether the device is one of the context's. */
static kvleaf_status check_context(const kvleaf_opencl *cl, cl_context context, cl_device_id id)
{
    cl_device_id devices[64];
    size_t size = 0;
    cl_int error = cl->GetContextInfo(context, CL_CONTEXT_DEVICES, sizeof devices, devices, &size);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetContextInfo", error);
    for (size_t i = 0; i < size / sizeof *devices; i++) {
        if (devices[i] == id)
            return KVLEAF_OK;
    }
    return kvl_fail(KVLEAF_INVALID, "device", 0, 0, "device is not one of the %zu devices of context",
                    size / sizeof *devices);
}

/* Every member of the application's table is called sooner or later. */
static kvleaf_status check_table(const kvleaf_opencl *table)
{
    void (*entries[sizeof(kvleaf_opencl) / sizeof(void (*)(void))])(void);
    memcpy(entries, table, sizeof entries);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (!entries[i])
            return kvl_fail(KVLEAF_INVALID, "opencl", (int64_t)i, 0, "entry %zu of opencl is null", i);
    }
    return KVLEAF_OK;
}

kvleaf_status kvl_device_check_params(const kvleaf_device_params *params)
{
    kvleaf_status status = kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "params");
    if (status != KVLEAF_OK)
        return status;
    if (!params->allocator.allocate != !params->allocator.release)
        return kvl_fail(KVLEAF_INVALID, "allocator", 0, 0, "allocator has one of allocate and release, needs both");
    if (params->opencl)
        return check_table(params->opencl);
    return KVLEAF_OK;
}

static void destroy(kvleaf_device *device)
{
    kvleaf_allocator allocator = device->allocator;
    kvl_programs_destroy(device);
    if (device->context)
        device->cl->ReleaseContext(device->context);
    kvl_mutex_destroy(&allocator, device->mutex);
    kvl_free(&allocator, device->kernel_dir);
    kvl_free(&allocator, device->cache_dir);
    kvl_free(&allocator, device->variants);
    kvl_free(&allocator, device);
}

static kvleaf_status fill(kvleaf_device *device, const kvleaf_device_params *params)
{
    kvleaf_status status = check_context(device->cl, params->context, params->device);
    if (status != KVLEAF_OK)
        return status;
    cl_int error = device->cl->RetainContext(params->context);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clRetainContext", error);
    device->context = params->context;
    device->mutex = kvl_mutex_create(&device->allocator);
    if (!device->mutex)
        return kvl_fail_memory(0);
    if ((status = copy_text(device, params->kernel_dir, &device->kernel_dir)) != KVLEAF_OK ||
        (status = copy_text(device, params->cache_dir, &device->cache_dir)) != KVLEAF_OK ||
        (status = copy_text(device, params->variants, &device->variants)) != KVLEAF_OK ||
        (status = read_caps(device, params)) != KVLEAF_OK)
        return status;
    return kvl_programs_create(device);
}

kvleaf_status kvleaf_device_create(const kvleaf_device_params *params, kvleaf_device **out)
{
    kvleaf_status status = kvl_device_check_params(params);
    if (status != KVLEAF_OK)
        return status;
    if (!out)
        return kvl_fail_null("out");
    if (!params->context)
        return kvl_fail_null("context");
    if (!params->device)
        return kvl_fail_null("device");
    kvleaf_device *device = kvl_alloc(&params->allocator, 1, sizeof *device);
    if (!device)
        return kvl_fail_memory(sizeof *device);
    device->cl = params->opencl ? params->opencl : kvleaf_opencl_loader();
    device->id = params->device;
    device->allocator = params->allocator;
    device->logger = (kvl_logger){params->log, params->log_user, params->log_level};
    device->deny_undocumented = params->deny_undocumented != 0;
    device->references = 1;
    status = fill(device, params);
    if (status != KVLEAF_OK) {
        destroy(device);
        return status;
    }
    kvl_log(&device->logger, KVLEAF_LOG_INFO, "device: %s on %s, driver %s", device->caps.device_name,
            device->caps.platform_name, device->caps.driver_version);
    *out = device;
    return KVLEAF_OK;
}

void kvl_device_retain(kvleaf_device *device)
{
    kvl_mutex_lock(device->mutex);
    device->references++;
    kvl_mutex_unlock(device->mutex);
}

void kvl_device_release(kvleaf_device *device)
{
    if (!device)
        return;
    kvl_mutex_lock(device->mutex);
    bool last = --device->references == 0;
    kvl_mutex_unlock(device->mutex);
    if (last)
        destroy(device);
}

void kvleaf_device_destroy(kvleaf_device **device)
{
    if (!device)
        return;
    kvl_device_release(*device);
    *device = NULL;
}

kvleaf_status kvleaf_device_query(const kvleaf_device *device, kvleaf_caps *caps)
{
    if (!device)
        return kvl_fail_null("device");
    kvleaf_status status = kvl_check_struct(caps, caps ? caps->struct_size : 0, sizeof *caps, "caps");
    if (status == KVLEAF_OK)
        *caps = device->caps;
    return status;
}

cl_context kvleaf_device_context(const kvleaf_device *device)
{
    return device ? device->context : NULL;
}

cl_device_id kvleaf_device_id(const kvleaf_device *device)
{
    return device ? device->id : NULL;
}

kvleaf_status kvleaf_device_queue_create(kvleaf_device *device, cl_command_queue *out)
{
    if (!device)
        return kvl_fail_null("device");
    if (!out)
        return kvl_fail_null("out");
    cl_int error = CL_SUCCESS;
    cl_command_queue queue = device->cl->CreateCommandQueue(device->context, device->id, 0, &error);
    if (!queue)
        return kvl_fail_opencl("clCreateCommandQueue", error);
    *out = queue;
    return KVLEAF_OK;
}
