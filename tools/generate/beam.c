/* SPDX-License-Identifier: Apache-2.0 */
/* Beam search: of all continuations of all beams the `beam` best go on, by the sum of their log probabilities. One that
 * ends in a stop token is set aside, with its score a token; the search ends when `beam` are set aside and no beam that
 * goes on has a better score a token than the worst of them, or at max_new. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler_state.h"

typedef struct continuation {
    int32_t beam; /* that it continues */
    int32_t token;
    double score;
} continuation;

/* The best continuations of a beam, their logits turned into log probabilities. */
static void take_best(sample *at, int32_t count, const float *logits, int32_t vocab)
{
    double sum = 0;

    sampler_best(logits, vocab, at->best, count);
    double top = at->best[0].logit;
    for (int32_t i = 0; i < vocab; i++)
        sum += exp(logits[i] - top);
    for (int32_t i = 0; i < count; i++)
        at->best[i].logit = (float)(at->best[i].logit - top - log(sum));
    at->ready = true;
}

static int by_score(const void *left, const void *right)
{
    const continuation *a = left, *b = right;

    if (a->score != b->score)
        return a->score > b->score ? -1 : 1;
    if (a->beam != b->beam)
        return a->beam < b->beam ? -1 : 1;
    return (a->token > b->token) - (a->token < b->token);
}

/* Sets a continuation of `length` generated tokens aside if it is among the best. */
static bool set_aside(scheduler *s, request *r, const int32_t *tokens, int32_t length, double sum, bool stopped)
{
    double score = sum / length;
    int32_t at = r->num_finished;

    if (at == r->beam && score <= r->finished[at - 1].score)
        return true;
    int32_t *copy = malloc((size_t)length * sizeof *copy);
    if (copy == NULL)
        return fail(s->error, "KVLEAF_NO_MEMORY", "no memory for a hypothesis of %d tokens", (int)length);
    memcpy(copy, tokens, (size_t)length * sizeof *copy);
    if (at == r->beam)
        free(r->finished[--at].tokens);
    else
        r->num_finished++;
    for (; at > 0 && r->finished[at - 1].score < score; at--)
        r->finished[at] = r->finished[at - 1];
    r->finished[at] = (hypothesis){.tokens = copy, .length = length, .score = score, .stopped = stopped};
    return true;
}

/* Which beam each of the next ones continues, in parents; their tokens and scores are in place. */
static bool choose(scheduler *s, request *r, continuation *all, int32_t count, int32_t *parents)
{
    int32_t chosen = 0, generated = r->samples[0].length - r->prompt + 1;
    size_t old = (size_t)r->samples[0].length * sizeof(int32_t);
    double scores[MAX_BEAM] = {0};

    qsort(all, (size_t)count, sizeof *all, by_score);
    for (int32_t i = 0; i < count && chosen < r->beam; i++) {
        const sample *from = &r->samples[all[i].beam];
        int32_t *tokens = r->samples[chosen].scratch;
        memcpy(tokens, from->tokens, old);
        tokens[from->length] = all[i].token;
        if (request_stops_at(r, all[i].token)) {
            if (i < r->beam && !set_aside(s, r, tokens + r->prompt, generated, all[i].score, true))
                return false;
            continue;
        }
        scores[chosen] = all[i].score;
        parents[chosen++] = all[i].beam;
    }
    for (int32_t i = 0; i < r->beam; i++) {
        sample *at = &r->samples[i];
        int32_t *tokens = at->tokens;
        at->tokens = at->scratch;
        at->scratch = tokens;
        at->length++;
        at->score = scores[i];
        at->ready = false;
    }
    return true;
}

/* Gives each beam the cache of the one it continues. */
static bool rearrange(scheduler *s, request *r, const int32_t *parents)
{
    kvleaf_seq seqs[MAX_BEAM];

    for (int32_t i = 0; i < r->beam; i++)
        seqs[i] = r->samples[i].seq;
    return kvleaf_seq_rearrange(s->cache, seqs, parents, r->beam) == KVLEAF_OK ||
           fail_kvleaf(s->error, "kvleaf_seq_rearrange");
}

static bool advance(scheduler *s, request *r, bool *over)
{
    int32_t parents[MAX_BEAM], count = 0, beams = r->split ? r->beam : 1;
    continuation *all = malloc((size_t)beams * (size_t)r->num_best * sizeof *all);

    if (all == NULL)
        return fail(s->error, "KVLEAF_NO_MEMORY", "no memory for the continuations of %d beams", (int)beams);
    for (int32_t i = 0; i < beams; i++)
        for (int32_t k = 0; k < r->num_best; k++)
            all[count++] = (continuation){.beam = i,
                                          .token = r->samples[i].best[k].token,
                                          .score = r->samples[i].score + r->samples[i].best[k].logit};
    bool right = choose(s, r, all, count, parents) && (!r->split || rearrange(s, r, parents));
    free(all);
    if (!right)
        return false;
    r->split = true;
    s->totals->generated += r->beam;
    int32_t generated = r->samples[0].length - r->prompt;
    if (generated == r->max_new)
        for (int32_t i = 0; i < r->beam; i++)
            if (!set_aside(s, r, r->samples[i].tokens + r->prompt, generated, r->samples[i].score, false))
                return false;
    *over = generated == r->max_new ||
            (r->num_finished == r->beam && r->samples[0].score / generated <= r->finished[r->beam - 1].score);
    return true;
}

bool beam_take(scheduler *s, request *r, int32_t index, const float *logits, bool *over)
{
    *over = false;
    take_best(&r->samples[index], r->num_best, logits, s->m->config.vocab_size);
    for (int32_t i = 0; r->split && i < r->beam; i++)
        if (!r->samples[i].ready)
            return true;
    return advance(s, r, over);
}
