/* SPDX-License-Identifier: Apache-2.0 */
/* kvleaf-check: passes, their results as a table or as JSON rows. */
#include "check/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/cli.h"

enum {
    MAX_PASSES = 16,
    MAX_PRINTED = 3 /* failures of a variant that are told at length */
};

/* What is known of one variant so far. */
typedef struct tally {
    int passed, failed, skipped;
    double worst, tolerance, worst_lse;
    kvleaf_dtype kv_dtype;
    char why[256]; /* of the last skip */
} tally;

static struct {
    cli program;
    check_options options;
    int passed, failed, skipped;
} state;

static double seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool asked_for(const kvl_variant *variant)
{
    char name[128];
    if (!state.options.variant)
        return true;
    snprintf(name, sizeof(name), "%s.%s", variant->family, variant->name);
    return kvl_glob(state.options.variant, name);
}

/* The names of the tables' variants, each with the operations that have it. */
static int collect_passes(check_pass passes[MAX_PASSES])
{
    int num_passes = 0;
    for (int op = 0; op < KVL_OPERATIONS; op++) {
        int count;
        const kvl_variant *variants = kvl_variants((kvl_operation)op, &count);
        for (int i = 0; i < count; i++) {
            int at = 0;
            if (!asked_for(&variants[i]))
                continue;
            while (at < num_passes && strcmp(passes[at].name, variants[i].name) != 0)
                at++;
            if (at == MAX_PASSES)
                continue;
            if (at == num_passes)
                passes[num_passes++] = (check_pass){.name = variants[i].name};
            passes[at].variants[op] = &variants[i];
            passes[at].fixed |= variants[i].fixed;
        }
    }
    return num_passes;
}

/* The pass's variants where it has one, the portable ones elsewhere. */
static void force_variants(const check_pass *pass, char *text, size_t size)
{
    size_t used = 0;
    for (int op = 0; op < KVL_OPERATIONS; op++) {
        int written = snprintf(text + used, size - used, "%s%s.%s.*", op ? "," : "",
                               kvl_operation_name((kvl_operation)op), pass->variants[op] ? pass->name : "portable");
        used += written > 0 ? (size_t)written : 0;
    }
}

/* `nth`: which failure of the variant it is. */
static void print_failure(const check_pass *pass, int op, const check_shape *shape, const check_result *result, int nth)
{
    char described[512], repeat[512];
    int used = 0;
    check_describe(&shape->geometry, described, sizeof(described));
    used = snprintf(repeat, sizeof(repeat), "kvleaf-check --variant %s.%s --seed %llu --case %d",
                    kvl_operation_name((kvl_operation)op), pass->name, (unsigned long long)state.options.seed,
                    shape->index);
    if (state.options.count)
        used += snprintf(repeat + used, sizeof(repeat) - (size_t)used, " --count %d", state.options.count);
    if (state.program.device)
        used += snprintf(repeat + used, sizeof(repeat) - (size_t)used, " --device '%s'", state.program.device);
    snprintf(repeat + used, sizeof(repeat) - (size_t)used, "%s%s", state.options.all ? " --all" : "",
             state.options.small ? " --small" : "");
    if (nth == MAX_PRINTED + 1 && !state.program.json)
        fprintf(stderr, "FAILED %s.%s, case %d and maybe more\n", kvl_operation_name((kvl_operation)op), pass->name,
                shape->index);
    if (nth <= MAX_PRINTED)
        fprintf(stderr, "FAILED %s.%s, case %d: %s\n  %s\n  batch (queries:keys causal/none family): %s\n  %s\n",
                kvl_operation_name((kvl_operation)op), pass->name, shape->index, result->report.text, described,
                result->batch, repeat);
    if (!state.program.json)
        return;
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "failure", pass->variants[op]->family);
    cJSON_AddStringToObject(row, "variant", pass->name);
    cJSON_AddNumberToObject(row, "case", shape->index);
    cJSON_AddStringToObject(row, "message", result->report.text);
    cJSON_AddStringToObject(row, "shape", described);
    cJSON_AddStringToObject(row, "batch", result->batch);
    cJSON_AddStringToObject(row, "repeat", repeat);
    cli_row(row);
}

static void count_result(tally *counts, const check_shape *shape, const check_result *result)
{
    if (result->report.passed)
        counts->passed++;
    else
        counts->failed++;
    bool closer =
        counts->tolerance == 0 || result->report.worst * counts->tolerance > counts->worst * result->report.tolerance;
    if (result->report.tolerance > 0 && closer) {
        counts->worst = result->report.worst;
        counts->tolerance = result->report.tolerance;
        counts->kv_dtype = shape->geometry.kv_dtype;
    }
    if (result->report.worst_lse > counts->worst_lse)
        counts->worst_lse = result->report.worst_lse;
}

/* A variant that serves the shape by its own word must be the one in use. That of a folder which needs nothing of the
 * device must build everywhere; others may fail their trial, and then the case is skipped. */
static bool in_use(const check_rig *rig, const check_pass *pass, int op, check_result *result, tally *counts)
{
    char key[128];
    kvl_geometry geometry = check_geometry(&rig->shape->geometry);
    kvl_chosen chosen;
    const char *used = kvleaf_attention_variant(rig->attention, kvl_operation_name((kvl_operation)op));
    kvl_variant_key(pass->variants[op], &geometry, key, sizeof(key));
    if (strcmp(used, key) == 0)
        return true;
    memset(result, 0, sizeof(*result));
    kvleaf_status status = kvl_variant_try(rig->device, pass->variants[op], &geometry, &chosen);
    const char *why = status == KVLEAF_OK ? "it was forced" : kvleaf_last_error()->message;
    bool generic = strncmp(pass->variants[op]->file, "portable/", 9) == 0;
    if (status == KVLEAF_OK || generic) {
        problem_fail(&result->report, "%s is in use instead of %s: %s", used, key, why);
        return false;
    }
    counts->skipped++;
    snprintf(counts->why, sizeof(counts->why), "%s", why);
    result->report.passed = true;
    return false;
}

static void run_operation(check_rig *rig, const check_pass *pass, int op, tally *counts)
{
    check_result result;
    rig->variant = pass->variants[op];
    bool usable = in_use(rig, pass, op, &result, counts);
    if (usable)
        check_run(rig, (kvl_operation)op, &result);
    if (usable || !result.report.passed)
        count_result(counts, rig->shape, &result);
    if (!result.report.passed)
        print_failure(pass, op, rig->shape, &result, counts->failed);
}

/* One shape: an attention object, then every operation of the pass that serves it. */
static void run_shape(check_rig *rig, const check_pass *pass, const kvleaf_caps *caps, tally counts[KVL_OPERATIONS])
{
    int32_t row = check_long_row(pass->variants[KVL_DECODE], &rig->shape->geometry);
    kvleaf_attention_params params = problem_attention_params(&rig->shape->geometry, CHECK_MAX_SEQS, CHECK_MAX_TOKENS,
                                                              row > CHECK_MAX_CONTEXT ? row : CHECK_MAX_CONTEXT);
    kvl_geometry geometry = check_geometry(&rig->shape->geometry);
    rig->attention = NULL;
    bool made = kvleaf_attention_create(rig->device, &params, &rig->attention) == KVLEAF_OK;
    for (int op = 0; op < KVL_OPERATIONS; op++) {
        check_result result = {.report = {.passed = false}};
        if (!pass->variants[op] || pass->variants[op]->refuses(caps, &geometry))
            continue;
        if (made) {
            run_operation(rig, pass, op, &counts[op]);
            continue;
        }
        problem_fail(&result.report, "no attention object: %s: %s", kvleaf_last_error()->message,
                     kvleaf_last_error()->build_log);
        count_result(&counts[op], rig->shape, &result);
        print_failure(pass, op, rig->shape, &result, counts[op].failed);
    }
    kvleaf_attention_destroy(&rig->attention);
}

static void print_variant(const kvl_variant *variant, const tally *counts, double time)
{
    char name[128], error[64] = "";
    snprintf(name, sizeof(name), "%s.%s", variant->family, variant->name);
    if (state.program.json) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddStringToObject(row, "check", name);
        cJSON_AddNumberToObject(row, "passed", counts->passed);
        cJSON_AddNumberToObject(row, "failed", counts->failed);
        cJSON_AddNumberToObject(row, "skipped", counts->skipped);
        cJSON_AddNumberToObject(row, "worst_error", counts->worst);
        cJSON_AddNumberToObject(row, "tolerance", counts->tolerance);
        cJSON_AddNumberToObject(row, "worst_lse", counts->worst_lse);
        cJSON_AddNumberToObject(row, "seconds", time);
        if (counts->why[0])
            cJSON_AddStringToObject(row, "why_skipped", counts->why);
        cli_row(row);
        return;
    }
    if (counts->tolerance > 0)
        snprintf(error, sizeof(error), "%.1e of %.0e, LSE %2.0f%%", counts->worst, counts->tolerance,
                 100 * (counts->worst_lse < 9.99 ? counts->worst_lse : 9.99));
    else if (counts->passed)
        snprintf(error, sizeof(error), "byte for byte");
    const char *word = counts->failed ? "FAILED" : counts->passed ? "passed" : "skipped";
    printf("%-26s %s%-8s%s %4d %4d %4d   %-28s %s\n", name,
           cli_colour(counts->failed   ? CLI_RED
                      : counts->passed ? CLI_GREEN
                                       : CLI_YELLOW),
           word, cli_colour(CLI_PLAIN), counts->passed, counts->failed, counts->skipped, error, counts->why);
    fflush(stdout);
}

static void finish_pass(const check_pass *pass, tally counts[KVL_OPERATIONS], double time)
{
    for (int op = 0; op < KVL_OPERATIONS; op++) {
        if (!pass->variants[op])
            continue;
        print_variant(pass->variants[op], &counts[op], time);
        state.passed += counts[op].passed;
        state.failed += counts[op].failed;
        state.skipped += counts[op].skipped;
    }
}

/* A variant that no shape reached is skipped once, with its own word on it. */
static void note_unserved(const check_pass *pass, const kvleaf_caps *caps, tally counts[KVL_OPERATIONS])
{
    kvl_geometry usual = {.q_dtype = KVLEAF_F16,
                          .kv_dtype = KVLEAF_F16,
                          .out_dtype = KVLEAF_F16,
                          .layout = KVLEAF_LAYOUT_DIM8,
                          .num_heads = 8,
                          .num_kv_heads = 2,
                          .head_dim = 128,
                          .block_size = 16};
    for (int op = 0; op < KVL_OPERATIONS; op++) {
        if (!pass->variants[op] || counts[op].passed || counts[op].failed || counts[op].skipped)
            continue;
        const char *why = pass->variants[op]->refuses(caps, &usual);
        counts[op].skipped = 1;
        snprintf(counts[op].why, sizeof(counts[op].why), "%s", why ? why : "no shape of this list is served");
    }
}

static int run_pass(const check_pass *pass, const kvleaf_caps *caps)
{
    char variants[1024];
    kvleaf_device_params params;
    tally counts[KVL_OPERATIONS] = {{0}};
    check_rig rig = {.small = state.options.small};
    int num_shapes = 0;
    double start = seconds();
    check_shape *shapes = check_shapes(&state.options, pass, caps, &num_shapes);
    force_variants(pass, variants, sizeof(variants));
    cli_device_params(&state.program, &params);
    params.variants = variants;
    if (!shapes || kvleaf_device_open(&params, &rig.device) != KVLEAF_OK ||
        kvleaf_device_queue_create(rig.device, &rig.queue) != KVLEAF_OK) {
        free(shapes);
        kvleaf_device_destroy(&rig.device);
        return cli_fail(&state.program, "can't open the device again");
    }
    for (int i = 0; i < num_shapes; i++) {
        cli_progress(pass->name, i, num_shapes);
        rig.shape = &shapes[i];
        if (state.options.only < 0 || shapes[i].index == state.options.only)
            run_shape(&rig, pass, caps, counts);
    }
    if (num_shapes)
        cli_progress(pass->name, num_shapes, num_shapes);
    note_unserved(pass, caps, counts);
    finish_pass(pass, counts, seconds() - start);
    clReleaseCommandQueue(rig.queue);
    kvleaf_device_destroy(&rig.device);
    free(shapes);
    return CLI_OK;
}

static int run(const kvleaf_caps *caps)
{
    check_pass passes[MAX_PASSES];
    int num_passes = collect_passes(passes);
    double start = seconds();
    if (num_passes == 0)
        cli_usage(&state.program, "--variant is \"%s\", which matches no variant", state.options.variant);
    if (!state.program.json)
        printf("%s, %s, driver %s\n\n%-26s %-8s %4s %4s %4s   worst error\n", caps->platform_name, caps->device_name,
               caps->driver_version, "variant", "", "pass", "fail", "skip");
    for (int i = 0; i < num_passes; i++) {
        if (run_pass(&passes[i], caps) != CLI_OK)
            return CLI_FAILED;
    }
    if (state.program.json) {
        cJSON *row = cJSON_CreateObject();
        cJSON_AddNumberToObject(row, "passed", state.passed);
        cJSON_AddNumberToObject(row, "failed", state.failed);
        cJSON_AddNumberToObject(row, "skipped", state.skipped);
        cJSON_AddNumberToObject(row, "seed", (double)state.options.seed);
        cli_row(row);
    } else {
        printf("\n%d passed, %d failed, %d skipped (seed %llu, %.1f s)\n", state.passed, state.failed, state.skipped,
               (unsigned long long)state.options.seed, seconds() - start);
    }
    return state.failed ? CLI_FAILED : CLI_OK;
}

int main(int argc, char **argv)
{
    const cli_option options[] = {
        {"variant", "GLOB", "only these, such as \"decode.*\" or \"*.cpu\"", CLI_STRING, &state.options.variant, 0, 0,
         NULL},
        {"seed", "N", "of lengths, values and block ids", CLI_SEED, &state.options.seed, 0, 0, NULL},
        {"count", "N", "shapes a variant; beyond 8 random ones follow; 0 = the fixed list", CLI_INT,
         &state.options.count, 0, 1000000, NULL},
        {"case", "N", "only this shape of the list; -1 = all", CLI_INT, &state.options.only, -1, 1000000, NULL},
        {"all", NULL, "the product of dtypes, views and head_dims", CLI_FLAG, &state.options.all, 0, 0, NULL},
        {"small", NULL, "tiny shapes, for simulators", CLI_FLAG, &state.options.small, 0, 0, NULL},
    };
    state.options.seed = 1;
    state.options.only = -1;
    state.program = (cli){.name = "kvleaf-check",
                          .summary = "Compares every kernel variant of a device with a float64 reference: ragged "
                                     "batches, guard zones,\npoison in what is unused, and the same bits whatever "
                                     "the batch.",
                          .options = options,
                          .num_options = (int)(sizeof(options) / sizeof(options[0]))};
    cli_parse(&state.program, argc, argv);
    if (state.options.all && state.options.small)
        cli_usage(&state.program, "--all and --small exclude each other");
    kvleaf_device *device = NULL;
    kvleaf_caps caps = {.struct_size = sizeof(caps)};
    if (cli_device_open(&state.program, &device) != KVLEAF_OK)
        return CLI_FAILED;
    kvleaf_status status = kvleaf_device_query(device, &caps);
    kvleaf_device_destroy(&device);
    return status == KVLEAF_OK ? run(&caps) : cli_fail(&state.program, "can't query the device");
}
