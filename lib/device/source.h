/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SOURCE_H
#define KVL_SOURCE_H

#include <stddef.h>

/* A kernel source file as embedded at build time; `name` is its path below cl_kernels/. */
typedef struct kvl_source {
    const char *name;
    const char *text; /* NUL-terminated */
    size_t size;
} kvl_source;

extern const kvl_source kvl_sources[];
extern const int kvl_source_count;

#endif
