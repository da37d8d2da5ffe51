/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler_state.h"

/* The decode family's work grows with rows x keys, counted in splits of this many keys. */
enum { DECODE_SPLIT = 512, PROGRESS_SECONDS = 5 };

/* -------------------------------------------------------------------------- making a step */

static int64_t decode_cost(int32_t keys)
{
    return (int64_t)(keys + DECODE_SPLIT - 1) / DECODE_SPLIT * DECODE_SPLIT;
}

static void add_entry(scheduler *s, request *r, int32_t index, int32_t rows, kvleaf_family family)
{
    const sample *at = &r->samples[index];
    kvleaf_batch_entry *entry = &s->entries[s->num_entries];
    model_step *step = &s->step;

    *entry = (kvleaf_batch_entry){.seq = at->seq, .num_q = rows, .family = family};
    s->members[s->num_entries++] = (step_member){r, index};
    for (int32_t i = 0; i < rows; i++) {
        s->tokens[step->rows + i] = at->tokens[at->computed + i];
        s->positions[step->rows + i] = at->computed + i;
    }
    step->rows += rows;
    if (at->computed + rows == at->length) {
        s->logit_members[step->num_logits] = (step_member){r, index};
        s->logit_rows[step->num_logits++] = step->rows - 1;
    }
}

typedef struct budget {
    int32_t rows; /* of prompts, and of own tokens beyond one a sample */
    int64_t keys;
} budget;

/* The next prompt rows of a sample, or its next own tokens. */
static void add_sample(scheduler *s, request *r, int32_t index, budget *left)
{
    const sample *at = &r->samples[index];
    int32_t pending = at->length - at->computed, rows;
    bool in_prompt = at->computed < r->prompt;

    if (in_prompt) {
        rows = r->prompt - at->computed < left->rows ? r->prompt - at->computed : left->rows;
        left->rows -= rows;
    } else {
        /* One row is the usual decode, which has a place of its own; more are computed again after a preemption and
         * share the chunk with the prompts. */
        int32_t most = 1 + left->rows;
        int64_t by_keys = left->keys / decode_cost(at->length);
        rows = pending < most ? pending : most;
        rows = rows < by_keys ? rows : (int32_t)by_keys;
        left->rows -= rows > 1 ? rows - 1 : 0;
        left->keys -= rows * decode_cost(at->length);
    }
    if (rows > 0)
        add_entry(s, r, index, rows, in_prompt ? KVLEAF_FAMILY_PREFILL : KVLEAF_FAMILY_DECODE);
}

/* Every sample computes something if the budgets allow. A beam that waits for the others has nothing to compute. */
static void make_step(scheduler *s)
{
    budget left = {s->params->prefill_chunk, s->params->max_decode_keys};

    s->step = (model_step){.tokens = s->tokens, .positions = s->positions, .logit_rows = s->logit_rows};
    s->num_entries = 0;
    for (int32_t k = 0; k < s->num_running; k++)
        for (int32_t i = 0; i < s->running[k]->width; i++) {
            const sample *at = &s->running[k]->samples[i];
            if (!at->done && at->seq != 0 && at->computed < at->length)
                add_sample(s, s->running[k], i, &left);
        }
}

static bool build_plan(scheduler *s)
{
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = s->m->compute->queue};
    kvleaf_status status = kvleaf_plan_build(s->plan, s->cache, s->entries, s->num_entries, &exec);

    /* Steps without logits don't wait for the device, so that it can fall behind. */
    if (status == KVLEAF_BUSY && clFinish(s->m->compute->queue) == CL_SUCCESS)
        status = kvleaf_plan_build(s->plan, s->cache, s->entries, s->num_entries, &exec);
    return status == KVLEAF_OK || fail_kvleaf(s->error, "kvleaf_plan_build");
}

/* ------------------------------------------------------------------------ after the step */

static bool all_done(const request *r)
{
    for (int32_t i = 0; i < r->width; i++)
        if (!r->samples[i].done)
            return false;
    return true;
}

static bool end_sample(scheduler *s, request *r, int32_t index, const char *reason)
{
    print_sample(s->params->out, r, index, reason);
    return admission_end_sample(s, r, index);
}

/* What is known of the next token after a row. */
typedef struct row_result {
    const float *logits; /* [vocab], or NULL: the best is all that is needed */
    int32_t best;
} row_result;

static bool take_token(scheduler *s, request *r, int32_t index, const row_result *row)
{
    int32_t vocab = s->m->config.vocab_size, token;
    sample *at = &r->samples[index];
    int32_t step = at->length - r->prompt;

    if (at->cancelled)
        return admission_end_sample(s, r, index);
    if (r->teacher != NULL) {
        sampler_best(row->logits, vocab, r->reports[step].best, REPORTED);
        token = r->teacher[step];
    } else {
        token = row->logits ? sampler_next(&at->sampler, row->logits, vocab, s->scratch) : row->best;
    }
    at->tokens[at->length++] = token;
    s->totals->generated++;
    if (s->params->stream)
        print_token(s->params->out, r, index, token);
    if (request_stops_at(r, token))
        return end_sample(s, r, index, "stop");
    return step + 1 < r->max_new || end_sample(s, r, index, "length");
}

static bool finish(scheduler *s, request *r)
{
    for (int32_t i = 0; r->beam && i < r->num_samples; i++)
        print_hypothesis(s->params->out, r, i);
    s->totals->finished++;
    return admission_leave(s, r);
}

/* The samples that a row of logits is for take their tokens: the row's own, or, of a request's first row, all. */
static bool take_tokens(scheduler *s, request *r, int32_t index, const row_result *row)
{
    int32_t first = r->split ? index : 0, end = r->split ? index + 1 : r->width;

    r->split = true;
    for (int32_t i = first; i < end; i++)
        if (!r->samples[i].done && !take_token(s, r, i, row))
            return false;
    return true;
}

static bool take_row(scheduler *s, const step_member *member, const row_result *row)
{
    request *r = member->request;
    bool over = false;

    if (r->beam ? !beam_take(s, r, member->index, row->logits, &over) : !take_tokens(s, r, member->index, row))
        return false;
    return (!over && !all_done(r)) || finish(s, r);
}

static bool fail_logit(scheduler *s, const step_member *member, int32_t token, double value)
{
    const request *r = member->request;

    return fail(s->error, "KVLEAF_DEVICE", "the logit of token %d after %d tokens of request %s is %g", (int)token,
                (int)r->samples[member->index].length, r->id, value);
}

/* Whether the best tokens are all that the step's rows are for: then the device finds them, and no logits are read. */
static bool step_is_greedy(const scheduler *s)
{
    for (int32_t i = 0; i < s->step.num_logits; i++) {
        const step_member *member = &s->logit_members[i];
        const request *r = member->request;
        if (r->beam || r->teacher != NULL || r->samples[member->index].sampler.temperature != 0)
            return false;
    }
    return true;
}

static bool take_best(scheduler *s)
{
    if (!model_read_best(s->m, &s->step, s->best, s->error))
        return false;
    for (int32_t i = 0; i < s->step.num_logits; i++) {
        const row_result row = {NULL, s->best[i].token};
        if (s->best[i].broken >= 0)
            return fail_logit(s, &s->logit_members[i], s->best[i].broken, s->best[i].value);
        if (!take_row(s, &s->logit_members[i], &row))
            return false;
    }
    return true;
}

static bool take_logits(scheduler *s)
{
    int32_t vocab = s->m->config.vocab_size;

    if (!model_read_logits(s->m, &s->step, s->logits, s->error))
        return false;
    for (int32_t i = 0; i < s->step.num_logits; i++) {
        const row_result row = {s->logits + (size_t)i * (size_t)vocab, -1};
        for (int32_t token = 0; token < vocab; token++)
            if (!isfinite(row.logits[token]))
                return fail_logit(s, &s->logit_members[i], token, row.logits[token]);
        if (!take_row(s, &s->logit_members[i], &row))
            return false;
    }
    return true;
}

static void count_rows(scheduler *s)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

    if (kvleaf_cache_query(s->cache, &stats) == KVLEAF_OK && stats.used > s->totals->peak_blocks)
        s->totals->peak_blocks = stats.used;
    for (int32_t i = 0; i < s->num_entries; i++) {
        bool decode = s->entries[i].family == KVLEAF_FAMILY_DECODE;
        s->members[i].request->samples[s->members[i].index].computed += s->entries[i].num_q;
        *(decode ? &s->totals->decode_rows : &s->totals->prompt_rows) += s->entries[i].num_q;
    }
    s->totals->steps++;
}

static bool run_step(scheduler *s)
{
    make_step(s);
    if (s->num_entries == 0)
        return fail(s->error, "KVLEAF_TOO_SMALL", "no running request fits in a step");
    if (!build_plan(s))
        return false;
    if (!model_forward(s->m, s->plan, &s->step, s->error)) {
        kvleaf_plan_rollback(s->plan);
        return false;
    }
    if (kvleaf_plan_commit(s->plan, NULL) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_plan_commit");
    count_rows(s);
    return step_is_greedy(s) ? take_best(s) : take_logits(s);
}

/* ------------------------------------------------------------------------------- the loop */

/* Answers for samples first .. end - 1 and takes no more of their tokens. */
static bool cancel_samples(scheduler *s, request *r, int32_t first, int32_t end)
{
    for (int32_t i = first; i < end; i++) {
        sample *at = &r->samples[i];
        if (at->done || at->cancelled)
            continue;
        print_sample(s->params->out, r, i, "cancel");
        at->cancelled = true;
        /* One that has forked can go at once; another does when its next token comes. */
        if (r->split && r->state == REQUEST_RUNNING && !admission_end_sample(s, r, i))
            return false;
    }
    return true;
}

static bool cancel(scheduler *s, const char *id, int32_t index)
{
    request *r = admission_find(s, id);
    bool some = false;

    if (r == NULL || index >= r->num_samples)
        return true; /* it has ended in the meantime */
    bool one = index >= 0 && !r->beam;
    if (!cancel_samples(s, r, one ? index : 0, one ? index + 1 : r->num_samples))
        return false;
    for (int32_t i = 0; one && i < r->width; i++)
        some = some || !(r->samples[i].done || r->samples[i].cancelled);
    if (some)
        return true;
    s->totals->cancelled++;
    return admission_leave(s, r);
}

static bool answer_stats(scheduler *s, bool map)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    char *text = NULL;
    size_t size = 0;
    int32_t waiting = 0;

    if (kvleaf_cache_query(s->cache, &stats) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_cache_query");
    if (map) {
        kvleaf_cache_describe(s->cache, KVLEAF_FORMAT_SVG, NULL, 0, &size);
        text = malloc(size);
        if (text == NULL)
            return fail(s->error, "KVLEAF_NO_MEMORY", "no memory for a picture of %zu bytes", size);
        if (kvleaf_cache_describe(s->cache, KVLEAF_FORMAT_SVG, text, size, &size) != KVLEAF_OK) {
            free(text);
            return fail_kvleaf(s->error, "kvleaf_cache_describe");
        }
    }
    for (const request *r = s->first; r != NULL; r = r->next)
        waiting++;
    print_stats(s->params->out, &stats, s->num_running, waiting, text);
    free(text);
    return true;
}

static bool take_line(scheduler *s, const char *text)
{
    parsed_line line;
    bool right = true;

    request_parse(text, s->in->line, &s->m->config, &line);
    switch (line.kind) {
    case LINE_REQUEST:
        admission_queue(s, line.request);
        break;
    case LINE_CANCEL:
        right = cancel(s, line.id, line.index);
        break;
    case LINE_STATS:
        right = answer_stats(s, line.map);
        break;
    case LINE_WRONG:
        print_request_error(s->params->out, line.id, s->in->line, &line.error);
        s->totals->errors++;
        break;
    }
    cJSON_free(line.id);
    return right;
}

/* Takes the lines that are there; waits for one where there is nothing else to do, for all of them unless streaming. */
static bool take_lines(scheduler *s)
{
    bool idle = s->num_running == 0 && s->first == NULL;
    const char *text;

    do {
        if (!input_fill(s->in, idle || !s->params->stream, s->error))
            return false;
        while ((text = input_line(s->in)) != NULL)
            if (!take_line(s, text))
                return false;
    } while (!s->params->stream && !s->in->ended);
    return true;
}

static void show_progress(scheduler *s)
{
    time_t now = time(NULL);

    if (!s->params->progress || now - s->last_progress < PROGRESS_SECONDS)
        return;
    s->last_progress = now;
    fprintf(stderr, "kvleaf-generate: %d of %d requests done, %d running, %lld tokens generated\n",
            (int)(s->totals->finished + s->totals->errors), (int)s->totals->requests, (int)s->num_running,
            (long long)s->totals->generated);
}

static bool run_all(scheduler *s)
{
    s->last_progress = time(NULL);
    for (;;) {
        if (!s->in->ended && !take_lines(s))
            return false;
        if (!admission_enter(s) || !admission_extend(s))
            return false;
        if (s->num_running > 0 && !run_step(s))
            return false;
        if (s->num_running == 0 && s->first == NULL && s->in->ended)
            return true;
        show_progress(s);
    }
}

static void release_all(scheduler *s)
{
    while (s->num_running > 0)
        admission_leave(s, s->running[0]);
    while (s->first != NULL)
        admission_leave(s, s->first);
}

bool scheduler_run(input *in, model *m, kvleaf_cache *cache, kvleaf_plan *plan, const scheduler_params *params,
                   scheduler_totals *totals, failure *error)
{
    size_t batch = (size_t)params->max_batch, rows = (size_t)m->max_rows, vocab = (size_t)m->config.vocab_size;
    failure ignored;
    scheduler s = {.params = params, .totals = totals, .in = in, .m = m, .cache = cache, .plan = plan, .error = error};

    memset(totals, 0, sizeof *totals);
    s.running = calloc(batch, sizeof *s.running);
    s.entries = calloc(batch, sizeof *s.entries);
    s.members = calloc(batch, sizeof *s.members);
    s.tokens = calloc(rows, sizeof *s.tokens);
    s.positions = calloc(rows, sizeof *s.positions);
    s.logit_rows = calloc(batch, sizeof *s.logit_rows);
    s.logit_members = calloc(batch, sizeof *s.logit_members);
    s.logits = calloc(batch * vocab, sizeof *s.logits);
    s.best = calloc(batch, sizeof *s.best);
    s.scratch = calloc(vocab, sizeof *s.scratch);
    bool right = s.running && s.entries && s.members && s.tokens && s.positions && s.logit_rows && s.logit_members &&
                 s.logits && s.best && s.scratch;
    right = right ? run_all(&s) : fail(error, "KVLEAF_NO_MEMORY", "no host memory for a batch of %d", (int)batch);
    s.error = &ignored; /* the first failure counts */
    release_all(&s);
    free(s.running);
    free(s.entries);
    free(s.members);
    free(s.tokens);
    free(s.positions);
    free(s.logit_rows);
    free(s.logit_members);
    free(s.logits);
    free(s.best);
    free(s.scratch);
    return right;
}
