/* SPDX-License-Identifier: Apache-2.0 */
/* kvleaf-bench: which configurations to run, and their rows. */
#include "bench/bench.h"
#include "bench/serving.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const bench_names[] = {"decode", "prefill", "append", "blocks", "step", "prefix", "serving"};
static const char *const layout_names[] = {"auto", "strided", "rows", "cpu16", "dim8", "swizzle8", NULL};

static const char *const sharing_names[] = {"auto", "off", "always"};

/* Configurations of a plain run: batch, context, q_len (0 = the context). */
typedef struct listed {
    int batch, context, q_len;
    bool gpu_only;
} listed;

static const listed decode_list[] = {{1, 4096, 1, false}, {1, 32768, 1, false}, {16, 4096, 1, false},
                                     {64, 4096, 1, true}, {128, 2048, 1, true}, {8, 32768, 1, true}};
static const listed prefill_list[] = {{1, 2048, 0, false}, {4, 512, 0, false}, {1, 4352, 256, false},
                                      {1, 8192, 0, true},  {4, 4096, 0, true}, {16, 1024, 0, true}};
static const listed append_list[] = {{16, 4096, 1024, false}, {256, 4096, 1, false}};

static const struct {
    const listed *rows;
    int count;
} lists[] = {{decode_list, sizeof(decode_list) / sizeof(listed)},
             {prefill_list, sizeof(prefill_list) / sizeof(listed)},
             {append_list, sizeof(append_list) / sizeof(listed)}};

static void add_measures(cJSON *row, const bench_config *config, const bench_result *result)
{
    const bench_ceilings *limits = &result->ceilings;
    double seconds = result->median_us * 1e-6, best = result->best_us * 1e-6;
    double limit = config->kind == BENCH_APPEND ? limits->copy_gb_per_s : limits->read_gb_per_s;
    if (config->kind == BENCH_PREFILL) {
        cJSON_AddNumberToObject(row, "gflop_per_s", result->flops / seconds / 1e9);
        cJSON_AddNumberToObject(row, "fma_gflop_per_s", limits->fma_gflop_per_s);
        cJSON_AddNumberToObject(row, "fraction", result->flops / seconds / 1e9 / limits->fma_gflop_per_s);
        cJSON_AddNumberToObject(row, "best_fraction", result->flops / best / 1e9 / limits->fma_gflop_per_s);
        return;
    }
    cJSON_AddNumberToObject(row, "gb_per_s", result->bytes / seconds / 1e9);
    cJSON_AddNumberToObject(row, config->kind == BENCH_APPEND ? "copy_gb_per_s" : "read_gb_per_s", limit);
    cJSON_AddNumberToObject(row, "fraction", result->bytes / seconds / 1e9 / limit);
    cJSON_AddNumberToObject(row, "best_fraction", result->bytes / best / 1e9 / limit);
    if (limits->table_read_gb_per_s > 0)
        cJSON_AddNumberToObject(row, "table_read_gb_per_s", limits->table_read_gb_per_s);
}

static void print_json(const bench_rig *rig, const bench_config *config, const bench_result *result)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddStringToObject(row, "bench", bench_names[config->kind]);
    cJSON_AddStringToObject(row, "device", rig->caps.device_name);
    cJSON_AddStringToObject(row, "variant", result->variant);
    cJSON_AddNumberToObject(row, "batch", config->batch);
    cJSON_AddNumberToObject(row, "context", config->context);
    if (config->ragged)
        cJSON_AddBoolToObject(row, "ragged", true);
    cJSON_AddNumberToObject(row, "q_len", config->q_len);
    cJSON_AddNumberToObject(row, "heads", config->shape.heads);
    cJSON_AddNumberToObject(row, "kv_heads", config->shape.kv_heads);
    cJSON_AddNumberToObject(row, "head_dim", config->shape.head_dim);
    cJSON_AddNumberToObject(row, "block_size", config->shape.block_size);
    if (config->shape.window)
        cJSON_AddNumberToObject(row, "window", config->shape.window);
    if (config->shape.softcap > 0)
        cJSON_AddNumberToObject(row, "softcap", config->shape.softcap);
    cJSON_AddStringToObject(row, "layout", result->layout);
    cJSON_AddStringToObject(row, "q_dtype", kvleaf_dtype_name((kvleaf_dtype)config->shape.q_dtype));
    cJSON_AddStringToObject(row, "kv_dtype", kvleaf_dtype_name((kvleaf_dtype)config->shape.kv_dtype));
    cJSON_AddNumberToObject(row, "median_us", result->median_us);
    cJSON_AddNumberToObject(row, "best_us", result->best_us);
    cJSON_AddNumberToObject(row, "runs", result->runs);
    if (config->rest_ms)
        cJSON_AddNumberToObject(row, "rest_ms", config->rest_ms);
    if (config->in_order)
        cJSON_AddBoolToObject(row, "in_order", true);
    if (config->shared_prefix) {
        cJSON_AddNumberToObject(row, "shared_prefix", config->shared_prefix);
        cJSON_AddStringToObject(row, "sharing", sharing_names[config->sharing]);
    }
    add_measures(row, config, result);
    cJSON_AddNumberToObject(row, "error", result->error);
    cli_row(row);
}

static void print_heading(const bench_rig *rig, bench_kind kind)
{
    static const char *const units[] = {"GB/s   read  table", "GFLOP/s    fma       ", "GB/s   copy       "};
    printf("%s, %s, driver %s\n\n", rig->caps.platform_name, rig->caps.device_name, rig->caps.driver_version);
    printf("%-7s %5s %7s %6s  %-14s %-10s %10s %10s %5s  %s fraction  variant\n", "bench", "batch", "context", "q_len",
           "heads dim block", "layout", "median us", "best us", "runs", units[kind]);
}

static void print_row(const bench_config *config, const bench_result *result)
{
    const bench_ceilings *limits = &result->ceilings;
    double seconds = result->median_us * 1e-6, reached, limit;
    char heads[64];
    if (config->kind == BENCH_PREFILL) {
        reached = result->flops / seconds / 1e9;
        limit = limits->fma_gflop_per_s;
    } else {
        reached = result->bytes / seconds / 1e9;
        limit = config->kind == BENCH_APPEND ? limits->copy_gb_per_s : limits->read_gb_per_s;
    }
    snprintf(heads, sizeof(heads), "%d/%d %d %d", config->shape.heads, config->shape.kv_heads, config->shape.head_dim,
             config->shape.block_size);
    printf("%-7s %5d %7d %6d  %-14s %-10s %10.1f %10.1f %5d  %6.1f %6.1f",
           config->ragged ? "ragged" : bench_names[config->kind], config->batch, config->context, config->q_len, heads,
           result->layout, result->median_us, result->best_us, result->runs, reached, limit);
    if (limits->table_read_gb_per_s > 0)
        printf(" %6.1f", limits->table_read_gb_per_s);
    else
        printf(" %6s", "");
    printf("  %s%3.0f%%%s (best %.0f%%)  %s%s%s%s", cli_colour(CLI_BOLD), 100 * reached / limit, cli_colour(CLI_PLAIN),
           100 * reached / limit * result->median_us / result->best_us, result->variant,
           config->in_order ? ", blocks in order" : "", config->shared_prefix ? ", sharing " : "",
           config->shared_prefix ? sharing_names[config->sharing] : "");
    if (config->rest_ms)
        printf(", rests of %d ms", config->rest_ms);
    printf("\n");
    fflush(stdout);
}

static int run_one(const bench_rig *rig, const bench_config *config)
{
    bench_result result;
    int status = bench_run(rig, config, &result);
    if (status != CLI_OK)
        return status;
    if (rig->program->json)
        print_json(rig, config, &result);
    else
        print_row(config, &result);
    return CLI_OK;
}

/* The list, in f32 and f16 on a CPU and in f16 elsewhere, where no dtype was asked for. */
static int run_list(const bench_rig *rig, const bench_config *asked)
{
    static const int cpu_dtypes[] = {KVLEAF_F32, KVLEAF_F16}, gpu_dtypes[] = {KVLEAF_F16};
    const int *dtypes = rig->gpu ? gpu_dtypes : cpu_dtypes;
    int num_dtypes = asked->shape.kv_dtype >= 0 ? 1 : rig->gpu ? 1 : 2;
    for (int t = 0; t < num_dtypes; t++) {
        for (int i = 0; i < lists[asked->kind].count; i++) {
            const listed *row = &lists[asked->kind].rows[i];
            bench_config config = *asked;
            if (row->gpu_only && !rig->gpu)
                continue;
            config.batch = row->batch;
            config.context = row->context;
            config.q_len = row->q_len ? row->q_len : row->context;
            if (config.shape.kv_dtype < 0)
                config.shape.kv_dtype = dtypes[t];
            if (config.shape.q_dtype < 0)
                config.shape.q_dtype = config.shape.kv_dtype;
            int status = run_one(rig, &config);
            if (status != CLI_OK)
                return status;
        }
    }
    return CLI_OK;
}

static int run_asked(const bench_rig *rig, bench_config config)
{
    static const int batches[] = {16, 1, 16}, contexts[] = {4096, 2048, 4096};
    if (config.batch == 0)
        config.batch = batches[config.kind];
    if (config.context == 0)
        config.context = config.q_len > contexts[config.kind] ? config.q_len : contexts[config.kind];
    if (config.q_len == 0)
        config.q_len = config.kind == BENCH_DECODE    ? 1
                       : config.kind == BENCH_PREFILL ? config.context
                       : config.context < 1024        ? config.context
                                                      : 1024;
    if (config.q_len > config.context)
        cli_usage(rig->program, "--q-len is %d, must be at most --context %d", config.q_len, config.context);
    if (config.shape.kv_dtype < 0)
        config.shape.kv_dtype = rig->gpu ? KVLEAF_F16 : KVLEAF_F32;
    if (config.shape.q_dtype < 0)
        config.shape.q_dtype = config.shape.kv_dtype;
    return run_one(rig, &config);
}

/* A prefix that all sequences have in the same blocks, and a few tokens of their own: read for each of them, then once
 * for all, in batches of 2 to 64 or the one that is asked for. */
static int run_shared(const bench_rig *rig, const bench_config *asked)
{
    static const kvleaf_sharing ways[] = {KVLEAF_SHARING_OFF, KVLEAF_SHARING_ALWAYS};
    bench_config config = *asked;
    if (config.context == 0)
        config.context = config.shared_prefix + 16;
    if (config.shared_prefix >= config.context)
        cli_usage(rig->program, "--shared-prefix is %d, must be below --context %d", config.shared_prefix,
                  config.context);
    for (int batch = asked->batch ? asked->batch : 2; batch <= (asked->batch ? asked->batch : 64); batch *= 2) {
        for (int way = 0; way < 2; way++) {
            config.batch = batch;
            config.sharing = ways[way];
            int status = run_asked(rig, config);
            if (status != CLI_OK)
                return status;
        }
    }
    return CLI_OK;
}

static int run(bench_rig *rig, const bench_config *config)
{
    if (config->kind == BENCH_BLOCKS)
        return bench_blocks_run(rig, config);
    if (config->kind == BENCH_STEP)
        return bench_step_run(rig, config);
    if (!rig->program->json)
        print_heading(rig, config->kind);
    if (config->shared_prefix)
        return run_shared(rig, config);
    if (config->batch || config->context || config->q_len)
        return run_asked(rig, *config);
    return run_list(rig, config);
}

static bench_kind parse_kind(const cli *program)
{
    if (program->num_arguments == 1) {
        for (int i = 0; i < (int)(sizeof(bench_names) / sizeof(bench_names[0])); i++) {
            if (strcmp(program->arguments[0], bench_names[i]) == 0)
                return (bench_kind)i;
        }
        cli_usage(program, "unknown bench \"%s\", must be decode, prefill, append, blocks, step, prefix or serving",
                  program->arguments[0]);
    }
    cli_usage(program, "%d benches are named, must be one of decode, prefill, append, blocks, step, prefix, serving",
              program->num_arguments);
}

int main(int argc, char **argv)
{
    bench_config config = {.shape = CLI_SHAPE_DEFAULTS, .seed = 1};
    serving_options serving = {.max_length = 2048, .chunk = 512};
    const cli_option options[] = {
        {"batch", "N", "sequences; without batch, context and q-len a list is run", CLI_INT, &config.batch, 0, 4096,
         NULL},
        {"context", "N", "keys of a sequence, new ones included", CLI_INT, &config.context, 0, 1 << 24, NULL},
        {"ragged", NULL, "decode, prefill: log-normal lengths with --context as their mean", CLI_FLAG, &config.ragged,
         0, 0, NULL},
        {"in-order", NULL, "decode, prefill: block tables 0 .. n-1 in place of a random order", CLI_FLAG,
         &config.in_order, 0, 0, NULL},
        {"q-len", "N", "query rows (append: new tokens) of a sequence", CLI_INT, &config.q_len, 0, 1 << 20, NULL},
        {"shared-prefix", "N", "decode: leading tokens that all sequences share; with and without sharing", CLI_INT,
         &config.shared_prefix, 0, 1 << 24, NULL},
        CLI_SHAPE_OPTIONS(config.shape),
        {"layout", "NAME", "of the blocks", CLI_CHOICE, &config.layout, 0, 0, layout_names},
        {"seed", "N", "of the order of the blocks", CLI_SEED, &config.seed, 0, 0, NULL},
        {"runs", "N", "timed runs; 0 = 50, fewer where one takes long", CLI_INT, &config.runs, 0, 1000, NULL},
        {"rest", "MS", "decode, prefill, append: idle time before each run, for devices at their power limit", CLI_INT,
         &config.rest_ms, 0, 10000, NULL},
        {"requests", "N", "serving: of the stream; 0 = 40 on a CPU, 1000 on a GPU", CLI_INT, &serving.requests, 0,
         1000000, NULL},
        {"max-length", "N", "serving: tokens a request may have, and what is reserved", CLI_INT, &serving.max_length, 2,
         1 << 20, NULL},
        {"blocks", "N", "serving: in the pool; 0 = for 8 longest requests on a CPU, 64 on a GPU", CLI_INT,
         &serving.blocks, 0, 1 << 24, NULL},
        {"layers", "N", "step, serving: of attention alone; 0 = 2 or 1 on a CPU, 8 or 4 on a GPU", CLI_INT,
         &serving.layers, 0, 1024, NULL},
        {"prefill-chunk", "N", "serving: prompt rows a step", CLI_INT, &serving.chunk, 16, 65536, NULL},
        {"lengths", "FILE", "serving: a line \"prompt output\" a request, in tokens", CLI_STRING, &serving.lengths, 0,
         0, NULL},
        {"model", "DIR", "serving: the model to run; without, attention alone", CLI_STRING, &serving.model, 0, 0, NULL},
        {"no-sharing", NULL, "serving: leave out the runs with several samples or beams", CLI_FLAG, &serving.no_sharing,
         0, 0, NULL},
    };
    cli program = {
        .name = "kvleaf-bench",
        .arguments_help = "decode | prefill | append | blocks | step | prefix | serving",
        .summary =
            "Times an operation of the attention layer beside what the device can do at best, or the host's own work.",
        .notes = "KVLEAF_VARIANT=GLOB forces a variant.",
        .options = options,
        .num_options = (int)(sizeof(options) / sizeof(options[0]))};
    bench_rig rig = {.program = &program, .caps = {.struct_size = sizeof(rig.caps)}};
    config.shape.q_dtype = config.shape.kv_dtype = -1;
    cli_parse(&program, argc, argv);
    cli_check_shape(&program, &config.shape);
    config.kind = parse_kind(&program);
    if (config.kind == BENCH_APPEND && config.shape.block_size == 0)
        cli_usage(&program, "--block-size is 0, append needs blocks");
    if (config.rest_ms && config.kind > BENCH_APPEND)
        cli_usage(&program, "--rest is for decode, prefill and append");
    if (config.ragged && config.kind != BENCH_DECODE && config.kind != BENCH_PREFILL)
        cli_usage(&program, "--ragged is for decode and prefill");
    if (config.ragged && config.shared_prefix)
        cli_usage(&program, "--ragged and --shared-prefix exclude each other");
    if (config.kind >= BENCH_BLOCKS && config.shape.block_size == 0)
        cli_usage(&program, "--block-size is 0, %s needs blocks", bench_names[config.kind]);
    if (config.shared_prefix && (config.kind != BENCH_DECODE || config.shape.block_size == 0))
        cli_usage(&program, "--shared-prefix is for decode over blocks");
    if (config.kind == BENCH_PREFIX)
        return bench_prefix_run(&rig, &config);
    if (cli_device_open(&program, &rig.device) != KVLEAF_OK)
        return CLI_FAILED;
    int status = CLI_FAILED;
    if (kvleaf_device_query(rig.device, &rig.caps) != KVLEAF_OK ||
        kvleaf_device_queue_create(rig.device, &rig.queue) != KVLEAF_OK)
        status = cli_fail(&program, "can't use the device");
    rig.gpu = !(rig.caps.type & CL_DEVICE_TYPE_CPU);
    serving.shape = config.shape;
    serving.seed = config.seed;
    config.layers = serving.layers;
    if (rig.queue && (config.kind == BENCH_BLOCKS || bench_kernels(&rig) == CLI_OK))
        status = config.kind == BENCH_SERVING ? bench_serving(&rig, &serving) : run(&rig, &config);
    if (rig.kernels)
        clReleaseProgram(rig.kernels);
    if (rig.queue)
        clReleaseCommandQueue(rig.queue);
    kvleaf_device_destroy(&rig.device);
    return status;
}
