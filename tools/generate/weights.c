/* SPDX-License-Identifier: Apache-2.0 */
/* From model.safetensors to the device: each tensor goes up in pieces as the file has it, and a
 * kernel there widens it to float32 and turns it input-major. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cli.h"
#include "model.h"

/* Bytes of a piece: large enough to hide the launch, small beside any model. */
enum { PIECE_BYTES = 16 << 20, TILE = 16 };

typedef struct loader {
    compute *c;
    safetensors file;
    unsigned char *host;
    cl_mem device;
    size_t piece;
    failure *error;
} loader;

/* Rows first_row .. of an input-major matrix of target_rows outputs from the named [rows, columns]
 * tensor; rank 1 if rows is 0 (then one row of `columns`, in order). */
static bool load(loader *l, const char *name, int32_t rows, int32_t columns, cl_mem target, int32_t target_rows,
                 int32_t first_row)
{
    const tensor_entry *entry;

    if (!safetensors_find(&l->file, name, rows, columns, &entry, l->error))
        return false;
    /* A vector is a matrix of one column: in order either way. */
    int64_t lines = rows == 0 ? columns : rows, width = rows == 0 ? 1 : columns;
    size_t line_bytes = (size_t)width * weight_dtype_size(entry->dtype);
    int64_t lines_a_piece = (int64_t)(l->piece / line_bytes);
    int dtype = (int)entry->dtype, row_columns = (int)width, outputs = target_rows;

    if (lines_a_piece < 1)
        return fail(l->error, "KVLEAF_UNSUPPORTED", "tensor %s: a row of %zu bytes is over the limit of %zu", name,
                    line_bytes, l->piece);
    for (int64_t at = 0; at < lines; at += lines_a_piece) {
        int count = (int)(lines - at < lines_a_piece ? lines - at : lines_a_piece), first = first_row + (int)at;
        size_t bytes = (size_t)count * line_bytes;
        size_t global[2] = {((size_t)count + TILE - 1) / TILE, ((size_t)width + TILE - 1) / TILE};
        if (!safetensors_read(&l->file, entry, (uint64_t)at * line_bytes, l->host, bytes, l->error))
            return false;
        cl_int status = clEnqueueWriteBuffer(l->c->queue, l->device, CL_TRUE, 0, bytes, l->host, 0, NULL, NULL);
        if (status != CL_SUCCESS)
            return fail_opencl(l->error, "clEnqueueWriteBuffer", status);
        const kernel_arg args[] = {
            {sizeof(cl_mem), &l->device}, {sizeof count, &count},    {sizeof row_columns, &row_columns},
            {sizeof dtype, &dtype},       {sizeof(cl_mem), &target}, {sizeof outputs, &outputs},
            {sizeof first, &first}};
        if (!compute_run(l->c, l->c->load_weight, "load_weight", args, 7, global, NULL, l->error))
            return false;
    }
    return true;
}

static bool matrix(loader *l, int64_t inputs, int64_t outputs, cl_mem *out)
{
    return compute_buffer(l->c, (size_t)inputs * (size_t)outputs * sizeof(float), out, l->error);
}

static bool load_vector(loader *l, const char *name, int32_t size, cl_mem *out)
{
    return matrix(l, 1, size, out) && load(l, name, 0, size, *out, size, 0);
}

static bool load_layer(loader *l, const model_config *m, int32_t index, layer_weights *w)
{
    char name[128];
    int32_t hidden = m->hidden_size, middle = m->intermediate_size;
    int32_t q = m->num_heads * m->head_dim, kv = m->num_kv_heads * m->head_dim, all = q + 2 * kv;
    const char *prefix = "model.layers.%d.%s.weight";

#define NAMED(part) (snprintf(name, sizeof name, prefix, (int)index, part), name)
    return load_vector(l, NAMED("input_layernorm"), hidden, &w->attention_norm) &&
           load_vector(l, NAMED("post_attention_layernorm"), hidden, &w->mlp_norm) && matrix(l, hidden, all, &w->qkv) &&
           load(l, NAMED("self_attn.q_proj"), q, hidden, w->qkv, all, 0) &&
           load(l, NAMED("self_attn.k_proj"), kv, hidden, w->qkv, all, q) &&
           load(l, NAMED("self_attn.v_proj"), kv, hidden, w->qkv, all, q + kv) && matrix(l, q, hidden, &w->out) &&
           load(l, NAMED("self_attn.o_proj"), hidden, q, w->out, hidden, 0) &&
           matrix(l, hidden, (int64_t)2 * middle, &w->gate_up) &&
           load(l, NAMED("mlp.gate_proj"), middle, hidden, w->gate_up, 2 * middle, 0) &&
           load(l, NAMED("mlp.up_proj"), middle, hidden, w->gate_up, 2 * middle, middle) &&
           matrix(l, middle, hidden, &w->down) && load(l, NAMED("mlp.down_proj"), hidden, middle, w->down, hidden, 0);
#undef NAMED
}

static bool load_embeddings(loader *l, const model_config *m, model_weights *w)
{
    if (!load_vector(l, "model.norm.weight", m->hidden_size, &w->norm) ||
        !matrix(l, m->hidden_size, m->vocab_size, &w->embedding) ||
        !load(l, "model.embed_tokens.weight", m->vocab_size, m->hidden_size, w->embedding, m->vocab_size, 0))
        return false;
    if (m->tied_embeddings) {
        clRetainMemObject(w->embedding);
        w->head = w->embedding;
        return true;
    }
    return matrix(l, m->hidden_size, m->vocab_size, &w->head) &&
           load(l, "lm_head.weight", m->vocab_size, m->hidden_size, w->head, m->vocab_size, 0);
}

static bool load_all(loader *l, const model_config *m, const char *dir, model_weights *w)
{
    char path[4096];

    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (!safetensors_open(&l->file, path, l->error))
        return false;
    w->layers = calloc((size_t)m->num_layers, sizeof *w->layers);
    l->host = malloc(l->piece);
    if (w->layers == NULL || l->host == NULL)
        return fail(l->error, "KVLEAF_NO_MEMORY", "no host memory for the weights");
    if (!compute_buffer(l->c, l->piece, &l->device, l->error) || !load_embeddings(l, m, w))
        return false;
    for (int32_t i = 0; i < m->num_layers; i++) {
        if (!load_layer(l, m, i, &w->layers[i]))
            return false;
        cli_progress("loading layer", i + 1, m->num_layers);
    }
    return true;
}

bool model_weights_read(model_weights *w, compute *c, const model_config *config, const char *dir, failure *error)
{
    loader l = {.c = c, .piece = PIECE_BYTES, .error = error};

    memset(w, 0, sizeof *w);
    bool right = load_all(&l, config, dir, w);
    cl_int status = clFinish(c->queue);
    if (right && status != CL_SUCCESS)
        right = fail_opencl(error, "clFinish", status);
    if (l.device != NULL)
        clReleaseMemObject(l.device);
    free(l.host);
    safetensors_close(&l.file);
    return right;
}

static void release(cl_mem memory)
{
    if (memory != NULL)
        clReleaseMemObject(memory);
}

void model_weights_release(model_weights *w, const model_config *config)
{
    for (int32_t i = 0; w->layers != NULL && i < config->num_layers; i++) {
        const layer_weights *layer = &w->layers[i];
        release(layer->attention_norm);
        release(layer->mlp_norm);
        release(layer->qkv);
        release(layer->out);
        release(layer->gate_up);
        release(layer->down);
    }
    free(w->layers);
    release(w->embedding);
    release(w->head);
    release(w->norm);
    memset(w, 0, sizeof *w);
}
