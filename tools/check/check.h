/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_CHECK_H
#define KVLEAF_TOOLS_CHECK_H

/* kvleaf-check: every variant of a device against the float64 reference. A pass forces the variants of one name in
 * every operation that has one ("portable", "cpu"), so that one attention object serves all of its cases of a shape. */

#include "attention/attention.h"
#include "attention/variants.h"
#include "device/device.h"
#include "problem.h"

enum {
    CHECK_COUNT = 8,     /* shapes a variant in the fixed list */
    CHECK_MAX_SEQS = 16, /* sequences of a batch */
    CHECK_MAX_TOKENS = 640,
    CHECK_MAX_CONTEXT = 4096
};

typedef struct check_options {
    const char *variant; /* glob, or NULL */
    uint64_t seed;
    int count; /* shapes a variant; 0 = the fixed list, or all of the product */
    int only;  /* index of the one shape to run, or -1 */
    bool all, small;
} check_options;

typedef struct check_pass {
    const char *name;
    const kvl_variant *variants[KVL_OPERATIONS]; /* NULL: the operation has none of the name, or was not asked for */
    unsigned fixed;                              /* KVL_FIX_... of all of them */
} check_pass;

typedef struct check_shape {
    int index; /* in the pass's list */
    problem_geometry geometry;
    uint64_t seed; /* of lengths, values and places */
} check_shape;

kvl_geometry check_geometry(const problem_geometry *geometry);

/* Whether some operation of the pass serves the shape on the device. */
bool check_serves(const check_pass *pass, const kvleaf_caps *caps, const problem_geometry *geometry);

/* The shapes of a pass, those of one program next to each other; released with free. NULL: out of memory. */
check_shape *check_shapes(const check_options *options, const check_pass *pass, const kvleaf_caps *caps, int *count);

/* What a case runs on. */
typedef struct check_rig {
    kvleaf_device *device;
    cl_command_queue queue;
    kvleaf_attention *attention;
    const check_shape *shape;
    const kvl_variant *variant;
    bool small;
} check_rig;

/* Keys of the longest row, where a decode variant's runs come in parts: two runs if that is little work, else some
 * parts of one. 0 where they don't. */
int32_t check_long_row(const kvl_variant *decode, const problem_geometry *geometry);

/* Runs the cases of one operation on a shape. The report holds the worst error of all of them; where one fails, `batch`
 * describes it. */
typedef struct check_result {
    problem_report report;
    char batch[1024];
} check_result;

void check_run(const check_rig *rig, kvl_operation operation, check_result *result);

/* "q f16, K/V bf16, out f32, nhd, 8/2 heads of 64, block size 16 ..." */
void check_describe(const problem_geometry *geometry, char *text, size_t size);

#endif
