/* SPDX-License-Identifier: Apache-2.0 */
/* One run: continuous batching of all requests, each token's time taken. */
#include "bench/serving.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SAMPLES = 16 };

typedef struct active {
    serving_length length;
    kvleaf_seq seqs[MAX_SAMPLES];
    int num_seqs; /* 1 until the prompt is computed, where samples share it */
    int extended; /* tokens of each sequence that have a slot */
    int computed;
    int rows; /* of this step, each sequence */
} active;

typedef struct run_state {
    const bench_rig *rig;
    serving_compute *compute;
    const serving_options *options;
    const serving_length *lengths;
    const serving_case *run;
    kvleaf_pool *pool;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    active *running; /* [max_batch], oldest first */
    int num_running, next;
    int32_t *positions, *logit_rows;
    kvleaf_batch_entry *entries;
    int rows, num_entries, num_logits;
    double *times; /* between tokens, of every token generated */
    int64_t num_times, most_times;
    double waste, saved, sequences;
    int64_t waiting_steps;
    uint64_t random;
    serving_outcome *out;
} run_state;

static int blocks_for(const run_state *s, int tokens)
{
    return (tokens + s->options->shape.block_size - 1) / s->options->shape.block_size;
}

static int sequences_of(const run_state *s)
{
    int count = 0;
    for (int i = 0; i < s->num_running; i++)
        count += s->running[i].num_seqs;
    return count;
}

/* Tokens that an admitted sequence takes slots for at once. */
static int slots_at_entry(const run_state *s, const serving_length *length)
{
    return s->run->policy == SERVING_PAGED      ? length->prompt
           : s->run->policy == SERVING_RESERVED ? s->options->max_length
                                                : length->prompt + length->output;
}

static kvleaf_status extend(run_state *s, kvleaf_seq seq, int count)
{
    const kvleaf_tokens tokens = {.struct_size = sizeof(tokens), .count = count};
    return kvleaf_seq_extend(s->cache, seq, &tokens, NULL);
}

static int destroy(run_state *s, active *a)
{
    for (int i = 0; i < a->num_seqs; i++)
        if (kvleaf_seq_destroy(s->cache, &a->seqs[i]) != KVLEAF_OK)
            return cli_fail(s->rig->program, "kvleaf_seq_destroy");
    a->num_seqs = 0;
    return CLI_OK;
}

/* Makes the sequences of a request; *entered says whether their blocks were there. */
static int start(run_state *s, active *a, bool *entered)
{
    int count = s->run->separate ? s->run->samples : 1;
    *a = (active){.length = s->lengths[s->next], .extended = slots_at_entry(s, &s->lengths[s->next])};
    *entered = true;
    for (int i = 0; i < count && *entered; i++) {
        if (kvleaf_seq_create(s->cache, NULL, &a->seqs[i]) != KVLEAF_OK)
            return cli_fail(s->rig->program, "kvleaf_seq_create");
        a->num_seqs++;
        kvleaf_status status = extend(s, a->seqs[i], a->extended);
        if (status != KVLEAF_OK && status != KVLEAF_NO_BLOCKS)
            return cli_fail(s->rig->program, "kvleaf_seq_extend");
        *entered = status == KVLEAF_OK;
    }
    return *entered ? CLI_OK : destroy(s, a);
}

/* Lets requests in while there are places, and blocks for them and a next one for each sequence that runs. */
static int admit(run_state *s)
{
    bool entered = true;
    while (entered && s->next < s->options->requests) {
        kvleaf_blocks_stats stats = {.struct_size = sizeof(stats)};
        int wanted = blocks_for(s, slots_at_entry(s, &s->lengths[s->next])) * (s->run->separate ? s->run->samples : 1);
        int sequences = sequences_of(s), places = sequences + s->run->samples;
        if (kvleaf_cache_query(s->cache, &stats) != KVLEAF_OK)
            return cli_fail(s->rig->program, "kvleaf_cache_query");
        if (places > s->run->max_batch || (s->num_running > 0 && wanted + sequences > stats.free + stats.cached))
            break;
        if (start(s, &s->running[s->num_running], &entered) != CLI_OK)
            return CLI_FAILED;
        s->num_running += entered;
        s->next += entered;
    }
    return CLI_OK;
}

/* The youngest request gives its blocks back and waits again. */
static int preempt(run_state *s)
{
    s->next--;
    return destroy(s, &s->running[--s->num_running]);
}

/* Gives each sequence that has computed all of its tokens the slot of the next one. */
/* Gives each sequence that has computed all of its tokens the slot of the next one. */
static int extend_all(run_state *s)
{
    for (int k = 0; k < s->num_running; k++) {
        active *a = &s->running[k];
        int done = a->extended == a->computed ? 0 : a->num_seqs;
        while (k < s->num_running && done < a->num_seqs) {
            kvleaf_status status = extend(s, a->seqs[done], 1);
            if (status == KVLEAF_OK)
                a->extended += ++done == a->num_seqs;
            else if (status != KVLEAF_NO_BLOCKS)
                return cli_fail(s->rig->program, "kvleaf_seq_extend");
            else if (preempt(s) != CLI_OK)
                return CLI_FAILED;
        }
    }
    return CLI_OK;
}

static bool in_prompt(const active *a)
{
    return a->computed < a->length.prompt;
}

static void add(run_state *s, const active *a, int index)
{
    s->entries[s->num_entries++] = (kvleaf_batch_entry){
        .seq = a->seqs[index], .num_q = a->rows, .family = in_prompt(a) ? KVLEAF_FAMILY_PREFILL : KVLEAF_FAMILY_DECODE};
    for (int i = 0; i < a->rows; i++)
        s->positions[s->rows + i] = a->computed + i;
    s->rows += a->rows;
    if (a->computed + a->rows >= a->length.prompt)
        s->logit_rows[s->num_logits++] = s->rows - 1;
}

/* A token of every sequence behind its prompt, and as many prompt rows as a step may have. */
static void make_step(run_state *s)
{
    int left = s->options->chunk;
    s->rows = s->num_entries = s->num_logits = 0;
    for (int k = 0; k < s->num_running; k++) {
        active *a = &s->running[k];
        int share = left / a->num_seqs, prompt = a->length.prompt - a->computed;
        a->rows = !in_prompt(a) ? 1 : prompt < share ? prompt : share;
        for (int i = 0; a->rows > 0 && i < a->num_seqs; i++)
            add(s, a, i);
        left -= in_prompt(a) ? a->rows * a->num_seqs : 0;
    }
}

static int run_step(run_state *s, double *seconds)
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = s->rig->queue};
    const serving_step step = {s->plan, s->rows, s->num_logits, s->positions, s->logit_rows};
    double begin = bench_seconds();
    if (kvleaf_plan_build(s->plan, s->cache, s->entries, s->num_entries, &exec) != KVLEAF_OK)
        return cli_fail(s->rig->program, "kvleaf_plan_build");
    if (serving_compute_run(s->compute, &step) != CLI_OK)
        return CLI_FAILED;
    if (kvleaf_plan_commit(s->plan, NULL) != KVLEAF_OK)
        return cli_fail(s->rig->program, "kvleaf_plan_commit");
    *seconds = bench_seconds() - begin;
    return CLI_OK;
}

/* Blocks in use against tokens computed and against what the tables name. */
static int account(run_state *s)
{
    kvleaf_blocks_stats stats = {.struct_size = sizeof(stats)};
    int64_t named = 0, reserved = 0;
    if (kvleaf_cache_query(s->cache, &stats) != KVLEAF_OK)
        return cli_fail(s->rig->program, "kvleaf_cache_query");
    for (int k = 0; k < s->num_running; k++) {
        const active *a = &s->running[k];
        named += (int64_t)blocks_for(s, a->extended) * a->num_seqs;
        reserved += (int64_t)(a->extended - a->computed - a->rows) * a->num_seqs;
    }
    int64_t slots = (int64_t)stats.used * s->options->shape.block_size;
    if (stats.used > 0) {
        s->waste += (double)(stats.slots_wasted + reserved) / (double)slots;
        s->saved += 1 - (double)stats.used / (double)named;
    }
    int sequences = sequences_of(s);
    s->out->peak_sequences = sequences > s->out->peak_sequences ? sequences : s->out->peak_sequences;
    if (s->next < s->options->requests) {
        s->sequences += sequences;
        s->waiting_steps++;
    }
    s->out->steps++;
    return CLI_OK;
}

/* The prompt is there: the samples fork from it. */
static int split(run_state *s, active *a)
{
    while (a->num_seqs < s->run->samples) {
        if (kvleaf_seq_fork(s->cache, a->seqs[0], a->length.prompt, &a->seqs[a->num_seqs]) != KVLEAF_OK)
            return cli_fail(s->rig->program, "kvleaf_seq_fork");
        a->num_seqs++;
    }
    return CLI_OK;
}

/* As beam search does: each beam continues the best with probability 1/2, the next with 1/4, and so on. */
static int rearrange(run_state *s, active *a)
{
    int32_t parents[MAX_SAMPLES];
    for (int i = 0; i < a->num_seqs; i++) {
        s->random = s->random * 6364136223846793005u + 1442695040888963407u;
        uint64_t bits = s->random >> 33;
        for (parents[i] = 0; parents[i] < a->num_seqs - 1 && (bits & 1); bits >>= 1)
            parents[i]++;
    }
    return kvleaf_seq_rearrange(s->cache, a->seqs, parents, a->num_seqs) == KVLEAF_OK
               ? CLI_OK
               : cli_fail(s->rig->program, "kvleaf_seq_rearrange");
}

static int note_tokens(run_state *s, int count, double seconds)
{
    s->out->generated += count;
    for (int i = 0; i < count; i++) {
        if (s->num_times == s->most_times) {
            int64_t most = s->most_times ? 2 * s->most_times : 65536;
            double *times = realloc(s->times, (size_t)most * sizeof(*times));
            if (!times) {
                fprintf(stderr, "kvleaf-bench: no memory for the times\n");
                return CLI_FAILED;
            }
            s->times = times;
            s->most_times = most;
        }
        s->times[s->num_times++] = seconds;
    }
    return CLI_OK;
}

static int take_results(run_state *s, double seconds)
{
    for (int k = 0; k < s->num_running; k++) {
        active *a = &s->running[k];
        bool prompt = in_prompt(a);
        a->computed += a->rows;
        if (!prompt && note_tokens(s, a->num_seqs, seconds) != CLI_OK)
            return CLI_FAILED;
        if (prompt && !in_prompt(a) && split(s, a) != CLI_OK)
            return CLI_FAILED;
        if (!prompt && s->run->beam && !s->run->separate && rearrange(s, a) != CLI_OK)
            return CLI_FAILED;
    }
    for (int k = 0; k < s->num_running;) {
        active *a = &s->running[k];
        if (a->computed < a->length.prompt + a->length.output) {
            k++;
            continue;
        }
        if (destroy(s, a) != CLI_OK)
            return CLI_FAILED;
        s->num_running--;
        memmove(a, a + 1, (size_t)(s->num_running - k) * sizeof(*a));
    }
    return CLI_OK;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void summarise(run_state *s, double seconds)
{
    serving_outcome *out = s->out;
    out->waste = s->waste / (double)out->steps;
    out->saved = s->saved / (double)out->steps;
    out->sequences = s->waiting_steps ? s->sequences / (double)s->waiting_steps : out->peak_sequences;
    out->tokens_per_second = (double)out->generated / seconds;
    qsort(s->times, (size_t)s->num_times, sizeof(*s->times), compare_doubles);
    out->p50_ms = s->times[s->num_times / 2] * 1e3;
    out->p99_ms = s->times[s->num_times * 99 / 100] * 1e3;
}

static int run_all(run_state *s)
{
    double begin = bench_seconds(), seconds = 0;
    while (s->next < s->options->requests || s->num_running > 0) {
        if (extend_all(s) != CLI_OK || admit(s) != CLI_OK)
            return CLI_FAILED;
        if (s->num_running == 0) {
            fprintf(stderr, "kvleaf-bench: request %d needs more than the pool's %d blocks\n", s->next,
                    s->options->blocks);
            return CLI_FAILED;
        }
        make_step(s);
        if (run_step(s, &seconds) != CLI_OK || account(s) != CLI_OK || take_results(s, seconds) != CLI_OK)
            return CLI_FAILED;
        cli_progress("serving", s->next, s->options->requests);
    }
    summarise(s, bench_seconds() - begin);
    return CLI_OK;
}

static int make_state(run_state *s)
{
    size_t batch = (size_t)s->run->max_batch, rows = batch + (size_t)s->options->chunk;
    s->running = calloc(batch, sizeof(*s->running));
    s->entries = calloc(batch, sizeof(*s->entries));
    s->logit_rows = calloc(batch, sizeof(*s->logit_rows));
    s->positions = calloc(rows, sizeof(*s->positions));
    if (!s->running || !s->entries || !s->logit_rows || !s->positions) {
        fprintf(stderr, "kvleaf-bench: no memory for a batch of %d\n", s->run->max_batch);
        return CLI_FAILED;
    }
    if (serving_compute_cache(s->compute, s->run->max_batch + MAX_SAMPLES, &s->pool, &s->cache) != CLI_OK)
        return CLI_FAILED;
    const kvleaf_plan_params plan = {.struct_size = sizeof(plan),
                                     .max_entries = s->run->max_batch,
                                     .max_tokens = (int32_t)rows,
                                     .max_decode_keys = (int64_t)batch * s->options->max_length};
    return kvleaf_plan_create(s->cache, &plan, &s->plan) == KVLEAF_OK ? CLI_OK
                                                                      : cli_fail(s->rig->program, "kvleaf_plan_create");
}

int serving_run(const bench_rig *rig, serving_compute *compute, const serving_options *options,
                const serving_length *lengths, const serving_case *run, serving_outcome *out)
{
    run_state s = {.rig = rig, .compute = compute, .options = options, .lengths = lengths, .run = run, .out = out};
    *out = (serving_outcome){0};
    s.random = options->seed;
    int status = make_state(&s);
    if (status == CLI_OK)
        status = run_all(&s);
    kvleaf_plan_destroy(&s.plan);
    kvleaf_cache_destroy(&s.cache);
    kvleaf_pool_destroy(&s.pool);
    free(s.running);
    free(s.entries);
    free(s.logit_rows);
    free(s.positions);
    free(s.times);
    return status;
}
