/* SPDX-License-Identifier: Apache-2.0 */
/* What a step of the serving experiment computes. */
#include <stdio.h>
#include <stdlib.h>

#include "bench/serving.h"
#ifdef KVLEAF_BENCH_MODEL
#include "generate/model.h"
#endif

struct serving_compute {
    const bench_rig *rig;
    const serving_options *options;
    int layers, heads, kv_heads, head_dim;
    kvleaf_dtype q_dtype, kv_dtype;
    cl_mem q, k, v, out; /* attention alone: [max_rows] rows that every layer reads */
#ifdef KVLEAF_BENCH_MODEL
    compute device;
    model model;
    int32_t *tokens;  /* [max_rows] */
    model_best *best; /* [max_logits] */
#endif
};

static int make_rows(serving_compute *c, int max_rows)
{
    cl_context context = kvleaf_device_context(c->rig->device);
    uint64_t q = (uint64_t)max_rows * (uint64_t)c->heads * (uint64_t)c->head_dim;
    uint64_t kv = (uint64_t)max_rows * (uint64_t)c->kv_heads * (uint64_t)c->head_dim;
    const struct {
        cl_mem *memory;
        uint64_t elements;
        float size;
    } rows[] = {{&c->q, q, 3.46f}, {&c->k, kv, 3.46f}, {&c->v, kv, 1.5f}, {&c->out, q, 1.0f}};
    for (int i = 0; i < 4; i++) {
        cl_int error = CL_SUCCESS;
        *rows[i].memory =
            clCreateBuffer(context, CL_MEM_READ_WRITE, rows[i].elements * kvleaf_dtype_size(c->q_dtype), NULL, &error);
        if (error == CL_SUCCESS)
            error = bench_fill(c->rig, *rows[i].memory, c->q_dtype, rows[i].elements, (uint32_t)i + 1, rows[i].size);
        if (error != CL_SUCCESS) {
            fprintf(stderr, "kvleaf-bench: making the rows of a step failed (%d)\n", error);
            return CLI_FAILED;
        }
    }
    return CLI_OK;
}

#ifdef KVLEAF_BENCH_MODEL
static int make_model(serving_compute *c, int max_rows, int max_logits)
{
    failure error;
    if (!compute_create(&c->device, c->rig->device, NULL, &error) ||
        !model_create(&c->model, &c->device, c->options->model, max_rows, max_logits, &error)) {
        fprintf(stderr, "kvleaf-bench: %s\n", error.message);
        return CLI_FAILED;
    }
    const model_config *config = &c->model.config;
    c->tokens = calloc((size_t)max_rows, sizeof(*c->tokens));
    c->best = calloc((size_t)max_logits, sizeof(*c->best));
    if (!c->tokens || !c->best) {
        fprintf(stderr, "kvleaf-bench: no memory for %d logits\n", max_logits);
        return CLI_FAILED;
    }
    for (int i = 0; i < max_rows; i++)
        c->tokens[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)config->vocab_size);
    c->layers = config->num_layers;
    c->heads = config->num_heads;
    c->kv_heads = config->num_kv_heads;
    c->head_dim = config->head_dim;
    c->q_dtype = KVLEAF_F32;
    return CLI_OK;
}
#else
static int make_model(serving_compute *c, int max_rows, int max_logits)
{
    (void)c, (void)max_rows, (void)max_logits;
    fprintf(stderr, "kvleaf-bench: --model needs a build with CLBlast\n");
    return CLI_FAILED;
}
#endif

int serving_compute_create(const bench_rig *rig, const serving_options *options, int max_rows, int max_logits,
                           serving_compute **out)
{
    serving_compute *c = calloc(1, sizeof(*c));
    if (!c) {
        fprintf(stderr, "kvleaf-bench: no memory\n");
        return CLI_FAILED;
    }
    *out = c;
    c->rig = rig;
    c->options = options;
    c->layers = options->layers;
    c->heads = options->shape.heads;
    c->kv_heads = options->shape.kv_heads;
    c->head_dim = options->shape.head_dim;
    c->q_dtype = (kvleaf_dtype)options->shape.q_dtype;
    c->kv_dtype = (kvleaf_dtype)options->shape.kv_dtype;
    return options->model ? make_model(c, max_rows, max_logits) : make_rows(c, max_rows);
}

void serving_compute_destroy(serving_compute *c)
{
    if (!c)
        return;
    cl_mem buffers[] = {c->q, c->k, c->v, c->out};
    for (int i = 0; i < 4; i++)
        if (buffers[i])
            clReleaseMemObject(buffers[i]);
#ifdef KVLEAF_BENCH_MODEL
    if (c->options->model) {
        model_destroy(&c->model);
        compute_destroy(&c->device);
    }
    free(c->tokens);
    free(c->best);
#endif
    free(c);
}

int serving_compute_cache(const serving_compute *c, int max_sequences, kvleaf_pool **pool, kvleaf_cache **cache)
{
    kvleaf_layer *layers = calloc((size_t)c->layers, sizeof(*layers));
    if (!layers) {
        fprintf(stderr, "kvleaf-bench: no memory for %d layers\n", c->layers);
        return CLI_FAILED;
    }
    for (int i = 0; i < c->layers; i++)
        layers[i] = (kvleaf_layer){.num_heads = c->heads, .num_kv_heads = c->kv_heads, .head_dim_k = c->head_dim};
    const kvleaf_pool_params params = {.struct_size = sizeof(params),
                                       .num_layers = c->layers,
                                       .num_blocks = c->options->blocks,
                                       .block_size = c->options->shape.block_size,
                                       .num_kv_heads = c->kv_heads,
                                       .num_heads = c->heads,
                                       .head_dim_k = c->head_dim,
                                       .dtype = c->kv_dtype};
    int status = CLI_OK;
    if (kvleaf_pool_create(c->rig->device, &params, pool) != KVLEAF_OK)
        status = cli_fail(c->rig->program, "kvleaf_pool_create");
    const kvleaf_cache_params made = {.struct_size = sizeof(made),
                                      .layers = layers,
                                      .num_layers = c->layers,
                                      .pools = pool,
                                      .num_pools = 1,
                                      .q_dtype = c->q_dtype,
                                      .out_dtype = c->q_dtype,
                                      .max_sequences = max_sequences,
                                      .max_context = c->options->max_length};
    if (status == CLI_OK && kvleaf_cache_create(c->rig->device, &made, cache) != KVLEAF_OK)
        status = cli_fail(c->rig->program, "kvleaf_cache_create");
    free(layers);
    return status;
}

static int run_attention(const serving_compute *c, const serving_step *step)
{
    const kvleaf_exec exec = {.struct_size = sizeof(exec), .queue = c->rig->queue};
    const kvleaf_tensor q = {.handle = c->q, .dtype = c->q_dtype}, out = {.handle = c->out, .dtype = c->q_dtype};
    const kvleaf_tensor k = {.handle = c->k, .dtype = c->q_dtype}, v = {.handle = c->v, .dtype = c->q_dtype};
    for (int i = 0; i < c->layers; i++) {
        if (kvleaf_append_attend(step->plan, i, &k, &v, &q, &out, NULL, &exec) != KVLEAF_OK)
            return cli_fail(c->rig->program, "kvleaf_append_attend");
    }
    if (clFinish(c->rig->queue) == CL_SUCCESS)
        return CLI_OK;
    fprintf(stderr, "kvleaf-bench: a step failed on the device\n");
    return CLI_FAILED;
}

int serving_compute_run(serving_compute *c, const serving_step *step)
{
    if (!c->options->model)
        return run_attention(c, step);
#ifdef KVLEAF_BENCH_MODEL
    const model_step whole = {.rows = step->rows,
                              .tokens = c->tokens,
                              .positions = step->positions,
                              .num_logits = step->num_logits,
                              .logit_rows = step->logit_rows};
    failure error;
    if (model_forward(&c->model, step->plan, &whole, &error) && model_read_best(&c->model, &whole, c->best, &error))
        return CLI_OK;
    fprintf(stderr, "kvleaf-bench: %s\n", error.message);
#endif
    return CLI_FAILED;
}
