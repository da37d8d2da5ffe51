/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_CONFIG_H
#define GENERATE_CONFIG_H

/* config.json of a Llama-style model, as the Hugging Face hub has it. */

#include <stdint.h>

#include "fail.h"

enum { MAX_END_TOKENS = 16, MAX_LAYERS = 1024 };

typedef struct model_config {
    int32_t vocab_size, hidden_size, intermediate_size;
    int32_t num_layers, num_heads, num_kv_heads, head_dim;
    int32_t max_positions;
    int32_t windows[MAX_LAYERS]; /* of each layer: tokens a row sees, itself included; 0 = all */
    float rms_norm_eps;
    double rope_theta;
    bool tied_embeddings;
    int32_t end_tokens[MAX_END_TOKENS];
    int32_t num_end_tokens;
} model_config;

/* Reads DIR/config.json, and the end tokens from DIR/generation_config.json where that has some.
 * What this program can't run (other architectures, rope scaling, biases, quantised weights) is
 * refused by name. */
bool model_config_read(const char *dir, model_config *out, failure *error);

#endif
