/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_BENCH_H
#define KVLEAF_TOOLS_BENCH_H

/* kvleaf-bench: decode, prefill and append beside what the device itself can do, measured in the same run; and what the
 * host pays for blocks, the prefix cache and the plan of a step. */

#include <kvleaf/attention.h>

#include "common/cli.h"

typedef enum bench_kind {
    BENCH_DECODE,
    BENCH_PREFILL,
    BENCH_APPEND,
    BENCH_BLOCKS,
    BENCH_STEP,
    BENCH_PREFIX,
    BENCH_SERVING
} bench_kind;

typedef struct bench_config {
    bench_kind kind;
    int batch;
    int context;   /* keys of a sequence, those of its query rows included; their mean where ragged */
    bool ragged;   /* decode, prefill: log-normal lengths */
    bool in_order; /* the block tables are 0 .. n-1, as of a pool that was never used before */
    int q_len;
    int layers;        /* step: 0 = 2 on a CPU, 8 elsewhere */
    int shared_prefix; /* decode: leading tokens that all sequences have in the same blocks */
    kvleaf_sharing sharing;
    cli_shape shape;
    int layout; /* kvleaf_layout */
    uint64_t seed;
    int runs;    /* 0 = by the time one takes */
    int rest_ms; /* before each run */
} bench_config;

/* What every measurement runs on. */
typedef struct bench_rig {
    cli *program;
    kvleaf_device *device;
    kvleaf_caps caps;
    cl_command_queue queue;
    cl_program kernels; /* ceilings and fill */
    bool gpu;
} bench_rig;

/* The device's own limits. GB/s count bytes read, for the copy bytes read and written; 0 = not measured. */
typedef struct bench_ceilings {
    double read_gb_per_s, table_read_gb_per_s, copy_gb_per_s, fma_gflop_per_s;
} bench_ceilings;

/* A block table over a layer of a pool, for the read through it. */
typedef struct bench_blocks {
    cl_mem memory, table;
    int64_t entries;
    int64_t block_bytes;
} bench_blocks;

typedef struct bench_result {
    const char *variant;
    const char *layout;
    double median_us, best_us;
    int runs;
    double bytes, flops; /* of one launch: what must be read (append: read and written), or computed */
    double error, tolerance;
    bench_ceilings ceilings;
} bench_result;

/* Builds the tool's own kernels. CLI_OK or CLI_FAILED, said on stderr. */
int bench_kernels(bench_rig *rig);
/* Measures what the kind of bench is compared with. */
int bench_measure_ceilings(const bench_rig *rig, bench_kind kind, const bench_blocks *blocks, bench_ceilings *out);
/* Fills `elements` elements with uniform values of the size. */
cl_int bench_fill(const bench_rig *rig, cl_mem buffer, kvleaf_dtype dtype, uint64_t elements, uint32_t seed,
                  float size);
/* The same of keys and values as models have them, so that attention weighs many keys: `side` elements of keys, as many
 * of values, and so on. */
cl_int bench_fill_kv(const bench_rig *rig, cl_mem buffer, kvleaf_dtype dtype, uint64_t elements, uint32_t seed,
                     uint64_t side);
double bench_seconds(void);

/* Runs one configuration: builds it, checks it, times it. */
int bench_run(const bench_rig *rig, const bench_config *config, bench_result *result);

/* A decode step through the managed cache. */
int bench_step_run(const bench_rig *rig, const bench_config *config);

/* What the host pays. `blocks` needs the device, for the plan of a step; `prefix` needs none. */
int bench_blocks_run(const bench_rig *rig, const bench_config *config);
int bench_prefix_run(const bench_rig *rig, const bench_config *config);

#endif
