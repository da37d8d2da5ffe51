/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_FAIL_H
#define GENERATE_FAIL_H

#include <stdbool.h>
#include <stddef.h>

/* One sentence about what went wrong; functions that can fail return false and leave it here. */
typedef struct failure {
    const char *status; /* a name of kvleaf_status, such as "KVLEAF_INVALID" */
    char message[768];
} failure;

/* Each fills *out and returns false, so that a check reads `return fail(...)`. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
bool fail(failure *out, const char *status, const char *format, ...);
bool fail_opencl(failure *out, const char *call, int cl_error);
/* From kvleaf_last_error(). */
bool fail_kvleaf(failure *out, const char *call);

#endif
