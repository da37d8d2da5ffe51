/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_DEVICE_RIG_H
#define KVL_DEVICE_RIG_H

/* What tests of the device layer start from: params with the OpenCL table that counts, a folder of kernels and the log;
 * and a folder for the disk cache, which a test names in the params where it wants one. */

#include "shim.h"
#include "support.h"

#include <sys/types.h>

typedef struct device_rig {
    char *kernels, *cache;
    support_lines lines;
    support_memory memory; /* for a test that counts allocations */
    kvleaf_device_params params;
} device_rig;

/* Takes the folder of kernels. Closing also checks that no OpenCL object is left. */
device_rig *device_rig_open(char *kernels, kvleaf_log_level level);
void device_rig_close(device_rig *rig);

/* Writes a source into the folder of kernels. */
void device_rig_write(const device_rig *rig, const char *name, const char *text);

/* Makes the params' cache_dir number i of some folders that can't be used; false behind the last. The first is the
 * rig's, without the right to write, which root has all the same: a file and what can't be made stand in as well. */
bool device_rig_unusable(device_rig *rig, int i);

/* Starts the program itself once more with the rig's folders and `argument`, as process `number`, whose driver has a
 * cache of its own; and how it ended, as waitpid says. */
pid_t device_rig_start(const device_rig *rig, const char *program, int number, const char *argument);
int device_rig_end_of(pid_t process);

#endif
