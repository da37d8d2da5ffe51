/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_PROGRAM_H
#define KVL_PROGRAM_H

/* What the files of the device layer share. A program is made from its source text, through the memory cache and the
 * disk cache. */

#include "device/device.h"

struct kvl_programs {
    struct kvl_program_entry *first;
    struct kvl_trial_outcome *outcomes; /* of trials, by their keys */
    kvl_text identity;                  /* platform, device and driver, as the disk cache tells them apart */
};

/* What can be said against params before any OpenCL call. */
kvleaf_status kvl_device_check_params(const kvleaf_device_params *params);

/* As kvleaf_device_create, in a new context, which the device object alone holds. */
kvleaf_status kvl_device_create_apart(const kvleaf_device_params *params, cl_platform_id platform, cl_device_id id,
                                      kvleaf_device **out);

/* The device's programs, and what its trials found; destroying releases them all. */
kvleaf_status kvl_programs_create(kvleaf_device *device);
void kvl_programs_destroy(kvleaf_device *device);
void kvl_trial_outcomes_destroy(kvleaf_device *device);

/* Appends everything that goes into a build: its key in the disk cache. */
void kvl_program_key(const kvleaf_device *device, const char *file, const char *options, const kvl_text *source,
                     kvl_text *key);

/* Appends cl_kernels/<file> with every `#include "..."` expanded, each file once, and #line directives that keep the
 * compiler's messages true. Read from device->kernel_dir where that is set. INVALID: a name that leaves the folder, a
 * file that isn't there. */
kvleaf_status kvl_source_expand(const kvleaf_device *device, const char *file, kvl_text *out);

/* The name of what a key stands for: 32 hexadecimal digits. */
#define KVL_HASH_TEXT 33
void kvl_hash_text(const kvl_text *key, char text[KVL_HASH_TEXT]);

/* The binary stored under the key, checked to the last byte and released with kvl_free; false where there is none or it
 * is not exactly that. */
bool kvl_disk_load(const kvleaf_device *device, const kvl_text *key, char **binary, size_t *size);
/* Stores it, replacing what is there; a failure is one log line. */
void kvl_disk_store(const kvleaf_device *device, const kvl_text *key, const void *binary, size_t size);

/* Marks, in the disk cache's folder, that the named variant is tried on this device and driver; without such a folder,
 * or while another tries it, *out is NULL. UNSUPPORTED: an earlier trial ended its process; the message names the file
 * that says so. */
kvleaf_status kvl_trial_begin(const kvleaf_device *device, const char *name, kvl_mark **out);

/* What stands for device and driver in the keys of the disk cache. */
const kvl_text *kvl_device_identity(const kvleaf_device *device);

/* Whether a source asks for its PTX to be edited; the edit: appends the text to build instead, false where it is not
 * what the edit knows; and whether the log of that build says that the kernel's matrix products run one after the
 * other. */
bool kvl_ptx_wanted(const char *source);
bool kvl_ptx_edit(const char *ptx, kvl_text *out);
bool kvl_ptx_serialised(const char *log);

#endif
