/* SPDX-License-Identifier: Apache-2.0 */
/* Trials of variants that rely on what no document promises. Such a one is built and launched in a context of its own
 * before the application's context meets it: what a driver then refuses or computes wrongly costs that context only. A
 * fault on the device may cost more: after an illegal access NVIDIA's driver refuses the process every further context.
 *
 * So a mark stands in the disk cache's folder meanwhile. It stays where the trial ended the process or failed on the
 * device, and later starts pass the variant over. A trial that passed is recorded there, and neither marked nor run
 * again for the same program, device and driver. */
#include "device/program.h"
#include "device/variant.h"

#include <stdio.h>
#include <string.h>

#define RECORD "passed"

enum { VERSION = 1, /* of what a trial looks at: raised, it is run again everywhere */ REASON_SIZE = 512 };

/* What a trial found, as long as the device object lives. */
typedef struct kvl_trial_outcome {
    struct kvl_trial_outcome *next;
    char name[KVL_HASH_TEXT]; /* of its key */
    char reason[REASON_SIZE]; /* why it failed; "" = it passed */
} outcome;

void kvl_trial_outcomes_destroy(kvleaf_device *device)
{
    for (outcome *at = device->programs->outcomes, *next; at; at = next) {
        next = at->next;
        kvl_free(&device->allocator, at);
    }
    device->programs->outcomes = NULL;
}

static kvleaf_status remember(kvleaf_device *device, const char *name, const char *reason)
{
    outcome *found = kvl_alloc(&device->allocator, 1, sizeof *found);
    if (!found)
        return kvl_fail_memory(sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", name);
    snprintf(found->reason, sizeof found->reason, "%s", reason);
    kvl_mutex_lock(device->mutex);
    found->next = device->programs->outcomes;
    device->programs->outcomes = found;
    kvl_mutex_unlock(device->mutex);
    return KVLEAF_OK;
}

/* Outcomes are added and stay: one that was found may be read without the lock. */
static const outcome *recall(kvleaf_device *device, const char *name)
{
    kvl_mutex_lock(device->mutex);
    const outcome *at = device->programs->outcomes;
    kvl_mutex_unlock(device->mutex);
    while (at && strcmp(at->name, name) != 0)
        at = at->next;
    return at;
}

/* Everything that the outcome depends on. */
static kvleaf_status make_key(const kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                              kvl_text *key)
{
    kvl_text source = {.allocator = &device->allocator}, options = {.allocator = &device->allocator};
    kvl_variant_options(device, variant, geometry, &options);
    kvleaf_status status = kvl_source_expand(device, variant->file, &source);
    if (!status && !options.failed) {
        kvl_text_format(key, "trial: %d %s.%s\n", VERSION, variant->family, variant->name);
        kvl_program_key(device, variant->file, options.data, &source, key);
    }
    if (!status && (options.failed || key->failed))
        status = kvl_fail_memory(key->capacity);
    kvl_text_free(&source);
    kvl_text_free(&options);
    return status;
}

/* A device object like this one in a context of its own, which takes no other variant of the family. */
static kvleaf_status open_apart(const kvleaf_device *device, const kvl_variant *variant, kvleaf_device **out)
{
    cl_platform_id platform = NULL;
    char name[128];
    snprintf(name, sizeof name, "%s.%s", variant->family, variant->name);
    const kvl_logger *logger = &device->logger;
    const kvleaf_device_params params = {
        .struct_size = sizeof params,
        .kernel_dir = device->kernel_dir,
        .cache_dir = device->cache_dir,
        .variants = name,
        .opencl = device->cl,
        .allocator = device->allocator,
        .log = logger->log,
        .log_user = logger->user,
        /* What it opens and chooses is no choice of the application's. */
        .log_level = logger->level == KVLEAF_LOG_INFO ? KVLEAF_LOG_WARNING : logger->level,
        .max_work_group_size = (uint32_t)device->caps.max_work_group_size,
        .max_local_bytes = device->caps.local_bytes,
        .max_alloc_bytes = device->caps.max_alloc_bytes,
    };
    cl_int error = device->cl->GetDeviceInfo(device->id, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL);
    return error ? kvl_fail_opencl("clGetDeviceInfo", error)
                 : kvl_device_create_apart(&params, platform, device->id, out);
}

/* Builds and launches it. The other device object knows it as passed, so that it is built there without a trial. */
static kvleaf_status run_apart(const kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                               const char *name, bool *launched)
{
    kvleaf_device *apart = NULL;
    kvl_chosen chosen;
    kvleaf_status status = open_apart(device, variant, &apart);
    if (!status)
        status = remember(apart, name, "");
    if (!status)
        status = kvl_variant_try(apart, variant, geometry, &chosen);
    *launched = !status && variant->trial;
    if (*launched)
        status = variant->trial(apart, variant, geometry);
    kvleaf_device_destroy(&apart);
    return status;
}

/* For the reason in the last error, which is kept: it is found out and told once for a device object. What says nothing
 * of the variant is answered as it is. */
static kvleaf_status pass_over(kvleaf_device *device, const char *key, const char *name, const char *stage,
                               kvleaf_status status)
{
    const kvleaf_error *error = kvleaf_last_error();
    char reason[REASON_SIZE];
    if (status == KVLEAF_NO_MEMORY && !error->cl_error)
        return status;
    snprintf(reason, sizeof reason, "%s%s", stage, error->message);
    kvl_log(&device->logger, KVLEAF_LOG_WARNING, "%s is passed over: %s", key, reason);
    status = remember(device, name, reason);
    return status ? status : kvl_fail(KVLEAF_UNSUPPORTED, "variant", 0, 0, "%s", reason);
}

/* *faulted: the device failed at it. */
static kvleaf_status run(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                         const char *key, const char *name, bool *faulted)
{
    bool launched = false;
    uint64_t begin = kvl_clock_ms();
    kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "%s is tried in a context of its own", key);
    kvleaf_status status = run_apart(device, variant, geometry, name, &launched);
    *faulted = launched && status == KVLEAF_DEVICE;
    if (status)
        return pass_over(device, key, name, launched ? "trial launch: " : "trial: ", status);
    kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "%s passed its trial, in %llu ms", key,
            (unsigned long long)(kvl_clock_ms() - begin));
    return remember(device, name, "");
}

static kvleaf_status run_marked(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                                const kvl_text *program, const char *name)
{
    char key[128];
    kvl_mark *mark;
    kvl_variant_key(variant, geometry, key, sizeof key);
    kvleaf_status status = kvl_trial_begin(device, key, &mark);
    if (status)
        return pass_over(device, key, name, "", status);
    bool faulted = false;
    status = run(device, variant, geometry, key, name, &faulted);
    if (!status && device->cache_dir)
        kvl_disk_store(device, program, RECORD, strlen(RECORD));
    if (faulted && mark)
        kvl_log(&device->logger, KVLEAF_LOG_WARNING,
                "%s failed on the device, which the driver may refuse this process from now on; later starts pass it "
                "over as long as there is the file %s",
                key, kvl_mark_path(mark));
    kvl_mark_end(mark, faulted);
    return status;
}

static bool is_recorded(const kvleaf_device *device, const kvl_text *key)
{
    char *record = NULL;
    size_t size = 0;
    bool found = device->cache_dir && kvl_disk_load(device, key, &record, &size);
    kvl_free(&device->allocator, record);
    return found;
}

kvleaf_status kvl_trial_pass(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry)
{
    kvl_text key = {.allocator = &device->allocator};
    char name[KVL_HASH_TEXT] = "";
    kvleaf_status status = make_key(device, variant, geometry, &key);
    if (!status)
        kvl_hash_text(&key, name);
    const outcome *known = status ? NULL : recall(device, name);
    if (known && *known->reason)
        status = kvl_fail(KVLEAF_UNSUPPORTED, "variant", 0, 0, "%s", known->reason);
    else if (!known && !status)
        status =
            is_recorded(device, &key) ? remember(device, name, "") : run_marked(device, variant, geometry, &key, name);
    kvl_text_free(&key);
    return status;
}
