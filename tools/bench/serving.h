/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_BENCH_SERVING_H
#define KVLEAF_TOOLS_BENCH_SERVING_H

/* kvleaf-bench serving: the experiment of Kwon et al. (SOSP 2023, section 6) on this library. A stream of requests runs
 * through one memory budget three times, with the same kernels and the same scheduler: paged; with the blocks of the
 * longest possible request taken at admission; with those of the true length, known in advance. Then requests of
 * several samples or beams run with and without sharing. */

#include <kvleaf/cache.h>

#include "bench/bench.h"

typedef struct serving_options {
    const char *model;   /* folder of a real model, or NULL = attention alone, of `shape` and `layers` */
    const char *lengths; /* file of "prompt output" lines, or NULL = drawn */
    int requests;        /* 0 = by the device */
    int max_length;      /* tokens a request may have, and what is reserved */
    int blocks;          /* 0 = by the device */
    int layers;          /* 0 = by the device */
    int chunk;           /* prompt rows a step */
    bool no_sharing;     /* only paged against reserved */
    cli_shape shape;
    uint64_t seed;
} serving_options;

typedef struct serving_length {
    int prompt, output;
} serving_length;

/* What computes a step: attention alone, or a model. */
typedef struct serving_compute serving_compute;

/* Rows of a step as the plan has them; the tokens don't matter. */
typedef struct serving_step {
    kvleaf_plan *plan;
    int rows, num_logits;
    const int32_t *positions;  /* [rows] */
    const int32_t *logit_rows; /* [num_logits] */
} serving_step;

/* serving_compute.c. CLI_OK or CLI_FAILED, said on stderr. */
int serving_compute_create(const bench_rig *rig, const serving_options *options, int max_rows, int max_logits,
                           serving_compute **out);
void serving_compute_destroy(serving_compute *compute);
/* The cache that fits it, with its pool. */
int serving_compute_cache(const serving_compute *compute, int max_sequences, kvleaf_pool **pool, kvleaf_cache **cache);
/* Runs a step whose plan is built, and waits for it. */
int serving_compute_run(serving_compute *compute, const serving_step *step);

/* serving_lengths.c: the lengths of all requests, in lengths[count]. Drawn: log-normal, with the means that Kwon et al.
 * give for chats (161 prompt and 338 output tokens) and a deviation of the logarithms of 1.0 and 0.9, cut to
 * max_length / 2 each. From a file: its lines, over and over. */
int serving_lengths(const serving_options *options, serving_length *lengths, int count);

/* How a run takes blocks, and what a request is. */
typedef enum serving_policy { SERVING_PAGED, SERVING_RESERVED, SERVING_KNOWN } serving_policy;

typedef struct serving_case {
    serving_policy policy;
    int max_batch; /* sequences at once */
    int samples;   /* continuations of a request */
    bool beam;     /* rearranged at every step, as beam search does */
    bool separate; /* without sharing */
} serving_case;

typedef struct serving_outcome {
    double waste;     /* of the slots of used blocks, those without a computed token; mean over the steps */
    double sequences; /* running at once, mean over the steps in which requests wait */
    int peak_sequences;
    double tokens_per_second; /* generated */
    double p50_ms, p99_ms;    /* time between two tokens of a sequence */
    double saved;             /* of the blocks that the tables name, those that sharing saves; mean over the steps */
    int64_t steps, generated;
} serving_outcome;

/* serving_run.c: one run over all requests. */
int serving_run(const bench_rig *rig, serving_compute *compute, const serving_options *options,
                const serving_length *lengths, const serving_case *run, serving_outcome *out);

/* serving.c: the whole experiment. */
int bench_serving(bench_rig *rig, const serving_options *options);

#endif
