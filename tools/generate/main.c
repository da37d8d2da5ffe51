/* SPDX-License-Identifier: Apache-2.0 */
/* kvleaf-generate: runs requests through a Llama-style model whose attention is kvleaf's. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/cli.h"
#include "scheduler.h"

/* Tokens that the pool holds unless --blocks says otherwise. */
enum { DEFAULT_POOL_TOKENS = 8192 };

static const char notes[] =
    "A request is a line of JSON; all but id and tokens may be left out:\n"
    "  {\"id\": \"a\", \"tokens\": [504, 3575], \"max_new_tokens\": 256, \"temperature\": 0, \"top_p\": 1, \"seed\": "
    "0,\n"
    "   \"stop_tokens\": [2]}\n"
    "temperature 0 is greedy. stop_tokens: the model's end tokens, [] for none. Without max_new_tokens a request ends\n"
    "after 256 tokens, or sooner where the pool or the model's context ends. Sampling draws from xoshiro256** whose\n"
    "state splitmix64 fills from the request's own seed (sample i of n: seed + i), one number a token; a request's "
    "tokens\n"
    "don't depend on the other requests.\n"
    "More fields: \"n\": samples of the one prompt, which share its blocks. \"beam\": beam search of that width, "
    "the n\n"
    "best answers with their \"score\" (log probability a token). \"priority\" -4 .. 3: higher ones enter first and "
    "are\n"
    "preempted last. \"salt\": requests of different salts never share blocks.\n"
    "\n"
    "An answer is a line a sample, in the order in which they finish; a stop token is part of tokens:\n"
    "  {\"id\": \"a\", \"index\": 0, \"tokens\": [7042], \"finish_reason\": \"stop\" or \"length\", \"usage\": "
    "{\"prompt\",\n"
    "   \"cached\", \"generated\", \"peak_blocks\", \"shared_blocks\"}}\n"
    "or {\"id\": \"a\" or null, \"line\": 1, \"error\": {\"status\", \"message\"}}; the others go on, and the exit "
    "code is 1.\n"
    "\n"
    "With --stream requests are taken while others run, {\"id\", \"index\", \"token\"} comes for each token of a "
    "sample, and\n"
    "{\"cancel\": \"a\"} ends a request, {\"cancel\": \"a\", \"index\": 1} one sample, with finish_reason \"cancel\" "
    "for what is\n"
    "there by then; {\"stats\": true} is answered with the cache's counts, {\"stats\": \"map\"} with a picture (SVG) "
    "too.\n"
    "\n"
    "To compare with another implementation, \"teacher\": [ids] feeds these tokens in place of the chosen ones and "
    "adds\n"
    "\"steps\": {\"argmax\", \"margins\", \"top_ids\", \"top_logits\"} to the answer: of each step the best token, its "
    "lead over\n"
    "the second, and the 16 best tokens with their logits.\n"
    "\n"
    "--clblast-params: a JSON file {\"Xgemm\": {\"MWG\": 64, ...}} of CLBlast's kernels and their parameters, as its "
    "tuners\n"
    "find them, for a device it has no tuning for; PoCL's CPU devices have theirs built in.";

typedef struct settings {
    const char *model, *requests, *out, *clblast_params;
    int max_batch, block_size, blocks, swap_blocks, prefill_chunk, kv_dtype;
    bool stream, no_prefix_cache;
} settings;

/* Everything that is made on the way and given back at the end. */
typedef struct run {
    kvleaf_device *device;
    compute compute;
    model model;
    kvleaf_pool *pools[2];
    int32_t num_pools;
    kvleaf_cache *cache;
    kvleaf_plan *plan;
    input in;
    FILE *out;
    int64_t max_decode_keys;
    scheduler_totals totals;
    double load_seconds, run_seconds;
} run;

static double now(void)
{
    struct timespec time;

    timespec_get(&time, TIME_UTC);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* A pool for each group of layers: those that see everything, those that have a window. */
static bool make_pools(run *r, const settings *set, kvleaf_layer *layers, failure *error)
{
    const model_config *config = &r->model.config;
    int32_t windowed = 0;

    for (int32_t i = 0; i < config->num_layers; i++) {
        layers[i] = (kvleaf_layer){.num_heads = config->num_heads,
                                   .num_kv_heads = config->num_kv_heads,
                                   .head_dim_k = config->head_dim,
                                   .window = config->windows[i]};
        windowed += config->windows[i] > 0;
    }
    bool first_windowed = config->windows[0] > 0;
    const int32_t counts[] = {first_windowed ? windowed : config->num_layers - windowed,
                              first_windowed ? config->num_layers - windowed : windowed};
    for (r->num_pools = 0; r->num_pools < 2 && counts[r->num_pools] > 0; r->num_pools++) {
        const kvleaf_pool_params pool = {.struct_size = sizeof pool,
                                         .num_layers = counts[r->num_pools],
                                         .num_blocks = set->blocks,
                                         .block_size = set->block_size,
                                         .num_kv_heads = config->num_kv_heads,
                                         .num_heads = config->num_heads,
                                         .head_dim_k = config->head_dim,
                                         .dtype = (kvleaf_dtype)set->kv_dtype};
        if (kvleaf_pool_create(r->device, &pool, &r->pools[r->num_pools]) != KVLEAF_OK)
            return fail_kvleaf(error, "kvleaf_pool_create");
    }
    return true;
}

static bool make_cache(run *r, const settings *set, failure *error)
{
    const model_config *config = &r->model.config;
    kvleaf_layer layers[MAX_LAYERS];
    int64_t slots = (int64_t)set->blocks * set->block_size;
    int32_t context = (int32_t)(slots < config->max_positions ? slots : config->max_positions);

    if (!make_pools(r, set, layers, error))
        return false;
    const kvleaf_cache_params cache = {.struct_size = sizeof cache,
                                       .layers = layers,
                                       .num_layers = config->num_layers,
                                       .pools = r->pools,
                                       .num_pools = r->num_pools,
                                       .q_dtype = KVLEAF_F32,
                                       .out_dtype = KVLEAF_F32,
                                       .max_sequences = 2 * set->max_batch + 1, /* as many again in host memory */
                                       .max_context = context,
                                       .swap_blocks = set->swap_blocks,
                                       .no_prefix_cache = set->no_prefix_cache};
    if (kvleaf_cache_create(r->device, &cache, &r->cache) != KVLEAF_OK)
        return fail_kvleaf(error, "kvleaf_cache_create");

    r->max_decode_keys = (int64_t)set->max_batch * (context + 511) / 512 * 512;
    const kvleaf_plan_params plan = {.struct_size = sizeof plan,
                                     .max_entries = set->max_batch,
                                     .max_tokens = set->prefill_chunk + set->max_batch,
                                     .max_decode_keys = r->max_decode_keys};
    if (kvleaf_plan_create(r->cache, &plan, &r->plan) != KVLEAF_OK)
        return fail_kvleaf(error, "kvleaf_plan_create");
    return true;
}

static bool open_files(run *r, const settings *set, failure *error)
{
    r->in.descriptor = strcmp(set->requests, "-") == 0 ? STDIN_FILENO : open(set->requests, O_RDONLY);
    if (r->in.descriptor < 0)
        return fail(error, "KVLEAF_INVALID", "%s: %s", set->requests, strerror(errno));
    r->out = strcmp(set->out, "-") == 0 ? stdout : fopen(set->out, "w");
    if (r->out == NULL)
        return fail(error, "KVLEAF_INVALID", "%s: %s", set->out, strerror(errno));
    return true;
}

static bool run_requests(run *r, const settings *set, failure *error)
{
    scheduler_params params = {.max_batch = set->max_batch,
                               .prefill_chunk = set->prefill_chunk,
                               .num_blocks = set->blocks,
                               .block_size = set->block_size,
                               .swap = set->swap_blocks > 0,
                               .stream = set->stream,
                               .progress = true,
                               .out = r->out};
    double start = now();

    /* Requests can't be checked before the vocabulary is known, nor answered before they are read. */
    if (!model_create(&r->model, &r->compute, set->model, set->prefill_chunk + set->max_batch, set->max_batch, error) ||
        !make_cache(r, set, error))
        return false;
    params.max_decode_keys = r->max_decode_keys;
    double loaded = now();
    r->load_seconds = loaded - start;
    bool right = scheduler_run(&r->in, &r->model, r->cache, r->plan, &params, &r->totals, error);
    r->run_seconds = now() - loaded;
    if (right && fflush(r->out) != 0)
        return fail(error, "KVLEAF_INVALID", "%s: %s", set->out, strerror(errno));
    return right;
}

static void print_summary(const cli *program, const run *r, const settings *set)
{
    const scheduler_totals *totals = &r->totals;
    double rate = r->run_seconds > 0 ? (double)totals->generated / r->run_seconds : 0;
    kvleaf_caps caps = {.struct_size = sizeof caps};

    fprintf(stderr,
            "kvleaf-generate: %d finished, %d errors; %lld prompt and %lld decode rows in %lld steps, %lld tokens in "
            "%.2f s (%.1f a second); model loaded in %.2f s; %d of %d blocks at most; %lld preemptions, %lld by swap\n",
            (int)totals->finished, (int)totals->errors, (long long)totals->prompt_rows, (long long)totals->decode_rows,
            (long long)totals->steps, (long long)totals->generated, r->run_seconds, rate, r->load_seconds,
            (int)totals->peak_blocks, set->blocks, (long long)totals->preemptions, (long long)totals->swaps);
    if (!program->json)
        return;
    kvleaf_device_query(r->device, &caps);
    cJSON *outer = cJSON_CreateObject(), *row = cJSON_AddObjectToObject(outer, "summary");
    cJSON_AddStringToObject(row, "device", caps.device_name);
    cJSON_AddStringToObject(row, "decode", kvleaf_plan_variant(r->plan, "decode"));
    cJSON_AddStringToObject(row, "prefill", kvleaf_plan_variant(r->plan, "prefill"));
    cJSON_AddNumberToObject(row, "finished", totals->finished);
    cJSON_AddNumberToObject(row, "errors", totals->errors);
    cJSON_AddNumberToObject(row, "steps", (double)totals->steps);
    cJSON_AddNumberToObject(row, "prompt_rows", (double)totals->prompt_rows);
    cJSON_AddNumberToObject(row, "decode_rows", (double)totals->decode_rows);
    cJSON_AddNumberToObject(row, "generated", (double)totals->generated);
    cJSON_AddNumberToObject(row, "preemptions", (double)totals->preemptions);
    cJSON_AddNumberToObject(row, "swaps", (double)totals->swaps);
    cJSON_AddNumberToObject(row, "cancelled", (double)totals->cancelled);
    cJSON_AddNumberToObject(row, "peak_batch", totals->peak_batch);
    cJSON_AddNumberToObject(row, "peak_blocks", totals->peak_blocks);
    cJSON_AddNumberToObject(row, "blocks", set->blocks);
    cJSON_AddNumberToObject(row, "load_seconds", r->load_seconds);
    cJSON_AddNumberToObject(row, "seconds", r->run_seconds);
    cJSON_AddNumberToObject(row, "tokens_per_second", rate);
    cli_row(outer);
}

static void release(run *r)
{
    kvleaf_plan_destroy(&r->plan);
    kvleaf_cache_destroy(&r->cache);
    for (int32_t i = 0; i < 2; i++)
        kvleaf_pool_destroy(&r->pools[i]);
    input_release(&r->in);
    model_destroy(&r->model);
    compute_destroy(&r->compute);
    kvleaf_device_destroy(&r->device);
    if (r->in.descriptor > STDIN_FILENO)
        close(r->in.descriptor);
    if (r->out != NULL && r->out != stdout)
        fclose(r->out);
}

int main(int argc, char **argv)
{
    settings set = {.max_batch = 16, .block_size = 16, .blocks = 0, .prefill_chunk = 256, .kv_dtype = KVLEAF_F32};
    const cli_option options[] = {
        {"model", "DIR", "folder with config.json and model.safetensors", CLI_STRING, &set.model, 0, 0, NULL},
        {"requests", "FILE", "requests, a line of JSON each; - is stdin", CLI_STRING, &set.requests, 0, 0, NULL},
        {"out", "FILE", "answers, a line of JSON each; - is stdout", CLI_STRING, &set.out, 0, 0, NULL},
        {"max-batch", "N", "requests running at once", CLI_INT, &set.max_batch, 1, 4096, NULL},
        {"block-size", "N", "tokens a block", CLI_INT, &set.block_size, 1, 256, NULL},
        {"blocks", "N", "blocks in the pool; 0 = for 8192 tokens", CLI_INT, &set.blocks, 0, 1 << 24, NULL},
        {"swap-blocks", "N", "blocks in host memory for preempted requests; 0 = compute them again", CLI_INT,
         &set.swap_blocks, 0, 1 << 24, NULL},
        {"no-prefix-cache", NULL, "prompts share nothing", CLI_FLAG, &set.no_prefix_cache, 0, 0, NULL},
        {"prefill-chunk", "N", "prompt rows a step", CLI_INT, &set.prefill_chunk, 1, 65536, NULL},
        {"kv-dtype", "TYPE", "of keys and values in the cache", CLI_CHOICE, &set.kv_dtype, 0, 0, cli_dtypes},
        {"clblast-params", "FILE", "parameters of CLBlast's kernels", CLI_STRING, &set.clblast_params, 0, 0, NULL},
        {"stream", NULL, "takes requests while others run; a line a token too", CLI_FLAG, &set.stream, 0, 0, NULL},
    };
    cli program = {.name = "kvleaf-generate",
                   .summary = "Continues token sequences with a Llama-style model, batched continuously over one "
                              "paged cache.",
                   .notes = notes,
                   .options = options,
                   .num_options = (int)(sizeof options / sizeof *options)};
    run r = {0};
    failure error;

    cli_parse(&program, argc, argv);
    if (set.model == NULL || set.requests == NULL || set.out == NULL)
        cli_usage(&program, "%s is needed",
                  set.model == NULL      ? "--model"
                  : set.requests == NULL ? "--requests"
                                         : "--out");
    if (set.blocks == 0)
        set.blocks = (DEFAULT_POOL_TOKENS + set.block_size - 1) / set.block_size;
    if (cli_device_open(&program, &r.device) != KVLEAF_OK)
        return CLI_FAILED;
    bool right = open_files(&r, &set, &error) && compute_create(&r.compute, r.device, set.clblast_params, &error) &&
                 run_requests(&r, &set, &error);
    if (right)
        print_summary(&program, &r, &set);
    else
        fprintf(stderr, "kvleaf-generate: %s (%s)\n", error.message, error.status);
    bool clean = right && r.totals.errors == 0;
    release(&r);
    return clean ? CLI_OK : CLI_FAILED;
}
