/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/cli.h"

/* The decode family's work grows with rows x keys, counted in splits of this many keys. */
enum { DECODE_SPLIT = 512, PROGRESS_SECONDS = 5 };

typedef struct scheduler {
    const scheduler_params *params;
    scheduler_totals *totals;
    request_list *list;
    model *m;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    failure *error;
    request **running; /* [max_batch], oldest first */
    int32_t num_running;
    /* The step being made. */
    kvleaf_batch_entry *entries; /* [max_batch] */
    request **members;           /* [max_batch], of each entry */
    int32_t num_entries;
    int32_t *tokens, *positions; /* [max_rows] */
    int32_t *logit_rows;         /* [max_batch] */
    request **logit_members;     /* [max_batch] */
    model_step step;
    float *logits;      /* [max_batch][vocab] */
    candidate *scratch; /* [vocab] */
    time_t last_progress;
} scheduler;

static int32_t blocks_for(const scheduler *s, int64_t tokens)
{
    return (int32_t)((tokens + s->params->block_size - 1) / s->params->block_size);
}

/* ------------------------------------------------------------------- entering and leaving */

static void answer_error(scheduler *s, request *r, const failure *why)
{
    print_request_error(s->params->out, r->id, r->line, why);
    r->state = REQUEST_DONE;
    s->totals->errors++;
}

/* Refuses what can never run; shortens a length that nobody asked for to what can. */
static void check_fits(scheduler *s, request *r)
{
    failure why;
    int64_t slots = (int64_t)s->params->num_blocks * s->params->block_size;
    int32_t context = s->m->config.max_positions;
    /* The last token is never fed back, so it takes no slot. */
    int64_t room = (slots + 1 < context ? slots + 1 : context) - r->prompt;

    if (!r->max_new_given && room >= 1 && r->max_new > room)
        r->max_new = (int32_t)room;
    if ((int64_t)r->prompt + r->max_new > context) {
        fail(&why, "KVLEAF_INVALID", "%d prompt tokens and %d new ones are over the model's context of %d tokens",
             (int)r->prompt, (int)r->max_new, (int)context);
        answer_error(s, r, &why);
        return;
    }
    int64_t needed = (int64_t)r->prompt + r->max_new - 1;
    if (needed > slots) {
        fail(&why, "KVLEAF_NO_BLOCKS", "%d prompt tokens and %d new ones need %d blocks of %d tokens, the pool has %d",
             (int)r->prompt, (int)r->max_new, (int)blocks_for(s, needed), (int)s->params->block_size,
             (int)s->params->num_blocks);
        answer_error(s, r, &why);
    }
}

static bool extend(scheduler *s, request *r, int32_t count, int64_t *cached, kvleaf_status *status)
{
    const kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = r->tokens + r->extended, .count = count};
    kvleaf_seq_info info = {.struct_size = sizeof info};

    *status = kvleaf_seq_extend(s->cache, r->seq, &tokens, cached);
    if (*status == KVLEAF_NO_BLOCKS)
        return true;
    if (*status != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_extend");
    r->extended += count;
    if (kvleaf_seq_query(s->cache, r->seq, &info) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_query");
    if (info.num_blocks > r->peak_blocks)
        r->peak_blocks = info.num_blocks;
    if (info.blocks_shared > r->shared_blocks)
        r->shared_blocks = info.blocks_shared;
    return true;
}

static bool destroy_sequence(scheduler *s, request *r)
{
    r->extended = 0;
    r->computed = 0;
    return kvleaf_seq_destroy(s->cache, &r->seq) == KVLEAF_OK || fail_kvleaf(s->error, "kvleaf_seq_destroy");
}

/* Whether the pool has the request's blocks and one more for each running request, without which the
 * next block that one of them needs would throw the newcomer out again. */
static bool has_headroom(scheduler *s, const request *r, bool *out)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

    if (kvleaf_cache_query(s->cache, &stats) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_cache_query");
    *out = s->num_running == 0 || blocks_for(s, r->length) + s->num_running <= stats.free + stats.cached;
    return true;
}

/* Tries to give the request a sequence that holds all of its tokens; *entered says whether. */
static bool enter(scheduler *s, request *r, bool *entered)
{
    int64_t cached = 0;
    kvleaf_status status;
    bool headroom = false;

    *entered = false;
    if (!has_headroom(s, r, &headroom))
        return false;
    if (!headroom)
        return true;
    if (kvleaf_seq_create(s->cache, NULL, &r->seq) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_create");
    if (!extend(s, r, r->length, &cached, &status))
        return false;
    if (status == KVLEAF_NO_BLOCKS)
        return destroy_sequence(s, r);
    if (r->length == r->prompt) {
        r->cached = (int32_t)cached;
        sampler_init(&r->sampler, r->temperature, r->top_p, r->seed);
    }
    r->computed = (int32_t)cached;
    r->state = REQUEST_RUNNING;
    s->running[s->num_running++] = r;
    *entered = true;
    return true;
}

/* Lets waiting requests in, in the order of the file, until one does not fit. A request that was
 * preempted is older than those behind it, so it comes first. */
static bool admit(scheduler *s, int32_t *first_waiting)
{
    bool entered = true;

    while (*first_waiting < s->list->count && s->list->items[*first_waiting].state != REQUEST_WAITING)
        ++*first_waiting;
    for (int32_t i = *first_waiting; i < s->list->count && s->num_running < s->params->max_batch && entered; i++)
        if (s->list->items[i].state == REQUEST_WAITING && !enter(s, &s->list->items[i], &entered))
            return false;
    if (s->num_running > s->totals->peak_batch)
        s->totals->peak_batch = s->num_running;
    return true;
}

static void remove_running(scheduler *s, int32_t index)
{
    memmove(&s->running[index], &s->running[index + 1], (size_t)(s->num_running - index - 1) * sizeof *s->running);
    s->num_running--;
}

static bool preempt_youngest(scheduler *s, int32_t *first_waiting)
{
    request *r = s->running[s->num_running - 1];
    int32_t index = (int32_t)(r - s->list->items);

    s->num_running--;
    s->totals->preemptions++;
    r->state = REQUEST_WAITING;
    if (index < *first_waiting)
        *first_waiting = index;
    return destroy_sequence(s, r);
}

/* Gives each decoding request the slot of its newest token. */
static bool extend_running(scheduler *s, int32_t *first_waiting)
{
    for (int32_t i = 0; i < s->num_running; i++) {
        request *r = s->running[i];
        kvleaf_status status = KVLEAF_OK;

        while (r->state == REQUEST_RUNNING && r->extended < r->length) {
            if (!extend(s, r, r->length - r->extended, NULL, &status))
                return false;
            if (status == KVLEAF_NO_BLOCKS && !preempt_youngest(s, first_waiting))
                return false;
        }
    }
    return true;
}

/* -------------------------------------------------------------------------- making a step */

static int64_t decode_cost(int32_t keys)
{
    return (int64_t)(keys + DECODE_SPLIT - 1) / DECODE_SPLIT * DECODE_SPLIT;
}

static void add_entry(scheduler *s, request *r, int32_t rows, kvleaf_family family)
{
    kvleaf_batch_entry *entry = &s->entries[s->num_entries];
    model_step *step = &s->step;

    *entry = (kvleaf_batch_entry){.seq = r->seq, .num_q = rows, .family = family};
    s->members[s->num_entries++] = r;
    for (int32_t i = 0; i < rows; i++) {
        s->tokens[step->rows + i] = r->tokens[r->computed + i];
        s->positions[step->rows + i] = r->computed + i;
    }
    step->rows += rows;
    if (r->computed + rows == r->length) {
        s->logit_members[step->num_logits] = r;
        s->logit_rows[step->num_logits++] = step->rows - 1;
    }
}

/* Every request computes something if the budgets allow: its next prompt rows, or its next own tokens. */
static void make_step(scheduler *s)
{
    int32_t rows_left = s->params->prefill_chunk;
    int64_t keys_left = s->params->max_decode_keys;

    s->step = (model_step){.tokens = s->tokens, .positions = s->positions, .logit_rows = s->logit_rows};
    s->num_entries = 0;
    for (int32_t i = 0; i < s->num_running; i++) {
        request *r = s->running[i];
        int32_t pending = r->length - r->computed, rows;
        bool in_prompt = r->computed < r->prompt;

        if (in_prompt) {
            rows = r->prompt - r->computed < rows_left ? r->prompt - r->computed : rows_left;
            rows_left -= rows;
        } else {
            /* One row is the usual decode, which has a place of its own; more are computed again after
             * a preemption and share the chunk with the prompts. */
            int32_t most = 1 + rows_left;
            int64_t by_keys = keys_left / decode_cost(r->length);
            rows = pending < most ? pending : most;
            rows = rows < by_keys ? rows : (int32_t)by_keys;
            rows_left -= rows > 1 ? rows - 1 : 0;
            keys_left -= rows * decode_cost(r->length);
        }
        if (rows > 0)
            add_entry(s, r, rows, in_prompt ? KVLEAF_FAMILY_PREFILL : KVLEAF_FAMILY_DECODE);
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

static bool is_stop(const request *r, int32_t token)
{
    for (int32_t i = 0; i < r->num_stop_tokens; i++)
        if (r->stop_tokens[i] == token)
            return true;
    return false;
}

static bool finish(scheduler *s, request *r, const char *reason)
{
    print_sample(s->params->out, r, reason);
    r->state = REQUEST_DONE;
    s->totals->finished++;
    for (int32_t i = 0; i < s->num_running; i++)
        if (s->running[i] == r) {
            remove_running(s, i);
            break;
        }
    return destroy_sequence(s, r);
}

static bool take_token(scheduler *s, request *r, const float *logits)
{
    int32_t vocab = s->m->config.vocab_size, at = r->length - r->prompt, token;

    if (r->teacher != NULL) {
        sampler_best(logits, vocab, r->reports[at].best, REPORTED);
        token = r->teacher[at];
    } else {
        token = sampler_next(&r->sampler, logits, vocab, s->scratch);
    }
    if (!isfinite(logits[token]))
        return fail(s->error, "KVLEAF_DEVICE", "the logit of token %d after %d tokens of request %s is %g", (int)token,
                    (int)r->length, r->id, (double)logits[token]);
    r->tokens[r->length++] = token;
    s->totals->generated++;
    if (s->params->stream)
        print_token(s->params->out, r, token);
    if (is_stop(r, token))
        return finish(s, r, "stop");
    return at + 1 < r->max_new || finish(s, r, "length");
}

static bool run_step(scheduler *s)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

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
    if (kvleaf_cache_query(s->cache, &stats) == KVLEAF_OK && stats.used > s->totals->peak_blocks)
        s->totals->peak_blocks = stats.used;
    for (int32_t i = 0; i < s->num_entries; i++) {
        bool decode = s->entries[i].family == KVLEAF_FAMILY_DECODE;
        s->members[i]->computed += s->entries[i].num_q;
        *(decode ? &s->totals->decode_rows : &s->totals->prompt_rows) += s->entries[i].num_q;
    }
    s->totals->steps++;
    if (!model_read_logits(s->m, &s->step, s->logits, s->error))
        return false;
    for (int32_t i = 0; i < s->step.num_logits; i++)
        if (!take_token(s, s->logit_members[i], s->logits + (size_t)i * (size_t)s->m->config.vocab_size))
            return false;
    return true;
}

static void show_progress(scheduler *s)
{
    int32_t done = s->totals->finished + s->totals->errors;
    time_t now = time(NULL);

    if (!s->params->progress || now - s->last_progress < PROGRESS_SECONDS)
        return;
    s->last_progress = now;
    fprintf(stderr, "kvleaf-generate: %d of %d requests done, %d running, %lld tokens generated\n", (int)done,
            (int)s->list->count, (int)s->num_running, (long long)s->totals->generated);
}

static bool run_all(scheduler *s)
{
    int32_t first_waiting = 0;

    s->last_progress = time(NULL);
    for (int32_t i = 0; i < s->list->count; i++)
        check_fits(s, &s->list->items[i]);
    for (;;) {
        if (!extend_running(s, &first_waiting) || !admit(s, &first_waiting))
            return false;
        if (s->num_running == 0)
            break;
        if (!run_step(s))
            return false;
        show_progress(s);
    }
    if (s->totals->finished + s->totals->errors != s->list->count)
        return fail(s->error, "KVLEAF_NO_BLOCKS", "%d requests found no blocks in an empty pool",
                    (int)(s->list->count - s->totals->finished - s->totals->errors));
    return true;
}

bool scheduler_run(request_list *list, model *m, kvleaf_cache *cache, kvleaf_plan *plan, const scheduler_params *params,
                   scheduler_totals *totals, failure *error)
{
    size_t batch = (size_t)params->max_batch, rows = (size_t)m->max_rows, vocab = (size_t)m->config.vocab_size;
    scheduler s = {
        .params = params, .totals = totals, .list = list, .m = m, .cache = cache, .plan = plan, .error = error};

    memset(totals, 0, sizeof *totals);
    s.running = calloc(batch, sizeof *s.running);
    s.entries = calloc(batch, sizeof *s.entries);
    s.members = calloc(batch, sizeof *s.members);
    s.tokens = calloc(rows, sizeof *s.tokens);
    s.positions = calloc(rows, sizeof *s.positions);
    s.logit_rows = calloc(batch, sizeof *s.logit_rows);
    s.logit_members = calloc(batch, sizeof *s.logit_members);
    s.logits = calloc(batch * vocab, sizeof *s.logits);
    s.scratch = calloc(vocab, sizeof *s.scratch);
    bool right = s.running && s.entries && s.members && s.tokens && s.positions && s.logit_rows && s.logit_members &&
                 s.logits && s.scratch;
    right = right ? run_all(&s) : fail(error, "KVLEAF_NO_MEMORY", "no host memory for a batch of %d", (int)batch);
    free(s.running);
    free(s.entries);
    free(s.members);
    free(s.tokens);
    free(s.positions);
    free(s.logit_rows);
    free(s.logit_members);
    free(s.logits);
    free(s.scratch);
    return right;
}
