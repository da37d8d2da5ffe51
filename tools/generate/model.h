/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_MODEL_H
#define GENERATE_MODEL_H

/* A Llama-style decoder on the device. Everything is float32 but the keys and values in the cache,
 * which have the pool's dtype. */

#include <kvleaf/cache.h>

#include "compute.h"
#include "config.h"

/* The weights of one layer, input-major: [inputs][outputs]. */
typedef struct layer_weights {
    cl_mem attention_norm, mlp_norm; /* [hidden] */
    cl_mem qkv;                      /* [hidden][(heads + 2 kv_heads) * head_dim] */
    cl_mem out;                      /* [heads * head_dim][hidden] */
    cl_mem gate_up;                  /* [hidden][2 * intermediate] */
    cl_mem down;                     /* [intermediate][hidden] */
} layer_weights;

typedef struct model_weights {
    layer_weights *layers; /* [num_layers] */
    cl_mem embedding;      /* [hidden][vocab] */
    cl_mem head;           /* [hidden][vocab]; the embedding's own where they are tied */
    cl_mem norm;           /* [hidden] */
} model_weights;

typedef struct model {
    compute *compute;
    model_config config;
    model_weights weights;
    int32_t max_rows, max_logits;          /* of a step; both padded to ROW_PAD inside */
    cl_mem hidden, normed, qkv, attention; /* [max_rows][...] */
    cl_mem gate_up, gated;
    cl_mem last, logits; /* [max_logits][hidden], [max_logits][vocab] */
    cl_mem tokens, positions, picked, rope_table;
    cl_mem best; /* [max_logits] model_best */
} model;

/* Reads config.json and model.safetensors of the folder `dir` to the device, for steps of up to
 * max_rows rows of which max_logits want logits. The caller destroys it, after a failure too. */
bool model_create(model *m, compute *c, const char *dir, int32_t max_rows, int32_t max_logits, failure *error);
void model_destroy(model *m);

/* What one step computes: rows packed as in the plan. */
typedef struct model_step {
    int32_t rows;
    const int32_t *tokens, *positions; /* [rows] */
    int32_t num_logits;
    const int32_t *logit_rows; /* [num_logits] rows whose next token is wanted */
} model_step;

/* Enqueues the step through the open plan. */
bool model_forward(model *m, kvleaf_plan *plan, const model_step *step, failure *error);
/* Waits for the step and reads its logits, [num_logits][vocab]. */
bool model_read_logits(model *m, const model_step *step, float *logits, failure *error);

/* What best_token of model.cl finds in a row of logits. */
typedef struct model_best {
    cl_int token;   /* of the largest logit, the lowest where several have it */
    cl_int broken;  /* the first whose logit is not finite, or -1 */
    cl_float value; /* of that logit */
} model_best;

/* Waits for the step and reads what greedy decoding needs of its logits, [num_logits]. */
bool model_read_best(model *m, const model_step *step, model_best *best, failure *error);

/* weights.c */
bool model_weights_read(model_weights *w, compute *c, const model_config *config, const char *dir, failure *error);
void model_weights_release(model_weights *w, const model_config *config);

#endif
