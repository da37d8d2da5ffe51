/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/serving.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST_SAMPLES = 6, HALVINGS = 4 };

static const char *const policy_names[] = {"paged", "reserved", "known"};

static void print_row(const bench_rig *rig, const char *name, const serving_case *run, const serving_outcome *out)
{
    if (!rig->program->json) {
        printf("%-22s %5d  %6.1f%%  %9.1f %5d  %9.0f  %8.1f %8.1f  %6.1f%%  %7lld\n", name, run->max_batch,
               100 * out->waste, out->sequences, out->peak_sequences, out->tokens_per_second, out->p50_ms, out->p99_ms,
               100 * out->saved, (long long)out->steps);
        fflush(stdout);
        return;
    }
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "bench", "serving");
    cJSON_AddStringToObject(row, "device", rig->caps.device_name);
    cJSON_AddStringToObject(row, "run", name);
    cJSON_AddStringToObject(row, "policy", policy_names[run->policy]);
    cJSON_AddNumberToObject(row, "samples", run->samples);
    cJSON_AddBoolToObject(row, "beam", run->beam);
    cJSON_AddBoolToObject(row, "sharing", !run->separate);
    cJSON_AddNumberToObject(row, "max_batch", run->max_batch);
    cJSON_AddNumberToObject(row, "waste", out->waste);
    cJSON_AddNumberToObject(row, "sequences", out->sequences);
    cJSON_AddNumberToObject(row, "peak_sequences", out->peak_sequences);
    cJSON_AddNumberToObject(row, "tokens_per_second", out->tokens_per_second);
    cJSON_AddNumberToObject(row, "p50_ms", out->p50_ms);
    cJSON_AddNumberToObject(row, "p99_ms", out->p99_ms);
    cJSON_AddNumberToObject(row, "saved", out->saved);
    cJSON_AddNumberToObject(row, "generated", (double)out->generated);
    cJSON_AddNumberToObject(row, "steps", (double)out->steps);
    cli_row(row);
}

typedef struct experiment {
    const bench_rig *rig;
    const serving_options *options;
    serving_compute *compute;
    serving_length *lengths;
    int most; /* sequences that the pool could hold */
} experiment;

static int run(const experiment *e, const char *name, const serving_case *wanted, serving_outcome *out)
{
    int status = serving_run(e->rig, e->compute, e->options, e->lengths, wanted, out);
    if (status == CLI_OK)
        print_row(e->rig, name, wanted, out);
    return status;
}

/* Paged with the largest batch whose 99th percentile is no longer than the reservation's, found by halving between what
 * the reservation held and what the whole pool holds (which was run before, in *out). */
static int run_equal(const experiment *e, const serving_outcome *reserved, serving_outcome *out)
{
    int fitting = reserved->peak_sequences, beyond = out->peak_sequences;
    if (out->p99_ms <= reserved->p99_ms)
        return CLI_OK;
    bool found = false;
    for (int tried = 0; tried < HALVINGS || !found; tried++) {
        serving_outcome outcome;
        serving_case paged = {.policy = SERVING_PAGED, .max_batch = (fitting + beyond) / 2, .samples = 1};
        if (tried >= HALVINGS || paged.max_batch <= fitting)
            paged.max_batch = fitting;
        if (run(e, "paged, equal latency", &paged, &outcome) != CLI_OK)
            return CLI_FAILED;
        bool fits = outcome.p99_ms <= reserved->p99_ms || paged.max_batch == fitting;
        *(fits ? &fitting : &beyond) = paged.max_batch;
        if (fits) {
            *out = outcome;
            found = true;
        }
        if (beyond - fitting <= 1 && found)
            break;
    }
    return CLI_OK;
}

/* Several samples or beams a request: with sharing and without. The most that sharing saved and gained. */
static int run_sharing(const experiment *e, double *saved, double *gained)
{
    *saved = *gained = 0;
    for (int beam = 0; beam < 2; beam++) {
        for (int samples = 2; samples <= MOST_SAMPLES; samples += 2) {
            serving_case wanted = {
                .policy = SERVING_PAGED, .max_batch = e->most, .samples = samples, .beam = beam != 0};
            serving_outcome shared, separate;
            char name[64];
            snprintf(name, sizeof(name), "%s %d, shared", beam ? "beam" : "n =", samples);
            if (run(e, name, &wanted, &shared) != CLI_OK)
                return CLI_FAILED;
            wanted.separate = true;
            snprintf(name, sizeof(name), "%s %d, separate", beam ? "beam" : "n =", samples);
            if (run(e, name, &wanted, &separate) != CLI_OK)
                return CLI_FAILED;
            double gain = shared.tokens_per_second / separate.tokens_per_second;
            *saved = shared.saved > *saved ? shared.saved : *saved;
            *gained = gain > *gained ? gain : *gained;
        }
    }
    return CLI_OK;
}

static void print_end(const experiment *e, const serving_outcome *paged, const serving_outcome *equal,
                      const serving_outcome *reserved, double saved, double gained)
{
    double ratio = equal->tokens_per_second / reserved->tokens_per_second;
    if (!e->rig->program->json) {
        printf("\nslots wasted: %s%.1f%%%s paged, %.1f%% reserved. Sequences at once: %s%.1f%s paged, %.1f reserved.\n"
               "Tokens a second at the reservation's 99th percentile: %s%.2f%s times as many.\n",
               cli_colour(CLI_BOLD), 100 * paged->waste, cli_colour(CLI_PLAIN), 100 * reserved->waste,
               cli_colour(CLI_BOLD), paged->sequences, cli_colour(CLI_PLAIN), reserved->sequences, cli_colour(CLI_BOLD),
               ratio, cli_colour(CLI_PLAIN));
        if (!e->options->no_sharing)
            printf("Sharing saves up to %s%.0f%%%s of the blocks and gives up to %.2f times the tokens a second.\n",
                   cli_colour(CLI_BOLD), 100 * saved, cli_colour(CLI_PLAIN), gained);
        return;
    }
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "bench", "serving");
    cJSON_AddStringToObject(row, "device", e->rig->caps.device_name);
    cJSON_AddStringToObject(row, "run", "summary");
    cJSON_AddNumberToObject(row, "waste_paged", paged->waste);
    cJSON_AddNumberToObject(row, "waste_reserved", reserved->waste);
    cJSON_AddNumberToObject(row, "throughput_ratio", ratio);
    cJSON_AddNumberToObject(row, "sequences_paged", paged->sequences);
    cJSON_AddNumberToObject(row, "sequences_reserved", reserved->sequences);
    if (!e->options->no_sharing) {
        cJSON_AddNumberToObject(row, "sharing_saved", saved);
        cJSON_AddNumberToObject(row, "sharing_gained", gained);
    }
    cli_row(row);
}

static int run_experiment(const experiment *e)
{
    serving_case wanted = {.policy = SERVING_RESERVED, .max_batch = e->most, .samples = 1};
    serving_outcome reserved, known, paged, equal;
    double saved = 0, gained = 0;
    if (!e->rig->program->json)
        printf(
            "%s, %d blocks of %d tokens, %d requests, at most %d tokens each, %s\n\n%-22s %5s  %7s  %9s %5s  %9s  %8s "
            "%8s  %7s  %7s\n",
            e->rig->caps.device_name, e->options->blocks, e->options->shape.block_size, e->options->requests,
            e->options->max_length, e->options->model ? e->options->model : "attention alone", "run", "batch", "wasted",
            "sequences", "peak", "tokens/s", "p50 ms", "p99 ms", "saved", "steps");
    if (run(e, "reserved, longest", &wanted, &reserved) != CLI_OK)
        return CLI_FAILED;
    wanted.policy = SERVING_KNOWN;
    if (run(e, "reserved, true length", &wanted, &known) != CLI_OK)
        return CLI_FAILED;
    wanted.policy = SERVING_PAGED;
    if (run(e, "paged", &wanted, &paged) != CLI_OK)
        return CLI_FAILED;
    equal = paged;
    if (run_equal(e, &reserved, &equal) != CLI_OK)
        return CLI_FAILED;
    if (!e->options->no_sharing && run_sharing(e, &saved, &gained) != CLI_OK)
        return CLI_FAILED;
    print_end(e, &paged, &equal, &reserved, saved, gained);
    return CLI_OK;
}

static serving_options resolve(const bench_rig *rig, const serving_options *asked)
{
    serving_options options = *asked;
    if (options.shape.kv_dtype < 0)
        options.shape.kv_dtype = rig->gpu ? KVLEAF_F16 : KVLEAF_F32;
    if (options.shape.q_dtype < 0)
        options.shape.q_dtype = options.model ? KVLEAF_F32 : options.shape.kv_dtype;
    int whole = (options.max_length + options.shape.block_size - 1) / options.shape.block_size;
    if (!options.requests)
        options.requests = rig->gpu ? 1000 : 40;
    if (!options.blocks)
        options.blocks = whole * (rig->gpu ? 64 : 8);
    if (!options.layers)
        options.layers = rig->gpu ? 4 : 1;
    return options;
}

int bench_serving(bench_rig *rig, const serving_options *asked)
{
    serving_options options = resolve(rig, asked);
    experiment e = {.rig = rig, .options = &options};
    /* A sequence of a prompt and its output takes two blocks at least, most take more. */
    e.most = options.blocks / 2 < 1024 ? options.blocks / 2 : 1024;
    e.lengths = calloc((size_t)options.requests, sizeof(*e.lengths));
    int status = e.lengths ? serving_lengths(&options, e.lengths, options.requests) : CLI_FAILED;
    if (status == CLI_OK)
        status = serving_compute_create(rig, &options, e.most + options.chunk, e.most, &e.compute);
    if (status == CLI_OK)
        status = run_experiment(&e);
    serving_compute_destroy(e.compute);
    free(e.lengths);
    return status;
}
