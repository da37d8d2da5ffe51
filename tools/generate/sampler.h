/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_SAMPLER_H
#define GENERATE_SAMPLER_H

/* Chooses the next token of one sample. Its random numbers are its own: xoshiro256** (Blackman and
 * Vigna, 2018), its state filled by splitmix64 from the request's seed, one draw a token, so that a
 * request's tokens depend on its seed and never on the other requests. */

#include <stdbool.h>
#include <stdint.h>

typedef struct sampler {
    float temperature; /* 0 = greedy */
    float top_p;       /* of probability mass kept, in (0, 1] */
    uint64_t state[4];
} sampler;

void sampler_init(sampler *s, float temperature, float top_p, uint64_t seed);

typedef struct candidate {
    int32_t token;
    float logit;
} candidate;

/* The next token given its logits [vocab]; scratch [vocab]. Greedy: the largest logit, the lower id
 * of equal ones. */
int32_t sampler_next(sampler *s, const float *logits, int32_t vocab, candidate *scratch);

/* The `count` best tokens, best first, the lower id first of equal ones. */
void sampler_best(const float *logits, int32_t vocab, candidate *best, int32_t count);

#endif
