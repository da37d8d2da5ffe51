/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_SCHEDULER_STATE_H
#define GENERATE_SCHEDULER_STATE_H

/* What the scheduler's own files share. */

#include <time.h>

#include "scheduler.h"

/* One row of a step whose logits are wanted. */
typedef struct step_member {
    request *request;
    int32_t index; /* of the sample */
} step_member;

typedef struct scheduler {
    const scheduler_params *params;
    scheduler_totals *totals;
    input *in;
    model *m;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    failure *error;
    request *first, *last; /* those that wait, by priority, then in their order */
    request **running;     /* [max_batch], in the same order */
    int32_t num_running;
    int32_t num_live;    /* samples of running requests that go on */
    int32_t num_swapped; /* sequences in host memory */
    /* The step being made. */
    kvleaf_batch_entry *entries; /* [max_batch] */
    step_member *members;        /* [max_batch], of each entry */
    int32_t num_entries;
    int32_t *tokens, *positions; /* [max_rows] */
    int32_t *logit_rows;         /* [max_batch] */
    step_member *logit_members;  /* [max_batch] */
    model_step step;
    float *logits;      /* [max_batch][vocab] */
    model_best *best;   /* [max_batch] in their place, where all rows of the step are greedy */
    candidate *scratch; /* [vocab] */
    time_t last_progress;
} scheduler;

/* admission.c: requests in and out of the batch. */

/* Puts a request among those that wait, or answers why it can never run and releases it. */
void admission_queue(scheduler *s, request *r);
/* Lets waiting requests in, in their order, until one does not fit. */
bool admission_enter(scheduler *s);
/* Gives each running sample the slots of its newest tokens; makes the sequences of samples that have none where the
 * prompt is computed. Preempts the last requests where blocks are missing. */
bool admission_extend(scheduler *s);
/* Takes a request out of the batch or the queue, gives its blocks back and releases it. */
bool admission_leave(scheduler *s, request *r);
/* Ends one sample of a running request. */
bool admission_end_sample(scheduler *s, request *r, int32_t index);
/* The running or waiting request of an id, or NULL. */
request *admission_find(scheduler *s, const char *id);

/* beam.c: takes the logits of one beam; once all beams have theirs, chooses the next ones. *over: the request has ended
 * and its answers are in r->finished. */
bool beam_take(scheduler *s, request *r, int32_t index, const float *logits, bool *over);

#endif
