/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_PROGRAM_H
#define KVL_PROGRAM_H

/* What the files of the device layer share. A program is made from its source text, through the memory cache and the
 * disk cache. */

#include "device/device.h"

/* What can be said against params before any OpenCL call. */
kvleaf_status kvl_device_check_params(const kvleaf_device_params *params);

/* The device's programs; destroying releases them all. */
kvleaf_status kvl_programs_create(kvleaf_device *device);
void kvl_programs_destroy(kvleaf_device *device);

/* Appends cl_kernels/<file> with every `#include "..."` expanded, each file once, and #line directives that keep the
 * compiler's messages true. Read from device->kernel_dir where that is set. INVALID: a name that leaves the folder, a
 * file that isn't there. */
kvleaf_status kvl_source_expand(const kvleaf_device *device, const char *file, kvl_text *out);

/* The binary stored under the key, checked to the last byte and released with kvl_free; false where there is none or it
 * is not exactly that. */
bool kvl_disk_load(const kvleaf_device *device, const kvl_text *key, char **binary, size_t *size);
/* Stores it, replacing what is there; a failure is one log line. */
void kvl_disk_store(const kvleaf_device *device, const kvl_text *key, const void *binary, size_t size);

/* Marks, in the disk cache's folder, that the named variant is tried on this device and driver; without such a folder
 * *out is NULL. UNSUPPORTED: an earlier trial ended its process; the message names the file that says so. */
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
