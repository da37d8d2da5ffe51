/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_REQUEST_H
#define GENERATE_REQUEST_H

/* A request as one line of JSON, and the lines that answer it. */

#include <kvleaf/blocks.h>
#include <stdint.h>
#include <stdio.h>

#include "config.h"
#include "fail.h"
#include "sampler.h"

enum { DEFAULT_NEW_TOKENS = 256, MAX_STOP_TOKENS = 256, REPORTED = 16 };

/* What a teacher-forced step reports: the model's own best tokens, best first. */
typedef struct step_report {
    candidate best[REPORTED];
} step_report;

typedef enum request_state { REQUEST_WAITING, REQUEST_RUNNING, REQUEST_DONE } request_state;

typedef struct request {
    char *id; /* as JSON text */
    int64_t line;
    int32_t *tokens; /* the prompt, then what was generated: [prompt + max_new] */
    int32_t prompt, length, max_new;
    bool max_new_given;
    float temperature, top_p;
    uint64_t seed;
    int32_t stop_tokens[MAX_STOP_TOKENS];
    int32_t num_stop_tokens;
    int32_t *teacher;     /* tokens fed in place of the chosen ones, or NULL */
    step_report *reports; /* [max_new] with a teacher */

    /* The scheduler's. */
    request_state state;
    kvleaf_seq seq;
    int32_t extended, computed; /* tokens that have a slot; that are in the cache */
    int32_t cached, peak_blocks, shared_blocks;
    sampler sampler;
} request;

/* All requests of a file, in its order. */
typedef struct request_list {
    request *items;
    int32_t count, capacity;
    int32_t errors; /* lines that were answered with an error */
} request_list;

/* Reads every line of `file`; a line that is no right request gets its error line on `out`, and the
 * others go on. Blank lines are skipped. False only if reading itself fails. */
bool requests_read(request_list *list, FILE *file, const model_config *config, FILE *out, failure *error);
void requests_release(request_list *list);

/* output.c: one line each, flushed. */
void print_request_error(FILE *out, const char *id, int64_t line, const failure *error);
void print_sample(FILE *out, const request *r, const char *finish_reason);
void print_token(FILE *out, const request *r, int32_t token);

#endif
