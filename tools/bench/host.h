/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_BENCH_HOST_H
#define KVLEAF_TOOLS_BENCH_HOST_H

/* What the benches of the host's own work share: a batch of prompts, times, rows. */

#include "bench/bench.h"

#include <kvleaf/cache.h>

enum { HOST_MAX_RUNS = 1000, HOST_WARM_RUNS = 5 };
enum { HOST_LEAST_STEPS = 6 }; /* of `kvleaf-bench step`, whatever --runs says */

/* The times of one thing, in seconds a run. */
typedef struct host_times {
    double seconds[HOST_MAX_RUNS];
    int count;
} host_times;

/* A batch of sequences and what they are extended by. */
typedef struct host_batch {
    const bench_rig *rig;
    const bench_config *config;
    int runs;
    kvleaf_seq *seqs;   /* [batch] */
    int32_t *num_q;     /* [batch] */
    int32_t *ids;       /* [batch][context] */
    int32_t *order;     /* [num_blocks], shuffled: what a pool looks like that has been in use */
    int32_t num_blocks; /* more than twice what the batch needs */
} host_batch;

typedef struct host_figure {
    const char *name;
    double value;
} host_figure;

void host_add_time(host_times *to, double seconds);
/* Sorts them. */
double host_median(host_times *of);

/* A manager of the batch's blocks. */
kvleaf_status host_manager(const host_batch *work, bool prefix_cache, kvleaf_blocks **out);
kvleaf_status host_create_all(const host_batch *work, kvleaf_blocks *blocks);
/* Extends every sequence by its prompt, with ids or without. */
kvleaf_status host_extend_all(const host_batch *work, kvleaf_blocks *blocks, bool ids);
kvleaf_status host_destroy_all(const host_batch *work, kvleaf_blocks *blocks);

/* Prints a row; `device` and `variant` as every row has them, median and best of `what`, which is sorted. */
void host_print(const host_batch *work, const char *bench, const char *device, const char *variant,
                const host_times *what, const host_figure *figures, int count);

/* Runs a bench on the batch that was asked for, or on its usual one. */
int host_run(const bench_rig *rig, const bench_config *config, int batch, int context,
             int (*bench)(const host_batch *work));

#endif
