/* SPDX-License-Identifier: Apache-2.0 */
/* NVIDIA's OpenCL compiler gives PTX for sm_90 and refuses what only sm_90a has, and local memory beyond 48 KiB; its
 * assembler takes both. A kernel that wants them carries them as comments of inline assembly, which come out in the PTX
 * with their operands filled in:
 *     //KVL <instruction>      becomes the instruction
 *     //KVL-LOCAL <bytes>      becomes the size of the kernel's local array, declared with PLACEHOLDER bytes
 * and the target becomes sm_90a. No document promises any of it, so it is tried on the device and has a fallback. */
#include "device/program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARKER       "//KVL "
#define LOCAL_MARKER "//KVL-LOCAL "
#define PLACEHOLDER  "[48000]"
#define TARGET       ".target sm_90"
#define WORK_GROUP   ".reqntid "
#define SERIALISED   "instructions are serialized" /* C7510 and on, by the reason */

bool kvl_ptx_wanted(const char *source)
{
    return strstr(source, LOCAL_MARKER) != NULL;
}

bool kvl_ptx_serialised(const char *log)
{
    return strstr(log, SERIALISED) != NULL;
}

/* If `at` begins with `text`, appends `instead` and steps over it. */
static bool replace(const char **at, const char *text, const char *instead, kvl_text *out)
{
    size_t length = strlen(text);
    if (strncmp(*at, text, length) != 0)
        return false;
    kvl_text_append(out, instead, strlen(instead));
    *at += length;
    return true;
}

bool kvl_ptx_edit(const char *ptx, kvl_text *out)
{
    const char *marker = strstr(ptx, LOCAL_MARKER);
    long bytes = marker ? strtol(marker + strlen(LOCAL_MARKER), NULL, 0) : 0;
    if (bytes <= 0)
        return false;
    char size[32];
    snprintf(size, sizeof size, "[%ld]", bytes);
    bool placed = false, targeted = false;
    for (const char *at = ptx; *at;) {
        if (strncmp(at, TARGET, strlen(TARGET)) == 0 && at[strlen(TARGET)] != 'a') {
            targeted = replace(&at, TARGET, TARGET "a", out);
        } else if (strncmp(at, WORK_GROUP, strlen(WORK_GROUP)) == 0) {
            size_t line = strcspn(at, "\n");
            kvl_text_append(out, at, line);
            kvl_text_append(out, "\n.minnctapersm 1", strlen("\n.minnctapersm 1"));
            at += line;
        } else if (replace(&at, MARKER, "", out)) {
            continue;
        } else if (replace(&at, PLACEHOLDER, size, out)) {
            placed = true;
        } else {
            size_t plain = 1 + strcspn(at + 1, "/.[");
            kvl_text_append(out, at, plain);
            at += plain;
        }
    }
    return placed && targeted && !out->failed;
}
