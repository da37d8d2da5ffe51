/* SPDX-License-Identifier: Apache-2.0 */
#include "fail.h"

#include <kvleaf/status.h>
#include <stdarg.h>
#include <stdio.h>

bool fail(failure *out, const char *status, const char *format, ...)
{
    va_list arguments;

    out->status = status;
    va_start(arguments, format);
    vsnprintf(out->message, sizeof out->message, format, arguments);
    va_end(arguments);
    return false;
}

bool fail_opencl(failure *out, const char *call, int cl_error)
{
    return fail(out, "KVLEAF_DEVICE", "%s failed with OpenCL error %d", call, cl_error);
}

bool fail_kvleaf(failure *out, const char *call)
{
    const kvleaf_error *error = kvleaf_last_error();

    return fail(out, kvleaf_status_name(error->status), "%s: %s", call, error->message);
}
