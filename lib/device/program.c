/* SPDX-License-Identifier: Apache-2.0 */
/* Programs of a device: built once for a source file and options, kept as long as the device lives. */
#include "device/program.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_STANDARD "-cl-std=CL1.2"
#define PTX_OPTIONS      "-cl-nv-verbose" /* for the log that tells of serialised products */

typedef struct kvl_program_entry {
    struct kvl_program_entry *next;
    char *name;   /* file, newline, options: what the layers above ask for */
    char *source; /* expanded, where it came from a folder and may change; else NULL */
    cl_program program;
} program_entry;

static void append_string(kvleaf_device *device, kvl_text *text, const char *label, cl_platform_id platform,
                          cl_uint what)
{
    const kvleaf_opencl *cl = device->cl;
    char value[1024];
    size_t size = 0;
    cl_int error = platform ? cl->GetPlatformInfo(platform, what, sizeof value, value, &size)
                            : cl->GetDeviceInfo(device->id, what, sizeof value, value, &size);
    kvl_text_format(text, "%s: ", label);
    if (error == CL_SUCCESS && size > 0)
        kvl_text_format(text, "%.*s", (int)size, value);
    else
        kvl_text_format(text, "? (%d)", error);
    kvl_text_append(text, "\n", 1);
}

kvleaf_status kvl_programs_create(kvleaf_device *device)
{
    cl_platform_id platform = NULL;
    cl_int error = device->cl->GetDeviceInfo(device->id, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetDeviceInfo", error);
    device->programs = kvl_alloc(&device->allocator, 1, sizeof *device->programs);
    if (!device->programs)
        return kvl_fail_memory(sizeof *device->programs);
    kvl_text *identity = &device->programs->identity;
    identity->allocator = &device->allocator;
    kvl_text_format(identity, "kvleaf: %s\npointer: %zu\n", kvleaf_version(), sizeof(void *));
    append_string(device, identity, "platform", platform, CL_PLATFORM_NAME);
    append_string(device, identity, "platform version", platform, CL_PLATFORM_VERSION);
    append_string(device, identity, "device", NULL, CL_DEVICE_NAME);
    append_string(device, identity, "vendor", NULL, CL_DEVICE_VENDOR);
    append_string(device, identity, "device version", NULL, CL_DEVICE_VERSION);
    append_string(device, identity, "driver", NULL, CL_DRIVER_VERSION);
    return identity->failed ? kvl_fail_memory(identity->capacity) : KVLEAF_OK;
}

const kvl_text *kvl_device_identity(const kvleaf_device *device)
{
    return &device->programs->identity;
}

static void entry_destroy(kvleaf_device *device, program_entry *entry)
{
    if (entry->program)
        device->cl->ReleaseProgram(entry->program);
    kvl_free(&device->allocator, entry->name);
    kvl_free(&device->allocator, entry->source);
    kvl_free(&device->allocator, entry);
}

void kvl_programs_destroy(kvleaf_device *device)
{
    if (!device->programs)
        return;
    for (program_entry *entry = device->programs->first, *next; entry; entry = next) {
        next = entry->next;
        entry_destroy(device, entry);
    }
    kvl_trial_outcomes_destroy(device);
    kvl_text_free(&device->programs->identity);
    kvl_free(&device->allocator, device->programs);
    device->programs = NULL;
}

/* The log of the program's last build; *out is released with kvl_text_free. */
static void build_log(kvleaf_device *device, cl_program program, kvl_text *out)
{
    size_t size = 0;
    if (device->cl->GetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, 0, NULL, &size) != CL_SUCCESS ||
        !size)
        return;
    char *log = kvl_alloc(&device->allocator, size + 1, 1);
    if (log &&
        device->cl->GetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, size, log, NULL) == CL_SUCCESS)
        kvl_text_append(out, log, strlen(log));
    kvl_free(&device->allocator, log);
}

/* Logs each line of a text under the file and number that the compiler's messages use. */
static void log_source(kvleaf_device *device, const char *text)
{
    char file[160] = "";
    int number = 1;
    while (*text) {
        int length = (int)strcspn(text, "\n");
        int line, read = 0;
        char named[160];
        if (sscanf(text, "#line %d \"%159[^\"\n]\"%n", &line, named, &read) == 2 && read > 0) {
            number = line;
            memcpy(file, named, sizeof file);
        } else {
            kvl_log(&device->logger, KVLEAF_LOG_WARNING, "%s:%d: %.*s", file, number++, length, text);
        }
        text += length + (text[length] == '\n');
    }
}

static kvleaf_status fail_build(kvleaf_device *device, cl_program program, const char *file, const char *options,
                                const char *source, cl_int error)
{
    kvl_text log = {.allocator = &device->allocator};
    build_log(device, program, &log);
    kvl_log(&device->logger, KVLEAF_LOG_WARNING, "cl_kernels/%s failed to build with \"%s\" (OpenCL error %d):", file,
            options, error);
    log_source(device, source);
    for (const char *at = log.data ? log.data : ""; *at;) {
        int length = (int)strcspn(at, "\n");
        kvl_log(&device->logger, KVLEAF_LOG_WARNING, "%.*s", length, at);
        at += length + (at[length] == '\n');
    }
    char what[160];
    snprintf(what, sizeof what, "building cl_kernels/%s", file);
    kvleaf_status status = kvl_fail_opencl(what, error);
    if (log.data)
        kvl_fail_log(log.data);
    kvl_text_free(&log);
    return status;
}

/* A binary the driver refuses is no error: the source is there. */
static cl_program build_binary(kvleaf_device *device, const char *options, const char *binary, size_t size)
{
    cl_int error = CL_SUCCESS, binary_status = CL_SUCCESS;
    const unsigned char *bytes = (const unsigned char *)binary;
    cl_program program =
        device->cl->CreateProgramWithBinary(device->context, 1, &device->id, &size, &bytes, &binary_status, &error);
    if (!program)
        return NULL;
    if (device->cl->BuildProgram(program, 1, &device->id, options, NULL, NULL) != CL_SUCCESS) {
        device->cl->ReleaseProgram(program);
        return NULL;
    }
    return program;
}

/* The program's binary for this device among those of its context. NULL where there is none. */
static char *program_binary(kvleaf_device *device, cl_program program, size_t *size)
{
    enum { MAX_DEVICES = 64 };
    const kvleaf_opencl *cl = device->cl;
    cl_device_id devices[MAX_DEVICES];
    size_t sizes[MAX_DEVICES] = {0};
    unsigned char *binaries[MAX_DEVICES] = {0};
    size_t bytes = 0;
    if (cl->GetProgramInfo(program, CL_PROGRAM_DEVICES, sizeof devices, devices, &bytes) != CL_SUCCESS)
        return NULL;
    size_t count = bytes / sizeof *devices, at = 0;
    while (at < count && devices[at] != device->id)
        at++;
    if (at == count || cl->GetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof sizes, sizes, NULL) != CL_SUCCESS ||
        sizes[at] == 0)
        return NULL;
    binaries[at] = kvl_alloc(&device->allocator, sizes[at], 1);
    if (!binaries[at])
        return NULL;
    if (cl->GetProgramInfo(program, CL_PROGRAM_BINARIES, count * sizeof *binaries, binaries, NULL) != CL_SUCCESS) {
        kvl_free(&device->allocator, binaries[at]);
        return NULL;
    }
    *size = sizes[at];
    return (char *)binaries[at];
}

static kvleaf_status refuse_ptx(const char *file, const char *why)
{
    return kvl_fail(KVLEAF_UNSUPPORTED, "ptx", 0, 0, "cl_kernels/%s: %s", file, why);
}

/* Replaces a program whose source asks for it by one built from its edited PTX. */
static kvleaf_status edit_program(kvleaf_device *device, const char *file, cl_program *program)
{
    kvl_text edited = {.allocator = &device->allocator}, log = {.allocator = &device->allocator};
    size_t size = 0;
    char *ptx = program_binary(device, *program, &size);
    cl_program better = NULL;
    kvleaf_status status = KVLEAF_OK;
    if (!ptx || !kvl_ptx_edit(ptx, &edited))
        status = refuse_ptx(file, "the driver's binary is no PTX that the edit knows");
    else if (!(better = build_binary(device, PTX_OPTIONS, edited.data, edited.size)))
        status = refuse_ptx(file, "the driver refuses the edited PTX");
    if (!status)
        build_log(device, better, &log);
    if (!status && log.data && kvl_ptx_serialised(log.data))
        status = refuse_ptx(file, "the driver serialises the matrix products of the edited PTX");
    if (!status) {
        kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "cl_kernels/%s: %s", file, log.data ? log.data : "");
        device->cl->ReleaseProgram(*program);
        *program = better;
    } else if (better) {
        device->cl->ReleaseProgram(better);
    }
    kvl_free(&device->allocator, ptx);
    kvl_text_free(&edited);
    kvl_text_free(&log);
    return status;
}

static kvleaf_status build_source(kvleaf_device *device, const char *file, const char *options, const kvl_text *source,
                                  cl_program *out)
{
    cl_int error = CL_SUCCESS;
    const char *text = source->data;
    cl_program program = device->cl->CreateProgramWithSource(device->context, 1, &text, &source->size, &error);
    if (!program)
        return kvl_fail_opencl("clCreateProgramWithSource", error);
    error = device->cl->BuildProgram(program, 1, &device->id, options, NULL, NULL);
    if (error != CL_SUCCESS) {
        kvleaf_status status = fail_build(device, program, file, options, source->data, error);
        device->cl->ReleaseProgram(program);
        return status;
    }
    kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "cl_kernels/%s: built from source", file);
    kvleaf_status status = kvl_ptx_wanted(source->data) ? edit_program(device, file, &program) : KVLEAF_OK;
    if (status != KVLEAF_OK)
        device->cl->ReleaseProgram(program);
    else
        *out = program;
    return status;
}

/* To give a binary PoCL compiles every kernel of the program, and what then runs once more, for its sizes; that, it
 * keeps in a cache of its own. */
static bool binaries_cost_more(const kvleaf_caps *caps)
{
    return strcmp(caps->platform_name, "Portable Computing Language") == 0;
}

void kvl_program_key(const kvleaf_device *device, const char *file, const char *options, const kvl_text *source,
                     kvl_text *key)
{
    kvl_text_append(key, kvl_device_identity(device)->data, kvl_device_identity(device)->size);
    kvl_text_format(key, "file: %s\noptions: %s\nsource:\n", file, options);
    kvl_text_append(key, source->data, source->size);
}

/* From the disk cache, else from source and then into the disk cache. */
static kvleaf_status build_cached(kvleaf_device *device, const char *file, const char *options, const kvl_text *source,
                                  cl_program *out)
{
    if (!device->cache_dir || binaries_cost_more(&device->caps))
        return build_source(device, file, options, source, out);
    kvl_text key = {.allocator = &device->allocator};
    kvl_program_key(device, file, options, source, &key);
    char *binary = NULL;
    size_t size = 0;
    cl_program program = NULL;
    if (!key.failed && kvl_disk_load(device, &key, &binary, &size)) {
        program = build_binary(device, options, binary, size);
        kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "cl_kernels/%s: %s", file,
                program ? "from the disk cache" : "the driver refuses the cached binary");
        kvl_free(&device->allocator, binary);
    }
    kvleaf_status status = KVLEAF_OK;
    if (!program) {
        status = build_source(device, file, options, source, &program);
        binary = status == KVLEAF_OK && !key.failed ? program_binary(device, program, &size) : NULL;
        if (binary)
            kvl_disk_store(device, &key, binary, size);
        kvl_free(&device->allocator, binary);
    }
    *out = program;
    kvl_text_free(&key);
    return status;
}

static program_entry *find_entry(kvleaf_device *device, const char *name, const char *source)
{
    program_entry *entry = device->programs->first;
    while (entry && (strcmp(entry->name, name) != 0 || (source && strcmp(entry->source, source) != 0)))
        entry = entry->next;
    return entry;
}

/* Makes the entry of a program that is not in memory; takes the texts' data. */
static kvleaf_status make_entry(kvleaf_device *device, const char *file, const char *options, kvl_text *name,
                                kvl_text *source, cl_program *out)
{
    program_entry *entry = kvl_alloc(&device->allocator, 1, sizeof *entry);
    if (!entry)
        return kvl_fail_memory(sizeof *entry);
    kvleaf_status status = build_cached(device, file, options, source, &entry->program);
    if (status != KVLEAF_OK) {
        entry_destroy(device, entry);
        return status;
    }
    entry->name = name->data;
    name->data = NULL;
    if (device->kernel_dir) {
        entry->source = source->data;
        source->data = NULL;
    }
    entry->next = device->programs->first;
    device->programs->first = entry;
    *out = entry->program;
    return KVLEAF_OK;
}

kvleaf_status kvl_device_program(kvleaf_device *device, const char *file, const char *options, cl_program *out)
{
    kvl_text name = {.allocator = &device->allocator}, source = {.allocator = &device->allocator};
    size_t options_at = strlen(file) + 1;
    kvl_text_format(&name, "%s\n%s%s%s", file, options && strstr(options, "-cl-std=") ? "" : DEFAULT_STANDARD,
                    options && *options ? " " : "", options ? options : "");
    if (name.failed)
        return kvl_fail_memory(options_at);
    kvleaf_status status = KVLEAF_OK;
    kvl_mutex_lock(device->mutex);
    /* Embedded text never changes; a folder's may, and is read again each time. */
    program_entry *entry = device->kernel_dir ? NULL : find_entry(device, name.data, NULL);
    if (!entry)
        status = kvl_source_expand(device, file, &source);
    if (!entry && status == KVLEAF_OK && device->kernel_dir)
        entry = find_entry(device, name.data, source.data);
    if (entry)
        *out = entry->program;
    else if (status == KVLEAF_OK)
        status = make_entry(device, file, name.data + options_at, &name, &source, out);
    kvl_mutex_unlock(device->mutex);
    kvl_text_free(&name);
    kvl_text_free(&source);
    return status;
}
