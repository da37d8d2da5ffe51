/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_SCHEDULER_H
#define GENERATE_SCHEDULER_H

/* Continuous batching over the managed cache: requests enter in their order as soon as a place in the
 * batch and blocks for their prompt are free, prompts are computed in chunks beside the running
 * decodes, and a finished request's blocks return at once. Where a running request finds no block,
 * the youngest gives all of its blocks back and is computed again later, prompt rows by the prefill
 * family and its own tokens by the decode family as before, so that its result stays the same. */

#include <stdio.h>

#include "model.h"
#include "request.h"

typedef struct scheduler_params {
    int32_t max_batch;     /* requests running at once */
    int32_t prefill_chunk; /* prompt rows a step, of all requests together */
    int32_t num_blocks, block_size;
    int64_t max_decode_keys; /* of the plan */
    bool stream;             /* a line a token too */
    bool progress;           /* a line on stderr now and then */
    FILE *out;
} scheduler_params;

typedef struct scheduler_totals {
    int64_t steps, prompt_rows, decode_rows, generated, preemptions;
    int32_t finished, errors, peak_blocks, peak_batch;
} scheduler_totals;

/* Runs every request of the list to its end and writes its line. */
bool scheduler_run(request_list *list, model *m, kvleaf_cache *cache, kvleaf_plan *plan, const scheduler_params *params,
                   scheduler_totals *totals, failure *error);

#endif
