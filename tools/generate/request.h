/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_REQUEST_H
#define GENERATE_REQUEST_H

/* A request as one line of JSON, its samples, and the lines that answer it. */

#include <kvleaf/blocks.h>
#include <stdint.h>
#include <stdio.h>

#include "config.h"
#include "fail.h"
#include "sampler.h"

enum { DEFAULT_NEW_TOKENS = 256, MAX_STOP_TOKENS = 256, MAX_BEAM = 64, REPORTED = 16 };

/* What a teacher-forced step reports: the model's own best tokens, best first. */
typedef struct step_report {
    candidate best[REPORTED];
} step_report;

/* One continuation of the prompt: a sample, or a beam. */
typedef struct sample {
    int32_t *tokens; /* the prompt, then what was generated: [prompt + max_new] */
    int32_t length;
    bool done;
    bool cancelled; /* answered for; not done yet */
    sampler sampler;

    /* The scheduler's. */
    kvleaf_seq seq;             /* 0 = none */
    int32_t extended, computed; /* tokens that have a slot; that are in the cache */
    int32_t peak_blocks, shared_blocks;

    /* Beam search's. */
    double score;     /* sum of the log probabilities of what was generated */
    candidate *best;  /* [num_best], the best continuations; logit = log probability */
    bool ready;       /* best is of the newest token */
    int32_t *scratch; /* another [prompt + max_new], where the next step's tokens are put together */
} sample;

/* A continuation that beam search has ended. */
typedef struct hypothesis {
    int32_t *tokens; /* [length], the generated ones only */
    int32_t length;
    double score; /* a token */
    bool stopped; /* by a stop token */
} hypothesis;

typedef enum request_state { REQUEST_WAITING, REQUEST_SWAPPED, REQUEST_RUNNING } request_state;

typedef struct request {
    char *id; /* as JSON text */
    int64_t line;
    int32_t prompt, max_new;
    bool max_new_given;
    float temperature, top_p;
    uint64_t seed, salt;
    int32_t priority;
    int32_t num_samples; /* answers wanted */
    int32_t beam;        /* beams, or 0 = independent samples */
    int32_t stop_tokens[MAX_STOP_TOKENS];
    int32_t num_stop_tokens;
    int32_t *teacher;     /* tokens fed in place of the chosen ones, or NULL */
    step_report *reports; /* [max_new] with a teacher */
    int32_t width;        /* max(num_samples, beam) */
    int32_t num_best;     /* continuations of a beam to choose from */
    sample *samples;      /* [width]; the first computes the prompt, the others fork from it */

    /* The scheduler's. */
    request_state state;
    bool split;           /* the other samples exist: the prompt's logits were there once */
    int32_t cached;       /* prompt tokens found in the prefix cache when it first entered */
    hypothesis *finished; /* [beam], best first */
    int32_t num_finished;
    struct request *previous, *next; /* in the queue of those that wait */
} request;

/* What a line of the input asks for. */
typedef enum line_kind { LINE_REQUEST, LINE_CANCEL, LINE_STATS, LINE_WRONG } line_kind;

typedef struct parsed_line {
    line_kind kind;
    request *request; /* REQUEST: a new one */
    char *id;         /* CANCEL: what is to end, as JSON text; WRONG: the line's id if it has one; else NULL */
    int32_t index;    /* CANCEL: of the sample, or -1 = all of it */
    bool map;         /* STATS: with the block map */
    failure error;    /* WRONG: why */
} parsed_line;

/* Reads one line; the caller takes the request, and frees the id with cJSON_free. */
void request_parse(const char *text, int64_t line, const model_config *config, parsed_line *out);
void request_release(request *r);

/* Whether the token ends a sample of the request. */
bool request_stops_at(const request *r, int32_t token);

/* output.c: one line each, flushed. */
void print_request_error(FILE *out, const char *id, int64_t line, const failure *error);
void print_sample(FILE *out, const request *r, int32_t index, const char *finish_reason);
void print_hypothesis(FILE *out, const request *r, int32_t index);
void print_token(FILE *out, const request *r, int32_t index, int32_t token);
/* The cache's counts, and `map`, a picture of it, if not NULL. */
void print_stats(FILE *out, const kvleaf_blocks_stats *stats, int32_t running, int32_t waiting, const char *map);

#endif
