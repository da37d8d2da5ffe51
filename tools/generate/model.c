/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ARG(value)                                                                                                     \
    {                                                                                                                  \
        sizeof(value), &(value)                                                                                        \
    }

static int32_t padded(int32_t rows)
{
    return (rows + ROW_PAD - 1) / ROW_PAD * ROW_PAD;
}

/* Cosines and sines of every position, rounded once from the float32 angle, as the hub's own
 * implementation has them. */
static bool make_rope_table(model *m, failure *error)
{
    int32_t dim = m->config.head_dim, half_dim = dim / 2, positions = m->config.max_positions;
    size_t bytes = (size_t)positions * (size_t)dim * sizeof(float);
    float *table = malloc(bytes);

    if (table == NULL)
        return fail(error, "KVLEAF_NO_MEMORY", "no host memory for %zu bytes of rotary table", bytes);
    for (int32_t i = 0; i < half_dim; i++) {
        float frequency = (float)(1.0 / pow(m->config.rope_theta, 2.0 * i / dim));
        for (int32_t position = 0; position < positions; position++) {
            float angle = (float)position * frequency;
            table[(size_t)position * (size_t)dim + (size_t)i] = (float)cos((double)angle);
            table[(size_t)position * (size_t)dim + (size_t)(half_dim + i)] = (float)sin((double)angle);
        }
    }
    bool right = compute_buffer(m->compute, bytes, &m->rope_table, error);
    if (right) {
        cl_int status = clEnqueueWriteBuffer(m->compute->queue, m->rope_table, CL_TRUE, 0, bytes, table, 0, NULL, NULL);
        right = status == CL_SUCCESS || fail_opencl(error, "clEnqueueWriteBuffer", status);
    }
    free(table);
    return right;
}

static bool make_buffers(model *m, failure *error)
{
    const model_config *config = &m->config;
    size_t rows = (size_t)padded(m->max_rows), last = (size_t)padded(m->max_logits), word = sizeof(float);
    size_t hidden = (size_t)config->hidden_size, middle = (size_t)config->intermediate_size;
    size_t q = (size_t)config->num_heads * (size_t)config->head_dim;
    size_t kv = (size_t)config->num_kv_heads * (size_t)config->head_dim;
    const struct {
        size_t bytes;
        cl_mem *memory;
    } buffers[] = {
        {rows * hidden * word, &m->hidden},      {rows * hidden * word, &m->normed},
        {rows * (q + 2 * kv) * word, &m->qkv},   {rows * q * word, &m->attention},
        {rows * 2 * middle * word, &m->gate_up}, {rows * middle * word, &m->gated},
        {last * hidden * word, &m->last},        {last * (size_t)config->vocab_size * word, &m->logits},
        {rows * sizeof(int32_t), &m->tokens},    {rows * sizeof(int32_t), &m->positions},
        {last * sizeof(int32_t), &m->picked},    {last * sizeof(model_best), &m->best},
    };

    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (!compute_buffer(m->compute, buffers[i].bytes, buffers[i].memory, error))
            return false;
    return true;
}

/* CLBlast builds its kernels at its first call, which takes seconds: here rather than in the first step. */
static bool warm_up(model *m, failure *error)
{
    const model_config *config = &m->config;
    const product p = {.in = m->attention,
                       .weight = m->weights.layers[0].out,
                       .out = m->hidden,
                       .rows = 1,
                       .inputs = config->num_heads * config->head_dim,
                       .outputs = config->hidden_size};

    if (!compute_product(m->compute, &p, error))
        return false;
    cl_int status = clFinish(m->compute->queue);
    return status == CL_SUCCESS || fail_opencl(error, "clFinish", status);
}

bool model_create(model *m, compute *c, const char *dir, int32_t max_rows, int32_t max_logits, failure *error)
{
    memset(m, 0, sizeof *m);
    m->compute = c;
    m->max_rows = max_rows;
    m->max_logits = max_logits;
    return model_config_read(dir, &m->config, error) && make_rope_table(m, error) && make_buffers(m, error) &&
           model_weights_read(&m->weights, c, &m->config, dir, error) && warm_up(m, error);
}

void model_destroy(model *m)
{
    cl_mem buffers[] = {m->hidden, m->normed,     m->qkv,    m->attention, m->gate_up, m->gated, m->last,
                        m->logits, m->rope_table, m->tokens, m->positions, m->picked,  m->best};

    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (buffers[i] != NULL)
            clReleaseMemObject(buffers[i]);
    model_weights_release(&m->weights, &m->config);
    memset(m, 0, sizeof *m);
}

static bool norm(model *m, cl_mem in, cl_mem weight, cl_mem out, int32_t rows, bool picked, failure *error)
{
    int n = m->config.hidden_size, use_picked = picked;
    float epsilon = m->config.rms_norm_eps;
    size_t local = m->compute->group, global[2] = {(size_t)rows * local, 1};
    const kernel_arg args[] = {ARG(in), ARG(weight), ARG(n), ARG(epsilon), ARG(m->picked), ARG(use_picked), ARG(out)};

    return compute_run(m->compute, m->compute->rms_norm, "rms_norm", args, 7, global, &local, error);
}

/* q and k of every row are neighbours in a row of qkv, so one launch rotates both. */
static bool rotate(model *m, int32_t rows, failure *error)
{
    int dim = m->config.head_dim, heads = m->config.num_heads + m->config.num_kv_heads;
    int stride = (heads + m->config.num_kv_heads) * dim;
    size_t global[2] = {(size_t)heads, (size_t)rows};
    const kernel_arg args[] = {ARG(m->qkv), ARG(m->positions), ARG(m->rope_table), ARG(stride), ARG(dim)};

    return compute_run(m->compute, m->compute->rope, "rope", args, 5, global, NULL, error);
}

/* Appends the step's keys and values to the cache, then attends to everything in it. */
static bool attend(model *m, kvleaf_plan *plan, int32_t layer, failure *error)
{
    const model_config *config = &m->config;
    const kvleaf_exec exec = {.struct_size = sizeof exec, .queue = m->compute->queue};
    uint64_t q = (uint64_t)config->num_heads * (uint64_t)config->head_dim;
    uint64_t kv = (uint64_t)config->num_kv_heads * (uint64_t)config->head_dim;
    kvleaf_tensor query = {.handle = m->qkv, .dtype = KVLEAF_F32, .token_stride = (int64_t)(q + 2 * kv)};
    kvleaf_tensor key = query, value = query;
    const kvleaf_tensor out = {.handle = m->attention, .dtype = KVLEAF_F32};

    key.offset = q * sizeof(float);
    value.offset = (q + kv) * sizeof(float);
    if (kvleaf_append_attend(plan, layer, &key, &value, &query, &out, NULL, &exec) != KVLEAF_OK)
        return fail_kvleaf(error, "kvleaf_append_attend");
    return true;
}

static bool multiply(model *m, cl_mem in, int32_t inputs, cl_mem weight, int32_t outputs, cl_mem out, int32_t rows,
                     bool accumulate, failure *error)
{
    const product p = {in, weight, out, rows, inputs, outputs, accumulate};

    return compute_product(m->compute, &p, error);
}

static bool run_layer(model *m, kvleaf_plan *plan, int32_t index, int32_t rows, failure *error)
{
    const model_config *config = &m->config;
    const layer_weights *w = &m->weights.layers[index];
    int hidden = config->hidden_size, middle = config->intermediate_size;
    int q = config->num_heads * config->head_dim, kv = config->num_kv_heads * config->head_dim;
    size_t global[2] = {(size_t)middle, (size_t)rows};
    const kernel_arg gate_args[] = {ARG(m->gate_up), ARG(middle), ARG(m->gated)};

    return norm(m, m->hidden, w->attention_norm, m->normed, rows, false, error) &&
           multiply(m, m->normed, hidden, w->qkv, q + 2 * kv, m->qkv, rows, false, error) && rotate(m, rows, error) &&
           attend(m, plan, index, error) &&
           multiply(m, m->attention, q, w->out, hidden, m->hidden, rows, true, error) &&
           norm(m, m->hidden, w->mlp_norm, m->normed, rows, false, error) &&
           multiply(m, m->normed, hidden, w->gate_up, 2 * middle, m->gate_up, rows, false, error) &&
           compute_run(m->compute, m->compute->silu_mul, "silu_mul", gate_args, 3, global, NULL, error) &&
           multiply(m, m->gated, middle, w->down, hidden, m->hidden, rows, true, error);
}

static bool upload(model *m, cl_mem memory, const int32_t *data, int32_t count, failure *error)
{
    cl_int status =
        clEnqueueWriteBuffer(m->compute->queue, memory, CL_TRUE, 0, (size_t)count * sizeof *data, data, 0, NULL, NULL);

    return status == CL_SUCCESS || fail_opencl(error, "clEnqueueWriteBuffer", status);
}

bool model_forward(model *m, kvleaf_plan *plan, const model_step *step, failure *error)
{
    int hidden = m->config.hidden_size, vocab = m->config.vocab_size;
    size_t global[2] = {(size_t)hidden, (size_t)step->rows};
    const kernel_arg embed_args[] = {ARG(m->tokens), ARG(m->weights.embedding), ARG(hidden), ARG(vocab),
                                     ARG(m->hidden)};

    if (step->rows > m->max_rows || step->num_logits > m->max_logits)
        return fail(error, "KVLEAF_TOO_SMALL", "a step of %d rows and %d logits is over the limits %d and %d",
                    (int)step->rows, (int)step->num_logits, (int)m->max_rows, (int)m->max_logits);
    if (!upload(m, m->tokens, step->tokens, step->rows, error) ||
        !upload(m, m->positions, step->positions, step->rows, error) ||
        (step->num_logits > 0 && !upload(m, m->picked, step->logit_rows, step->num_logits, error)) ||
        !compute_run(m->compute, m->compute->embed, "embed", embed_args, 5, global, NULL, error))
        return false;
    for (int32_t i = 0; i < m->config.num_layers; i++)
        if (!run_layer(m, plan, i, step->rows, error))
            return false;
    if (step->num_logits == 0)
        return true;
    return norm(m, m->hidden, m->weights.norm, m->last, step->num_logits, true, error) &&
           multiply(m, m->last, hidden, m->weights.head, vocab, m->logits, step->num_logits, false, error);
}

bool model_read_logits(model *m, const model_step *step, float *logits, failure *error)
{
    size_t bytes = (size_t)step->num_logits * (size_t)m->config.vocab_size * sizeof *logits;
    cl_int status = step->num_logits == 0
                        ? clFinish(m->compute->queue)
                        : clEnqueueReadBuffer(m->compute->queue, m->logits, CL_TRUE, 0, bytes, logits, 0, NULL, NULL);

    return status == CL_SUCCESS || fail_opencl(error, "reading the logits", status);
}

bool model_read_best(model *m, const model_step *step, model_best *best, failure *error)
{
    int vocab = m->config.vocab_size;
    size_t local = m->compute->group, global[2] = {(size_t)step->num_logits * local, 1};
    size_t bytes = (size_t)step->num_logits * sizeof *best;
    const kernel_arg args[] = {ARG(m->logits), ARG(vocab), ARG(m->best)};

    if (step->num_logits == 0)
        return model_read_logits(m, step, NULL, error);
    if (!compute_run(m->compute, m->compute->best_token, "best_token", args, 3, global, &local, error))
        return false;
    cl_int status = clEnqueueReadBuffer(m->compute->queue, m->best, CL_TRUE, 0, bytes, best, 0, NULL, NULL);
    return status == CL_SUCCESS || fail_opencl(error, "reading the best tokens", status);
}
