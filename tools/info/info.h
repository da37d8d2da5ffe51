/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_INFO_H
#define KVLEAF_TOOLS_INFO_H

#include "attention/variants.h"
#include "common/cli.h"

/* Lists platforms, their devices and what those can do; `chosen` is marked. False: an OpenCL call failed. */
bool info_list(const cli *program, cl_device_id chosen);

/* Tries every variant of every operation for the geometry, and says which one the library takes and why not the others.
 */
bool info_variants(const cli *program, kvleaf_device *device, const kvl_geometry *geometry);

#endif
