/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "scheduler_state.h"

static int32_t blocks_for(const scheduler *s, int64_t tokens)
{
    return (int32_t)((tokens + s->params->block_size - 1) / s->params->block_size);
}

static int32_t live_samples(const request *r)
{
    int32_t live = 0;

    for (int32_t i = 0; i < r->width; i++)
        live += !r->samples[i].done;
    return live;
}

/* The sample that computes the prompt for the others. */
static sample *lead_of(request *r)
{
    for (int32_t i = 0; i < r->width; i++)
        if (!r->samples[i].done)
            return &r->samples[i];
    return NULL;
}

/* Blocks of `count` sequences of `tokens` tokens that share the prompt's full blocks. */
static int64_t blocks_together(const scheduler *s, const request *r, int64_t tokens, int32_t count)
{
    int64_t shared = r->prompt / s->params->block_size;

    return shared + count * (blocks_for(s, tokens) - shared);
}

/* ------------------------------------------------------------------- the queue */

static bool before(const request *a, const request *b)
{
    return a->priority != b->priority ? a->priority > b->priority : a->line < b->line;
}

static void put_in_queue(scheduler *s, request *r)
{
    request *at = s->last;

    while (at != NULL && before(r, at))
        at = at->previous;
    r->previous = at;
    r->next = at ? at->next : s->first;
    *(at ? &at->next : &s->first) = r;
    *(r->next ? &r->next->previous : &s->last) = r;
}

static void take_from_queue(scheduler *s, request *r)
{
    *(r->previous ? &r->previous->next : &s->first) = r->next;
    *(r->next ? &r->next->previous : &s->last) = r->previous;
    r->previous = r->next = NULL;
}

static void refuse(scheduler *s, request *r, const failure *why)
{
    print_request_error(s->params->out, r->id, r->line, why);
    s->totals->errors++;
    request_release(r);
}

/* Shortens a length that nobody asked for to what can run; false, with the reason, for what never can. */
static bool check_fits(const scheduler *s, request *r, failure *why)
{
    int64_t full = r->prompt / s->params->block_size, tail = (s->params->num_blocks - full) / r->width;
    int64_t slots = (full + (tail > 0 ? tail : 0)) * s->params->block_size;
    int32_t context = s->m->config.max_positions;
    /* The last token is never fed back, so it takes no slot. */
    int64_t room = (slots + 1 < context ? slots + 1 : context) - r->prompt;

    if (!r->max_new_given && room >= 1 && r->max_new > room)
        r->max_new = (int32_t)room;
    if (r->width > s->params->max_batch)
        return fail(why, "KVLEAF_INVALID", "%s is %d, a batch holds %d (--max-batch)", r->beam ? "beam" : "n",
                    (int)r->width, (int)s->params->max_batch);
    if ((int64_t)r->prompt + r->max_new > context)
        return fail(why, "KVLEAF_INVALID", "%d prompt tokens and %d new ones are over the model's context of %d tokens",
                    (int)r->prompt, (int)r->max_new, (int)context);
    int64_t needed = blocks_together(s, r, (int64_t)r->prompt + r->max_new - 1, r->width);
    if (needed > s->params->num_blocks)
        return fail(why, "KVLEAF_NO_BLOCKS",
                    "%d prompt tokens and %d new ones of %d samples need %lld blocks of %d tokens, the pool has %d",
                    (int)r->prompt, (int)r->max_new, (int)r->width, (long long)needed, (int)s->params->block_size,
                    (int)s->params->num_blocks);
    return true;
}

void admission_queue(scheduler *s, request *r)
{
    failure why;

    s->totals->requests++;
    if (check_fits(s, r, &why))
        put_in_queue(s, r);
    else
        refuse(s, r, &why);
}

/* ------------------------------------------------------------------- blocks */

static bool note_blocks(scheduler *s, sample *at)
{
    kvleaf_seq_info info = {.struct_size = sizeof info};

    if (kvleaf_seq_query(s->cache, at->seq, &info) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_query");
    int32_t held = info.blocks_unique + info.blocks_shared;
    at->peak_blocks = held > at->peak_blocks ? held : at->peak_blocks;
    at->shared_blocks = info.blocks_shared > at->shared_blocks ? info.blocks_shared : at->shared_blocks;
    return true;
}

/* The slots of all tokens that have none; what the prefix cache holds of them counts as computed. */
static bool extend(scheduler *s, sample *at, kvleaf_status *status)
{
    int64_t cached = 0;
    int32_t count = at->length - at->extended;
    const kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = at->tokens + at->extended, .count = count};

    *status = kvleaf_seq_extend(s->cache, at->seq, &tokens, &cached);
    if (*status == KVLEAF_NO_BLOCKS)
        return true;
    if (*status != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_extend");
    at->extended += count;
    at->computed += (int32_t)cached;
    return note_blocks(s, at);
}

static bool drop_sequence(scheduler *s, sample *at)
{
    if (at->seq == 0)
        return true;
    at->extended = at->computed = 0;
    at->ready = false;
    return kvleaf_seq_destroy(s->cache, &at->seq) == KVLEAF_OK || fail_kvleaf(s->error, "kvleaf_seq_destroy");
}

static bool drop_sequences(scheduler *s, request *r)
{
    bool right = true;

    if (r->state == REQUEST_SWAPPED)
        for (int32_t i = 0; i < r->width; i++)
            s->num_swapped -= r->samples[i].seq != 0;
    for (int32_t i = 0; i < r->width; i++)
        right = drop_sequence(s, &r->samples[i]) && right;
    return right;
}

/* ------------------------------------------------------------------- in and out */

/* Whether the pool has the request's blocks and one more for each running sample, without which the next block that one
 * of them needs would throw the newcomer out again. */
static bool has_headroom(scheduler *s, request *r, bool *out)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    int32_t longest = 0, live = live_samples(r);

    for (int32_t i = 0; i < r->width; i++)
        if (!r->samples[i].done && r->samples[i].length > longest)
            longest = r->samples[i].length;
    /* More samples than one each go on in a block of their own. */
    int64_t needed = blocks_together(s, r, live > 1 ? longest + 1 : longest, live);
    if (kvleaf_cache_query(s->cache, &stats) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_cache_query");
    *out = s->num_live == 0 || needed + s->num_live <= stats.free + stats.cached;
    return true;
}

static void put_in_batch(scheduler *s, request *r)
{
    int32_t at = s->num_running++;

    for (; at > 0 && before(r, s->running[at - 1]); at--)
        s->running[at] = s->running[at - 1];
    s->running[at] = r;
    r->state = REQUEST_RUNNING;
    s->num_live += live_samples(r);
}

static void take_from_batch(scheduler *s, request *r)
{
    int32_t at = 0;

    while (s->running[at] != r)
        at++;
    s->num_running--;
    memmove(&s->running[at], &s->running[at + 1], (size_t)(s->num_running - at) * sizeof *s->running);
    s->num_live -= live_samples(r);
}

/* Tries to give the lead a sequence that holds all of its tokens; *entered says whether. */
static bool start(scheduler *s, request *r, bool *entered)
{
    const kvleaf_seq_params params = {.struct_size = sizeof params, .salt = r->salt, .priority = r->priority};
    sample *lead = lead_of(r);
    kvleaf_status status = kvleaf_seq_create(s->cache, &params, &lead->seq);

    *entered = false;
    if (status == KVLEAF_TOO_SMALL)
        return true; /* too many are swapped out */
    if (status != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_create");
    if (!extend(s, lead, &status))
        return false;
    if (status == KVLEAF_NO_BLOCKS)
        return drop_sequence(s, lead);
    if (!r->split)
        r->cached = lead->computed;
    *entered = true;
    return true;
}

static bool swap_in(scheduler *s, request *r, bool *entered)
{
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = s->m->compute->queue};

    *entered = true;
    for (int32_t i = 0; i < r->width && *entered; i++) {
        sample *at = &r->samples[i];
        kvleaf_status status = at->seq ? kvleaf_seq_swap_in(s->cache, at->seq, &exec) : KVLEAF_OK;
        if (status != KVLEAF_OK && status != KVLEAF_NO_BLOCKS)
            return fail_kvleaf(s->error, "kvleaf_seq_swap_in");
        *entered = status == KVLEAF_OK;
    }
    if (*entered)
        for (int32_t i = 0; i < r->width; i++)
            s->num_swapped -= r->samples[i].seq != 0;
    /* Where only some came back, all are computed again. */
    else if (!drop_sequences(s, r))
        return false;
    r->state = REQUEST_WAITING;
    return true;
}

bool admission_enter(scheduler *s)
{
    bool entered = true;

    while (s->first != NULL && entered) {
        request *r = s->first;
        if (s->num_live + live_samples(r) > s->params->max_batch)
            break;
        if (!has_headroom(s, r, &entered))
            return false;
        if (entered && !(r->state == REQUEST_SWAPPED ? swap_in(s, r, &entered) : start(s, r, &entered)))
            return false;
        if (!entered)
            break;
        take_from_queue(s, r);
        put_in_batch(s, r);
    }
    if (s->num_live > s->totals->peak_batch)
        s->totals->peak_batch = s->num_live;
    return true;
}

/* Moves a request's blocks to host memory; *out says whether all of them went. */
static bool swap_out(scheduler *s, request *r, bool *out)
{
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = s->m->compute->queue};
    int32_t sequences = 0;

    *out = s->params->swap && s->num_swapped + live_samples(r) <= s->params->max_batch;
    for (int32_t i = 0; i < r->width && *out; i++) {
        sample *at = &r->samples[i];
        if (at->seq == 0)
            continue;
        kvleaf_status status = kvleaf_seq_swap_out(s->cache, at->seq, &exec);
        if (status != KVLEAF_OK && status != KVLEAF_NO_BLOCKS)
            return fail_kvleaf(s->error, "kvleaf_seq_swap_out");
        *out = status == KVLEAF_OK;
        sequences += *out;
    }
    if (!*out)
        return true;
    s->num_swapped += sequences;
    s->totals->swaps++;
    r->state = REQUEST_SWAPPED;
    return true;
}

static bool preempt_last(scheduler *s)
{
    request *r = s->running[s->num_running - 1];
    bool swapped = false;

    s->totals->preemptions++;
    take_from_batch(s, r);
    r->state = REQUEST_WAITING;
    put_in_queue(s, r);
    return swap_out(s, r, &swapped) && (swapped || drop_sequences(s, r));
}

/* A sample without a sequence forks from the lead, once that has computed the prompt. */
static bool fork_from_lead(scheduler *s, request *r, sample *at)
{
    sample *lead = lead_of(r);

    if (at->seq != 0 || !r->split || lead->computed < r->prompt)
        return true;
    if (kvleaf_seq_fork(s->cache, lead->seq, r->prompt, &at->seq) != KVLEAF_OK)
        return fail_kvleaf(s->error, "kvleaf_seq_fork");
    at->extended = at->computed = r->prompt;
    return note_blocks(s, at) && note_blocks(s, lead);
}

bool admission_extend(scheduler *s)
{
    for (int32_t k = 0; k < s->num_running; k++) {
        request *r = s->running[k];
        for (int32_t i = 0; i < r->width && r->state == REQUEST_RUNNING; i++) {
            sample *at = &r->samples[i];
            kvleaf_status status = KVLEAF_OK;

            if (at->done)
                continue;
            if (!fork_from_lead(s, r, at))
                return false;
            while (r->state == REQUEST_RUNNING && at->seq != 0 && at->extended < at->length) {
                if (!extend(s, at, &status))
                    return false;
                if (status == KVLEAF_NO_BLOCKS && !preempt_last(s))
                    return false;
            }
        }
    }
    return true;
}

/* A lead that ends before the others have forked leaves its sequence, with what is computed of the prompt, to the next
 * of them. */
static bool hand_over(scheduler *s, request *r, sample *from)
{
    sample *next = lead_of(r);

    if (from->seq == 0 || next == NULL || next->seq != 0)
        return true;
    next->seq = from->seq;
    next->extended = r->prompt;
    next->computed = from->computed < r->prompt ? from->computed : r->prompt;
    from->seq = 0;
    return kvleaf_seq_truncate(s->cache, next->seq, r->prompt) == KVLEAF_OK ||
           fail_kvleaf(s->error, "kvleaf_seq_truncate");
}

bool admission_end_sample(scheduler *s, request *r, int32_t index)
{
    sample *at = &r->samples[index];

    at->done = true;
    s->num_live--;
    return hand_over(s, r, at) && drop_sequence(s, at);
}

bool admission_leave(scheduler *s, request *r)
{
    if (r->state == REQUEST_RUNNING)
        take_from_batch(s, r);
    else
        take_from_queue(s, r);
    bool right = drop_sequences(s, r);
    request_release(r);
    return right;
}

request *admission_find(scheduler *s, const char *id)
{
    for (int32_t i = 0; i < s->num_running; i++)
        if (strcmp(s->running[i]->id, id) == 0)
            return s->running[i];
    request *at = s->first;
    while (at != NULL && strcmp(at->id, id) != 0)
        at = at->next;
    return at;
}
