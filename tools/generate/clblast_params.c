/* SPDX-License-Identifier: Apache-2.0 */
#include "compute.h"

#include <cjson/cJSON.h>
#include <clblast_c.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMETERS = 32, MAX_FILE_BYTES = 1 << 20 };

/* Measured on PoCL 3.1 with two cores, AVX2 and AVX-512, where CLBlast 1.5.3 has no tuning of its own. A tile is MWG
 * rows by NWG outputs, one work-item. Rows are few, so they get the small side; and as work-groups go over the rows
 * first, a tile's weights are still in cache for the next rows. NWG 16: a cache line of weights at a time. VWM 8: PoCL
 * prefers 256-bit registers. KWI 8: eight lines on their way at once, which lie a row of weights apart. */
static const char *const xgemm_names[] = {"GEMMK", "KREG", "KWG", "KWI", "MDIMA", "MDIMC", "MWG", "NDIMB",
                                          "NDIMC", "NWG",  "SA",  "SB",  "STRM",  "STRN",  "VWM", "VWN"};
static const size_t xgemm_pocl_cpu[] = {0, 1, 32, 8, 1, 1, ROW_PAD, 1, 1, 16, 0, 0, 0, 0, 8, 8};
/* The activations' way in and out: tiles of one product's few rows, not of 16 or more: 3% of a step in place of 12%. */
static const char *const transpose_names[] = {"TRA_DIM", "TRA_PAD", "TRA_SHUFFLE", "TRA_WPT"};
static const size_t transpose_pocl_cpu[] = {ROW_PAD, 0, 0, 1};
static const char *const pad_transpose_names[] = {"PADTRA_PAD", "PADTRA_TILE", "PADTRA_WPT"};
static const size_t pad_transpose_pocl_cpu[] = {0, ROW_PAD, 1};

static bool set_parameters(cl_device_id device, const char *kernel, const char *const *names, const size_t *values,
                           size_t count, failure *error)
{
    const char *copies[MAX_PARAMETERS];

    for (size_t i = 0; i < count; i++)
        copies[i] = names[i];
    CLBlastStatusCode status = CLBlastOverrideParameters(device, kernel, CLBlastPrecisionSingle, count, copies, values);
    if (status != CLBlastSuccess)
        return fail(error, "KVLEAF_INVALID", "CLBlast refuses the parameters of kernel %s with status %d%s", kernel,
                    (int)status,
                    status == CLBlastMissingOverrideParameter ? " (one is missing)"
                    : status == CLBlastDatabaseError          ? " (no such kernel)"
                                                              : "");
    return true;
}

static bool read_text(const char *path, char **out, failure *error)
{
    FILE *file = fopen(path, "rb");

    *out = NULL;
    if (file == NULL)
        return fail(error, "KVLEAF_INVALID", "%s: %s", path, strerror(errno));
    char *text = malloc(MAX_FILE_BYTES + 1);
    size_t size = text == NULL ? 0 : fread(text, 1, MAX_FILE_BYTES + 1, file);
    fclose(file);
    if (text == NULL || size > MAX_FILE_BYTES) {
        free(text);
        return fail(error, "KVLEAF_INVALID", "%s: over the limit of %d bytes", path, (int)MAX_FILE_BYTES);
    }
    text[size] = '\0';
    *out = text;
    return true;
}

static bool set_kernel(cl_device_id device, const cJSON *kernel, const char *path, failure *error)
{
    const char *names[MAX_PARAMETERS];
    size_t values[MAX_PARAMETERS], count = 0;
    const cJSON *item;

    if (!cJSON_IsObject(kernel))
        return fail(error, "KVLEAF_INVALID", "%s: %s is no object of parameters", path, kernel->string);
    cJSON_ArrayForEach(item, kernel)
    {
        if (count == MAX_PARAMETERS)
            return fail(error, "KVLEAF_INVALID", "%s: %s has more than %d parameters", path, kernel->string,
                        (int)MAX_PARAMETERS);
        if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > 1e9 ||
            item->valuedouble != floor(item->valuedouble))
            return fail(error, "KVLEAF_INVALID", "%s: %s: %s is no whole number in 0 .. 1e9", path, kernel->string,
                        item->string);
        names[count] = item->string;
        values[count++] = (size_t)item->valuedouble;
    }
    failure inner;
    if (!set_parameters(device, kernel->string, names, values, count, &inner))
        return fail(error, inner.status, "%s: %s", path, inner.message);
    return true;
}

/* {"Xgemm": {"MWG": 64, ...}, "Copy": {...}}: kernels and parameters by CLBlast's names. */
static bool set_from_file(cl_device_id device, const char *path, failure *error)
{
    char *text;
    const cJSON *kernel;
    bool right = true;

    if (!read_text(path, &text, error))
        return false;
    cJSON *root = cJSON_Parse(text);
    free(text);
    if (!cJSON_IsObject(root)) {
        cJSON_Delete(root);
        return fail(error, "KVLEAF_INVALID", "%s: no JSON object", path);
    }
    cJSON_ArrayForEach(kernel, root) right = right && set_kernel(device, kernel, path, error);
    cJSON_Delete(root);
    return right;
}

bool clblast_configure(cl_device_id device, bool pocl_cpu, const char *params, failure *error)
{
    /* One kernel for all sizes: CLBlast's other one sums in another order, so that a row's result
     * would depend on how many rows it shares the product with. */
    static const char *const routine_names[] = {"XGEMM_MIN_INDIRECT_SIZE"};
    static const size_t always_indirect[] = {1};

    if (!set_parameters(device, "GemmRoutine", routine_names, always_indirect, 1, error))
        return false;
    if (params != NULL)
        return set_from_file(device, params, error);
    return !pocl_cpu || (set_parameters(device, "Xgemm", xgemm_names, xgemm_pocl_cpu,
                                        sizeof xgemm_pocl_cpu / sizeof(size_t), error) &&
                         set_parameters(device, "Transpose", transpose_names, transpose_pocl_cpu,
                                        sizeof transpose_pocl_cpu / sizeof(size_t), error) &&
                         set_parameters(device, "Padtranspose", pad_transpose_names, pad_transpose_pocl_cpu,
                                        sizeof pad_transpose_pocl_cpu / sizeof(size_t), error));
}
