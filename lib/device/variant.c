/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing kernel variants: built for the geometry on this very device before they are offered. */
#include "device/variant.h"
#include "device/program.h"

#include <stdio.h>
#include <string.h>

void kvl_variant_key(const kvl_variant *variant, const kvl_geometry *geometry, char *key, size_t size)
{
    char window[16] = "", softcap[24] = "";
    if (variant->windows && geometry->window)
        snprintf(window, sizeof window, ".w%d", (int)geometry->window);
    if (variant->windows && geometry->softcap > 0)
        snprintf(softcap, sizeof softcap, ".cap%g", (double)geometry->softcap);
    snprintf(key, size, "%s.%s.q_%s.kv_%s.d%d.b%d%s%s", variant->family, variant->name,
             kvleaf_dtype_name(geometry->q_dtype), kvleaf_dtype_name(geometry->kv_dtype), (int)geometry->head_dim,
             (int)geometry->block_size, window, softcap);
}

static void format_options(const kvl_variant *variant, const kvl_geometry *geometry, int32_t work_group, kvl_text *out)
{
    kvl_text_format(out, "-cl-std=CL1.2 -DQ_DTYPE=%d -DKV_DTYPE=%d -DOUT_DTYPE=%d -DKV_LAYOUT=%d -DKV_PAGED=%d",
                    (int)geometry->q_dtype, (int)geometry->kv_dtype, (int)geometry->out_dtype, (int)geometry->layout,
                    geometry->block_size ? 1 : 0);
    kvl_text_format(out, " -DWORK_GROUP=%d", (int)work_group);
    if (variant->split_tokens)
        kvl_text_format(out, " -DSPLIT_TOKENS=%d", (int)variant->split_tokens);
    if (variant->longest_run)
        kvl_text_format(out, " -DLONGEST_RUN=%d", (int)variant->longest_run(geometry));
    if (variant->item_tokens)
        kvl_text_format(out, " -DITEM_TOKENS=%d", (int)variant->item_tokens);
    if (variant->tile_rows)
        kvl_text_format(out, " -DTILE_ROWS=%d", (int)variant->tile_rows);
    if (variant->fixed & KVL_FIX_HEAD_DIM)
        kvl_text_format(out, " -DHEAD_DIM=%d", (int)geometry->head_dim);
    if (variant->fixed & KVL_FIX_GROUP)
        kvl_text_format(out, " -DGROUP=%d", (int)(geometry->num_heads / geometry->num_kv_heads));
    if ((variant->fixed & KVL_FIX_BLOCK_SIZE) && geometry->block_size)
        kvl_text_format(out, " -DBLOCK_SIZE=%d", (int)geometry->block_size);
    if (variant->windows && geometry->window)
        kvl_text_format(out, " -DWINDOWED=1");
    if (variant->windows && geometry->softcap > 0) {
        uint32_t bits; /* as decimal digits it would be in the program's locale */
        memcpy(&bits, &geometry->softcap, sizeof bits);
        kvl_text_format(out, " -DSOFTCAP_BITS=0x%08xu", (unsigned)bits);
    }
    if (variant->options)
        kvl_text_format(out, " %s", variant->options);
}

/* The largest that variant and device allow, by halves: below the variant's minimum where there is none. */
static int32_t first_work_group(const kvleaf_device *device, const kvl_variant *variant)
{
    int32_t least = variant->min_work_group > 0 ? variant->min_work_group : 1;
    int32_t work_group = variant->work_group > 0 ? variant->work_group : 1;
    while (work_group >= least && (size_t)work_group > device->caps.max_work_group_size)
        work_group /= 2;
    return work_group;
}

void kvl_variant_options(const kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                         kvl_text *out)
{
    format_options(variant, geometry, first_work_group(device, variant), out);
}

/* rusticl of Mesa 22.3 reports 16000 bytes for a kernel that declares 8000. */
static bool counts_local_twice(const kvleaf_caps *caps)
{
    return strcmp(caps->platform_name, "rusticl") == 0 && strncmp(caps->driver_version, "22.", 3) == 0;
}

/* What NVIDIA reports for a kernel includes what the driver keeps beside the limit for itself. */
static cl_ulong driver_local(const kvleaf_caps *caps)
{
    return caps->nvidia_capability >= 80 ? 1024 : 0;
}

/* Lowers *allowed to the largest work-group that one kernel, built for `work_group`, allows: 0 where its local memory
 * is beyond the limit. Where that is less than it was built for, why is the last error. */
static kvleaf_status check_kernel(kvleaf_device *device, cl_program program, const kvl_variant *variant,
                                  const char *name, int32_t work_group, size_t *allowed)
{
    cl_kernel kernel;
    kvleaf_status status = kvl_device_kernel(device, program, name, &kernel);
    if (status != KVLEAF_OK)
        return status;
    size_t largest = 0;
    cl_ulong local = 0;
    const kvleaf_opencl *cl = device->cl;
    cl_int error =
        cl->GetKernelWorkGroupInfo(kernel, device->id, CL_KERNEL_WORK_GROUP_SIZE, sizeof largest, &largest, NULL);
    if (error == CL_SUCCESS)
        error = cl->GetKernelWorkGroupInfo(kernel, device->id, CL_KERNEL_LOCAL_MEM_SIZE, sizeof local, &local, NULL);
    cl->ReleaseKernel(kernel);
    if (error != CL_SUCCESS)
        return kvl_fail_opencl("clGetKernelWorkGroupInfo", error);
    if (counts_local_twice(&device->caps))
        local /= 2;
    bool local_fits = local <= device->caps.local_bytes + driver_local(&device->caps) || variant->undocumented;
    /* A program that fixes its work-group was built for it; what the driver then reports is rounded down. */
    if (variant->min_work_group == variant->work_group)
        largest = (size_t)work_group;
    if (!local_fits)
        largest = 0;
    *allowed = largest < *allowed ? largest : *allowed;
    if (!local_fits)
        kvl_fail(KVLEAF_UNSUPPORTED, "local_bytes", (int64_t)local, (int64_t)device->caps.local_bytes,
                 "%s takes %llu bytes of local memory at a work-group of %d, the limit is %llu", name,
                 (unsigned long long)local, (int)work_group, (unsigned long long)device->caps.local_bytes);
    else if (largest < (size_t)work_group)
        kvl_fail(KVLEAF_UNSUPPORTED, "work_group", work_group, (int64_t)largest,
                 "%s allows work-groups of %zu, %d are needed", name, largest, (int)work_group);
    return KVLEAF_OK;
}

static kvleaf_status build_at(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                              int32_t work_group, cl_program *program, size_t *allowed)
{
    kvl_text options = {.allocator = &device->allocator};
    format_options(variant, geometry, work_group, &options);
    kvleaf_status status = options.failed ? kvl_fail_memory(options.capacity)
                                          : kvl_device_program(device, variant->file, options.data, program);
    kvl_text_free(&options);
    *allowed = (size_t)work_group;
    for (int i = 0; status == KVLEAF_OK && i < KVL_VARIANT_KERNELS && variant->kernels[i]; i++)
        status = check_kernel(device, *program, variant, variant->kernels[i], work_group, allowed);
    return status;
}

/* At the largest work-group that the device and the kernels allow: what the kernels say of themselves is taken at their
 * word, since a build takes long on some drivers. */
static kvleaf_status build(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                           kvl_chosen *out)
{
    int32_t least = variant->min_work_group > 0 ? variant->min_work_group : 1;
    int32_t work_group = first_work_group(device, variant);
    if (work_group < least)
        return kvl_fail(KVLEAF_UNSUPPORTED, "max_work_group_size", least, (int64_t)device->caps.max_work_group_size,
                        "needs work-groups of %d, the limit is %zu", (int)least, device->caps.max_work_group_size);
    while (work_group >= least) {
        cl_program program = NULL;
        size_t allowed;
        kvleaf_status status = build_at(device, variant, geometry, work_group, &program, &allowed);
        if (status != KVLEAF_OK)
            return status;
        if (allowed >= (size_t)work_group) {
            out->variant = variant;
            out->program = program;
            out->work_group = work_group;
            return KVLEAF_OK;
        }
        do
            work_group /= 2;
        while (allowed > 0 && (size_t)work_group > allowed);
    }
    return KVLEAF_UNSUPPORTED;
}

kvleaf_status kvl_variant_try(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry,
                              kvl_chosen *out)
{
    const char *reason = variant->refuses ? variant->refuses(&device->caps, geometry) : NULL;
    if (!reason && variant->undocumented && device->deny_undocumented)
        reason = "relies on undocumented driver behaviour, which the device params deny";
    if (reason)
        return kvl_fail(KVLEAF_UNSUPPORTED, "variant", 0, 0, "%s", reason);
    kvl_variant_key(variant, geometry, out->key, sizeof out->key);
    kvleaf_status status = variant->undocumented ? kvl_trial_pass(device, variant, geometry) : KVLEAF_OK;
    return status ? status : build(device, variant, geometry, out);
}

/* Whether one of the comma-separated globs matches the key, or the "family.name" that it begins with. */
static bool is_named(const char *globs, const kvl_variant *variant, const kvl_geometry *geometry)
{
    char key[128], name[128], glob[128];
    kvl_variant_key(variant, geometry, key, sizeof key);
    snprintf(name, sizeof name, "%s.%s", variant->family, variant->name);
    for (const char *at = globs; *at;) {
        at += strspn(at, ", ");
        size_t length = strcspn(at, ", ");
        if (length > 0 && length < sizeof glob) {
            memcpy(glob, at, length);
            glob[length] = 0;
            if (kvl_glob(glob, key) || kvl_glob(glob, name))
                return true;
        }
        at += length;
    }
    return false;
}

/* From the last to the first; `forced` = only those that the globs name. OK, NO_MEMORY, or UNSUPPORTED with the reasons
 * appended. */
static kvleaf_status choose_among(kvleaf_device *device, const kvl_variant *table, int count,
                                  const kvl_geometry *geometry, bool forced, kvl_text *reasons, kvl_chosen *out)
{
    for (int i = count - 1; i >= 0; i--) {
        bool named = device->variants && is_named(device->variants, &table[i], geometry);
        if (named != forced)
            continue;
        kvleaf_status status = kvl_variant_try(device, &table[i], geometry, out);
        if (status == KVLEAF_OK || status == KVLEAF_NO_MEMORY)
            return status;
        kvl_text_format(reasons, "%s%s: %s", reasons->size ? "; " : "", table[i].name, kvleaf_last_error()->message);
        kvl_log(&device->logger, KVLEAF_LOG_DEBUG, "%s.%s is passed over: %s", table[i].family, table[i].name,
                kvleaf_last_error()->message);
    }
    return KVLEAF_UNSUPPORTED;
}

kvleaf_status kvl_variant_choose(kvleaf_device *device, const kvl_variant *table, int count,
                                 const kvl_geometry *geometry, kvl_chosen *out)
{
    kvl_text reasons = {.allocator = &device->allocator};
    kvl_error_state *before = kvl_error_save(&device->allocator);
    if (!before)
        return kvl_fail_memory(0);
    kvleaf_status status = KVLEAF_UNSUPPORTED;
    if (device->variants)
        status = choose_among(device, table, count, geometry, true, &reasons, out);
    if (status == KVLEAF_UNSUPPORTED)
        status = choose_among(device, table, count, geometry, false, &reasons, out);
    if (status == KVLEAF_OK) {
        kvl_error_restore(&device->allocator, before); /* what was passed over is no failure */
        kvl_log(&device->logger, KVLEAF_LOG_INFO, "%s: %s, work-group %d", out->variant->family, out->key,
                (int)out->work_group);
    } else {
        kvl_free(&device->allocator, before);
    }
    if (status == KVLEAF_UNSUPPORTED) {
        char key[128] = "";
        if (count > 0)
            kvl_variant_key(&table[0], geometry, key, sizeof key);
        status = kvl_fail(KVLEAF_UNSUPPORTED, "variant", 0, count, "no variant serves %s (%s)", key,
                          reasons.data ? reasons.data : "there are none");
    }
    kvl_text_free(&reasons);
    return status;
}
