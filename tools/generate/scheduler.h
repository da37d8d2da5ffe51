/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_SCHEDULER_H
#define GENERATE_SCHEDULER_H

/* Continuous batching over the managed cache: requests enter by priority, then in their order, as soon as places in the
 * batch and blocks for their prompt are free; prompts are computed in chunks beside the running decodes, what the
 * prefix cache holds of them not at all; the samples of a request fork from its prompt; a finished one's blocks return
 * at once. Where a running request finds no block, the last of them in that order gives its blocks up: to host memory
 * if there is room, else they are computed again later, prompt rows by the prefill family and its own tokens by the
 * decode family as before, so that its result stays the same. */

#include <stdio.h>

#include "input.h"
#include "model.h"
#include "request.h"

typedef struct scheduler_params {
    int32_t max_batch;     /* samples running at once */
    int32_t prefill_chunk; /* prompt rows a step, of all requests together */
    int32_t num_blocks, block_size;
    int64_t max_decode_keys; /* of the plan */
    bool swap;               /* the cache has host memory for swapped sequences */
    bool stream;             /* requests are taken while others run; a line a token too */
    bool progress;           /* a line on stderr now and then */
    FILE *out;
} scheduler_params;

typedef struct scheduler_totals {
    int64_t steps, prompt_rows, decode_rows, generated, preemptions, swaps, cancelled;
    int32_t requests, finished, errors, peak_blocks, peak_batch;
} scheduler_totals;

/* Reads requests and runs each to its end, writing its lines; a line that is no right request gets its error line, and
 * the others go on. Ends when the input has ended and nothing is left to do. */
bool scheduler_run(input *in, model *m, kvleaf_cache *cache, kvleaf_plan *plan, const scheduler_params *params,
                   scheduler_totals *totals, failure *error);

#endif
