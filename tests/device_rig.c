/* SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include "device_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

device_rig *device_rig_open(char *kernels, kvleaf_log_level level)
{
    device_rig *rig = calloc(1, sizeof *rig);
    assert_non_null(rig);
    shim_reset();
    rig->kernels = kernels;
    rig->cache = support_folder();
    rig->params = support_params();
    rig->params.opencl = shim_table();
    rig->params.kernel_dir = rig->kernels;
    rig->params.log = support_log;
    rig->params.log_user = &rig->lines;
    rig->params.log_level = level;
    return rig;
}

void device_rig_close(device_rig *rig)
{
    assert_int_equal(shim_balance(), 0);
    support_folder_remove(rig->cache);
    support_folder_remove(rig->kernels);
    free(rig);
}

void device_rig_write(const device_rig *rig, const char *name, const char *text)
{
    char *path = support_path(rig->kernels, name);
    support_write(path, text, strlen(text));
    free(path);
}

bool device_rig_unusable(device_rig *rig, int i)
{
    const char *const folders[] = {rig->cache, "/dev/null", "/dev/null/cache", "/proc/kvleaf-cache"};
    bool more = (size_t)i < sizeof folders / sizeof *folders;
    assert_int_equal(chmod(rig->cache, more ? 0500 : 0700), 0);
    if (more)
        rig->params.cache_dir = folders[i];
    return more;
}

pid_t device_rig_start(const device_rig *rig, const char *program, int number, const char *argument)
{
    pid_t process = fork();
    assert_true(process >= 0);
    if (process == 0) {
        char own[512];
        snprintf(own, sizeof own, "%s/pocl%d", rig->kernels, number);
        setenv("POCL_CACHE_DIR", own, 1);
        execl(program, program, rig->kernels, rig->cache, argument, (char *)NULL);
        _exit(99);
    }
    return process;
}

int device_rig_end_of(pid_t process)
{
    int status = -1;
    assert_int_equal(waitpid(process, &status, 0), process);
    return status;
}
