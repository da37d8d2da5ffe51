/* SPDX-License-Identifier: Apache-2.0 */
#include "sampler.h"

#include <math.h>
#include <stdlib.h>

static uint64_t rotate_left(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

void sampler_init(sampler *s, float temperature, float top_p, uint64_t seed)
{
    s->temperature = temperature;
    s->top_p = top_p;
    for (int i = 0; i < 4; i++) {
        uint64_t z = seed += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        s->state[i] = z ^ z >> 31;
    }
}

/* Uniform in [0, 1), 53 bits. */
static double uniform(uint64_t s[4])
{
    uint64_t result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return (double)(result >> 11) * 0x1p-53;
}

static int32_t largest(const float *logits, int32_t vocab)
{
    int32_t best = 0;

    for (int32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static int by_logit(const void *left, const void *right)
{
    const candidate *a = left, *b = right;

    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

/* The token at which the running sum of probability passes `target`; candidates in their order. */
static int32_t pick(const candidate *candidates, int32_t count, double target, double top, double temperature)
{
    double sum = 0;

    for (int32_t i = 0; i < count; i++) {
        sum += exp((candidates[i].logit - top) / temperature);
        if (sum > target)
            return candidates[i].token;
    }
    return candidates[count - 1].token;
}

/* Keeps the fewest candidates that hold top_p of the mass, best first; returns their mass. */
static double keep_nucleus(candidate *candidates, int32_t *count, double total, double top_p, double top,
                           double temperature)
{
    /* All that lie below this share together hold less than 1 - top_p, so none is needed. */
    double floor_mass = (1 - top_p) / *count * total, sum = 0;
    int32_t kept = 0;

    for (int32_t i = 0; i < *count; i++)
        if (exp((candidates[i].logit - top) / temperature) >= floor_mass)
            candidates[kept++] = candidates[i];
    qsort(candidates, (size_t)kept, sizeof *candidates, by_logit);
    for (int32_t i = 0; i < kept; i++) {
        sum += exp((candidates[i].logit - top) / temperature);
        if (sum >= top_p * total) {
            *count = i + 1;
            return sum;
        }
    }
    *count = kept;
    return sum;
}

int32_t sampler_next(sampler *s, const float *logits, int32_t vocab, candidate *scratch)
{
    int32_t best = largest(logits, vocab), count = vocab;
    double top = logits[best], total = 0;

    if (s->temperature == 0)
        return best;
    double draw = uniform(s->state);
    for (int32_t i = 0; i < vocab; i++) {
        scratch[i] = (candidate){i, logits[i]};
        total += exp((logits[i] - top) / s->temperature);
    }
    if (s->top_p < 1)
        total = keep_nucleus(scratch, &count, total, s->top_p, top, s->temperature);
    return pick(scratch, count, draw * total, top, s->temperature);
}

void sampler_best(const float *logits, int32_t vocab, candidate *best, int32_t count)
{
    int32_t used = 0;

    for (int32_t i = 0; i < vocab; i++) {
        candidate c = {i, logits[i]};
        if (used == count && by_logit(&best[used - 1], &c) < 0)
            continue;
        int32_t at = used < count ? used++ : used - 1;
        for (; at > 0 && by_logit(&c, &best[at - 1]) < 0; at--)
            best[at] = best[at - 1];
        best[at] = c;
    }
}
