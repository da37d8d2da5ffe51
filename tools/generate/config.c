/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INVALID     "KVLEAF_INVALID"
#define UNSUPPORTED "KVLEAF_UNSUPPORTED"

#define MAX_CONFIG_BYTES (16 << 20)

static bool read_json(const char *path, cJSON **out, failure *error)
{
    FILE *file = fopen(path, "rb");
    size_t size = 0, capacity = 1 << 16, got;
    char *text = malloc(capacity + 1);

    *out = NULL;
    if (file == NULL || text == NULL) {
        fail(error, INVALID, "%s: %s", path, file == NULL ? strerror(errno) : "no memory");
        goto end;
    }
    while ((got = fread(text + size, 1, capacity - size, file)) > 0) {
        size += got;
        if (size < capacity)
            continue;
        char *larger = capacity < MAX_CONFIG_BYTES ? realloc(text, capacity * 2 + 1) : NULL;
        if (larger == NULL) {
            fail(error, INVALID, "%s: over the limit of %d bytes", path, MAX_CONFIG_BYTES);
            goto end;
        }
        text = larger;
        capacity *= 2;
    }
    text[size] = '\0';
    *out = cJSON_ParseWithLength(text, size + 1);
    if (!cJSON_IsObject(*out)) {
        cJSON_Delete(*out);
        *out = NULL;
        fail(error, "KVLEAF_CORRUPT", "%s: no JSON object", path);
    }
end:
    free(text);
    if (file != NULL)
        fclose(file);
    return *out != NULL;
}

static const cJSON *field(const cJSON *root, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, name);

    return cJSON_IsNull(item) ? NULL : item;
}

/* A whole number in 1 .. limit; `fallback` > 0 serves where the field is absent. */
static bool count_field(const cJSON *root, const char *name, int32_t fallback, int32_t limit, int32_t *out,
                        failure *error)
{
    const cJSON *item = field(root, name);

    if (item == NULL && fallback > 0) {
        *out = fallback;
        return true;
    }
    if (item == NULL)
        return fail(error, INVALID, "config.json: %s is missing", name);
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 1) || item->valuedouble > limit ||
        item->valuedouble != floor(item->valuedouble))
        return fail(error, INVALID, "config.json: %s is %g, not a whole number in 1 .. %d", name,
                    cJSON_IsNumber(item) ? item->valuedouble : NAN, (int)limit);
    *out = (int32_t)item->valuedouble;
    return true;
}

static bool positive_field(const cJSON *root, const char *name, double fallback, double *out, failure *error)
{
    const cJSON *item = field(root, name);

    *out = fallback;
    if (item == NULL)
        return true;
    if (!cJSON_IsNumber(item) || !(item->valuedouble > 0) || isinf(item->valuedouble))
        return fail(error, INVALID, "config.json: %s is %g, not a positive number", name,
                    cJSON_IsNumber(item) ? item->valuedouble : NAN);
    *out = item->valuedouble;
    return true;
}

static bool refuse_true(const cJSON *root, const char *name, failure *error)
{
    if (cJSON_IsTrue(field(root, name)))
        return fail(error, UNSUPPORTED, "config.json: %s is true, which this program doesn't run", name);
    return true;
}

/* rope_scaling, and rope_parameters, which newer files have in its stead. */
static bool read_rope(const cJSON *root, model_config *out, failure *error)
{
    const cJSON *parameters = field(root, "rope_parameters");
    const cJSON *scaling = field(root, "rope_scaling");
    const cJSON *type;

    if (scaling == NULL)
        scaling = parameters;
    type = field(scaling, "rope_type");
    if (type == NULL)
        type = field(scaling, "type");
    if (scaling != NULL && !(cJSON_IsString(type) && strcmp(type->valuestring, "default") == 0))
        return fail(error, UNSUPPORTED, "config.json: rope_scaling of type '%.40s' is not supported, only 'default'",
                    cJSON_IsString(type) ? type->valuestring : "(none)");
    if (!positive_field(root, "rope_theta", 10000.0, &out->rope_theta, error))
        return false;
    return parameters == NULL || positive_field(parameters, "rope_theta", out->rope_theta, &out->rope_theta, error);
}

static bool read_end_tokens(const cJSON *item, model_config *out, failure *error)
{
    int32_t count = cJSON_IsArray(item) ? cJSON_GetArraySize(item) : 1;

    if (count > MAX_END_TOKENS)
        return fail(error, UNSUPPORTED, "config: eos_token_id has %d tokens, the limit is %d", (int)count,
                    MAX_END_TOKENS);
    out->num_end_tokens = 0;
    for (int32_t i = 0; i < count; i++) {
        const cJSON *token = cJSON_IsArray(item) ? cJSON_GetArrayItem(item, i) : item;
        if (!cJSON_IsNumber(token) || !(token->valuedouble >= 0) || token->valuedouble >= out->vocab_size)
            return fail(error, INVALID, "config: eos_token_id %g is not in 0 .. %d",
                        cJSON_IsNumber(token) ? token->valuedouble : NAN, (int)out->vocab_size - 1);
        out->end_tokens[out->num_end_tokens++] = (int32_t)token->valuedouble;
    }
    return true;
}

static bool check_kind(const cJSON *root, failure *error)
{
    const cJSON *type = field(root, "model_type"), *act = field(root, "hidden_act");

    if (!cJSON_IsString(type) || (strcmp(type->valuestring, "llama") != 0 && strcmp(type->valuestring, "mistral") != 0))
        return fail(error, UNSUPPORTED, "config.json: model_type '%.40s' is not supported, only 'llama' and 'mistral'",
                    cJSON_IsString(type) ? type->valuestring : "(none)");
    if (act != NULL && !(cJSON_IsString(act) && strcmp(act->valuestring, "silu") == 0))
        return fail(error, UNSUPPORTED, "config.json: hidden_act '%.40s' is not supported, only 'silu'",
                    cJSON_IsString(act) ? act->valuestring : "(no string)");
    if (field(root, "quantization_config") != NULL)
        return fail(error, UNSUPPORTED, "config.json: quantization_config is not supported, only plain weights");
    return refuse_true(root, "attention_bias", error) && refuse_true(root, "mlp_bias", error) &&
           refuse_true(root, "rope_interleaved", error);
}

/* sliding_window, for every layer or, where layer_types is there, for those of type sliding_attention. */
static bool read_windows(const cJSON *root, model_config *out, failure *error)
{
    const cJSON *types = field(root, "layer_types");
    int32_t window = 0;

    if (field(root, "sliding_window") != NULL && !count_field(root, "sliding_window", 0, INT32_MAX, &window, error))
        return false;
    if (types != NULL && cJSON_GetArraySize(types) != out->num_layers)
        return fail(error, INVALID, "config.json: layer_types has %d entries, the model %d layers",
                    cJSON_GetArraySize(types), (int)out->num_layers);
    for (int32_t i = 0; i < out->num_layers; i++) {
        const cJSON *type = cJSON_GetArrayItem(types, i);
        bool sliding = types == NULL || (cJSON_IsString(type) && strcmp(type->valuestring, "sliding_attention") == 0);
        if (!sliding && !(cJSON_IsString(type) && strcmp(type->valuestring, "full_attention") == 0))
            return fail(error, UNSUPPORTED,
                        "config.json: layer_types[%d] is '%.40s', only full_attention and sliding_attention are "
                        "supported",
                        (int)i, cJSON_IsString(type) ? type->valuestring : "(no string)");
        out->windows[i] = sliding ? window : 0;
    }
    return true;
}

static bool read_fields(const cJSON *root, model_config *out, failure *error)
{
    double epsilon;

    if (!check_kind(root, error) || !count_field(root, "vocab_size", 0, 1 << 24, &out->vocab_size, error) ||
        !count_field(root, "hidden_size", 0, 1 << 20, &out->hidden_size, error) ||
        !count_field(root, "intermediate_size", 0, 1 << 20, &out->intermediate_size, error) ||
        !count_field(root, "num_hidden_layers", 0, MAX_LAYERS, &out->num_layers, error) ||
        !count_field(root, "num_attention_heads", 0, 4096, &out->num_heads, error) ||
        !count_field(root, "num_key_value_heads", out->num_heads, 4096, &out->num_kv_heads, error) ||
        !count_field(root, "max_position_embeddings", 2048, 1 << 24, &out->max_positions, error) ||
        !positive_field(root, "rms_norm_eps", 1e-6, &epsilon, error) || !read_rope(root, out, error) ||
        !read_windows(root, out, error))
        return false;
    out->rms_norm_eps = (float)epsilon;
    if (field(root, "head_dim") == NULL && out->hidden_size % out->num_heads != 0)
        return fail(error, INVALID, "config.json: hidden_size %d is no multiple of num_attention_heads %d",
                    (int)out->hidden_size, (int)out->num_heads);
    int32_t usual = out->hidden_size / out->num_heads > 0 ? out->hidden_size / out->num_heads : 1;
    if (!count_field(root, "head_dim", usual, 256, &out->head_dim, error))
        return false;
    if (out->head_dim > 256 || out->head_dim % 2 != 0)
        return fail(error, UNSUPPORTED, "config.json: head_dim %d is not an even number up to 256", (int)out->head_dim);
    if (out->num_heads % out->num_kv_heads != 0)
        return fail(error, INVALID, "config.json: num_attention_heads %d is no multiple of num_key_value_heads %d",
                    (int)out->num_heads, (int)out->num_kv_heads);
    out->tied_embeddings = cJSON_IsTrue(field(root, "tie_word_embeddings"));
    const cJSON *end = field(root, "eos_token_id");
    return end == NULL || read_end_tokens(end, out, error);
}

bool model_config_read(const char *dir, model_config *out, failure *error)
{
    char path[4096];
    cJSON *root;
    failure ignored;

    memset(out, 0, sizeof *out);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (!read_json(path, &root, error))
        return false;
    bool right = read_fields(root, out, error);
    cJSON_Delete(root);
    if (!right)
        return false;

    /* A model without generation_config.json is whole. */
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    if (!read_json(path, &root, &ignored))
        return true;
    const cJSON *end = field(root, "eos_token_id");
    right = end == NULL || read_end_tokens(end, out, error);
    cJSON_Delete(root);
    return right;
}
