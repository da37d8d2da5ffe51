/* SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INVALID     "KVLEAF_INVALID"
#define UNSUPPORTED "KVLEAF_UNSUPPORTED"
#define NO_MEMORY   "KVLEAF_NO_MEMORY"

/* Seeds and ids are exact in JSON only this far. */
#define MAX_EXACT 9007199254740992.0
/* Hotter than this, every token is as likely as any other. */
#define MAX_TEMPERATURE 1000.0

/* Answers of one request; the batch limits them further. */
#define MAX_SAMPLES 4096

static const char *const known_fields[] = {"id", "tokens", "max_new_tokens", "temperature", "top_p",    "seed",
                                           "n",  "beam",   "stop_tokens",    "teacher",     "priority", "salt"};

static const char *kind_of(const cJSON *item)
{
    return cJSON_IsString(item)   ? "a string"
           : cJSON_IsBool(item)   ? "a boolean"
           : cJSON_IsArray(item)  ? "an array"
           : cJSON_IsObject(item) ? "an object"
           : cJSON_IsNumber(item) ? "a number"
                                  : "null";
}

/* A number in low .. high (low itself excluded if `above`); *out is left alone if the field is absent. */
static bool number_field(const cJSON *root, const char *name, double low, double high, bool above, bool whole,
                         double *out, failure *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, name);

    if (item == NULL)
        return true;
    if (!cJSON_IsNumber(item))
        return fail(error, INVALID, "%s is %s, not a number", name, kind_of(item));
    double value = item->valuedouble;
    bool inside = value <= high && (above ? value > low : value >= low); /* false for NaN */
    if (!inside)
        return fail(error, INVALID, "%s is %.17g, not in %s%g .. %.17g", name, value, above ? "more than " : "", low,
                    high);
    if (whole && value != floor(value))
        return fail(error, INVALID, "%s is %.17g, not a whole number", name, value);
    *out = value;
    return true;
}

/* An array of token ids to a new array with room for `room` more. */
static bool token_array(const cJSON *item, const char *name, int32_t vocab, int32_t room, int32_t **out, int32_t *count,
                        failure *error)
{
    const cJSON *token;
    int32_t index = 0;

    if (!cJSON_IsArray(item))
        return fail(error, INVALID, "%s is %s, not an array of token ids", name, item ? kind_of(item) : "missing");
    *count = cJSON_GetArraySize(item);
    *out = malloc(((size_t)*count + (size_t)room + 1) * sizeof **out);
    if (*out == NULL)
        return fail(error, NO_MEMORY, "no memory for %d tokens", (int)(*count + room));
    cJSON_ArrayForEach(token, item)
    {
        if (!cJSON_IsNumber(token))
            return fail(error, INVALID, "%s[%d] is %s, not a token id", name, (int)index, kind_of(token));
        double value = token->valuedouble;
        if (!(value >= 0 && value < vocab))
            return fail(error, INVALID, "%s[%d] is %.17g, not in 0 .. %d (the vocabulary)", name, (int)index, value,
                        (int)vocab - 1);
        if (value != floor(value))
            return fail(error, INVALID, "%s[%d] is %.17g, not a whole number", name, (int)index, value);
        (*out)[index++] = (int32_t)value;
    }
    return true;
}

static bool check_names(const cJSON *root, failure *error)
{
    const cJSON *item;

    cJSON_ArrayForEach(item, root)
    {
        bool known = false;
        for (size_t i = 0; i < sizeof known_fields / sizeof *known_fields; i++)
            known = known || strcmp(known_fields[i], item->string) == 0;
        if (!known)
            return fail(error, INVALID, "field '%.60s' is unknown", item->string);
    }
    return true;
}

static bool read_id(const cJSON *root, const char *name, char **out, failure *error)
{
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(root, name);

    if (id == NULL)
        return fail(error, INVALID, "%s is missing", name);
    if (!cJSON_IsString(id) && !cJSON_IsNumber(id))
        return fail(error, INVALID, "%s is %s, neither a string nor a number", name, kind_of(id));
    *out = cJSON_PrintUnformatted(id);
    return *out != NULL || fail(error, NO_MEMORY, "no memory for an id");
}

static bool read_sampling(const cJSON *root, request *r, failure *error)
{
    double temperature = 0, top_p = 1, seed = 0, samples = 1, beam = 0, max_new = DEFAULT_NEW_TOKENS, priority = 0;
    double salt = 0;

    if (!number_field(root, "max_new_tokens", 1, 1 << 24, false, true, &max_new, error) ||
        !number_field(root, "temperature", 0, MAX_TEMPERATURE, false, false, &temperature, error) ||
        !number_field(root, "top_p", 0, 1, true, false, &top_p, error) ||
        !number_field(root, "seed", 0, MAX_EXACT, false, true, &seed, error) ||
        !number_field(root, "n", 1, MAX_SAMPLES, false, true, &samples, error) ||
        !number_field(root, "beam", 1, MAX_BEAM, false, true, &beam, error) ||
        !number_field(root, "priority", KVLEAF_PRIORITY_LOW, KVLEAF_PRIORITY_HIGH, false, true, &priority, error) ||
        !number_field(root, "salt", 0, MAX_EXACT, false, true, &salt, error))
        return false;
    if (beam > 0 && samples > beam)
        return fail(error, INVALID, "n is %g, over the %g of beam", samples, beam);
    if (beam > 0 && temperature > 0)
        return fail(error, INVALID, "temperature is %g, with beam it must be 0", temperature);
    r->max_new = (int32_t)max_new;
    r->max_new_given = cJSON_HasObjectItem(root, "max_new_tokens");
    r->temperature = (float)temperature;
    /* A share that rounds to 0 in float32 still keeps the best token. */
    r->top_p = (float)top_p > 0 ? (float)top_p : 1e-30f;
    r->seed = (uint64_t)seed;
    r->salt = (uint64_t)salt;
    r->priority = (int32_t)priority;
    r->num_samples = (int32_t)samples;
    r->beam = beam > 1 ? (int32_t)beam : 0;
    r->width = r->beam ? r->beam : r->num_samples;
    return true;
}

static bool read_stop_tokens(const cJSON *root, const model_config *config, request *r, failure *error)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "stop_tokens");
    int32_t *tokens = NULL;

    if (item == NULL) {
        r->num_stop_tokens = config->num_end_tokens;
        memcpy(r->stop_tokens, config->end_tokens, sizeof config->end_tokens);
        return true;
    }
    bool right = token_array(item, "stop_tokens", config->vocab_size, 0, &tokens, &r->num_stop_tokens, error);
    if (right && r->num_stop_tokens > MAX_STOP_TOKENS)
        right = fail(error, INVALID, "stop_tokens has %d tokens, the limit is %d", (int)r->num_stop_tokens,
                     (int)MAX_STOP_TOKENS);
    if (right)
        memcpy(r->stop_tokens, tokens, (size_t)r->num_stop_tokens * sizeof *tokens);
    free(tokens);
    return right;
}

static bool read_teacher(const cJSON *root, const model_config *config, request *r, failure *error)
{
    const cJSON *teacher = cJSON_GetObjectItemCaseSensitive(root, "teacher");
    int32_t count;

    if (teacher == NULL)
        return true;
    if (r->width > 1)
        return fail(error, INVALID, "teacher takes one sample, not %d", (int)r->width);
    if (!token_array(teacher, "teacher", config->vocab_size, 0, &r->teacher, &count, error))
        return false;
    if (count == 0)
        return fail(error, INVALID, "teacher is empty");
    r->max_new = count;
    r->max_new_given = true;
    r->num_stop_tokens = 0;
    r->reports = calloc((size_t)count, sizeof *r->reports);
    return r->reports != NULL || fail(error, NO_MEMORY, "no memory for %d reports", (int)count);
}

static bool make_samples(request *r, failure *error)
{
    size_t room = (size_t)r->prompt + (size_t)r->max_new;
    bool right = true;

    if (r->beam) {
        r->finished = calloc((size_t)r->beam, sizeof *r->finished);
        right = r->finished != NULL;
    }
    for (int32_t i = 0; i < r->width && right; i++) {
        sample *at = &r->samples[i];
        at->length = r->prompt;
        sampler_init(&at->sampler, r->temperature, r->top_p, r->seed + (uint64_t)i);
        if (i > 0)
            at->tokens = malloc(room * sizeof *at->tokens);
        right = at->tokens != NULL;
        if (right && i > 0)
            memcpy(at->tokens, r->samples[0].tokens, (size_t)r->prompt * sizeof *at->tokens);
        if (r->beam) {
            at->best = calloc((size_t)r->num_best, sizeof *at->best);
            at->scratch = malloc(room * sizeof *at->scratch);
            right = right && at->best != NULL && at->scratch != NULL;
        }
    }
    return right || fail(error, NO_MEMORY, "no memory for %d samples of %zu tokens", (int)r->width, room);
}

static bool read_tokens(const cJSON *root, const model_config *config, request *r, failure *error)
{
    const cJSON *tokens = cJSON_GetObjectItemCaseSensitive(root, "tokens");

    r->samples = calloc((size_t)r->width, sizeof *r->samples);
    if (r->samples == NULL)
        return fail(error, NO_MEMORY, "no memory for %d samples", (int)r->width);
    if (!token_array(tokens, "tokens", config->vocab_size, r->max_new, &r->samples[0].tokens, &r->prompt, error))
        return false;
    if (r->prompt == 0)
        return fail(error, INVALID, "tokens is empty, at least 1 is needed");
    /* As many as go on, whatever stops. */
    r->num_best = r->beam + r->num_stop_tokens;
    if (r->beam && r->num_best > config->vocab_size)
        return fail(error, INVALID, "beam is %d beside %d stop tokens, the vocabulary has %d", (int)r->beam,
                    (int)r->num_stop_tokens, (int)config->vocab_size);
    return make_samples(r, error);
}

/* The offset of the first byte that is not UTF-8, or -1. Overlong forms pass: they harm nobody here. */
static int64_t first_bad_byte(const char *text)
{
    for (const unsigned char *at = (const unsigned char *)text; *at != 0;) {
        int more = *at < 0x80 ? 0 : *at >= 0xc2 && *at < 0xe0 ? 1 : *at >= 0xe0 && *at < 0xf0 ? 2 : 3;
        if ((*at >= 0x80 && *at < 0xc2) || *at > 0xf4)
            return at - (const unsigned char *)text;
        for (at++; more > 0; more--, at++)
            if ((*at & 0xc0) != 0x80)
                return at - (const unsigned char *)text;
    }
    return -1;
}

void request_release(request *r)
{
    if (r == NULL)
        return;
    for (int32_t i = 0; r->samples != NULL && i < r->width; i++) {
        free(r->samples[i].tokens);
        free(r->samples[i].best);
        free(r->samples[i].scratch);
    }
    for (int32_t i = 0; i < r->num_finished; i++)
        free(r->finished[i].tokens);
    free(r->finished);
    free(r->samples);
    cJSON_free(r->id);
    free(r->teacher);
    free(r->reports);
    free(r);
}

bool request_stops_at(const request *r, int32_t token)
{
    for (int32_t i = 0; i < r->num_stop_tokens; i++)
        if (r->stop_tokens[i] == token)
            return true;
    return false;
}

static line_kind read_request(const cJSON *root, int64_t line, const model_config *config, parsed_line *out)
{
    request *r = calloc(1, sizeof *r);
    failure *error = &out->error;

    if (r == NULL) {
        fail(error, NO_MEMORY, "no memory for a request");
        return LINE_WRONG;
    }
    r->line = line;
    if (read_id(root, "id", &r->id, error) && check_names(root, error) && read_sampling(root, r, error) &&
        read_stop_tokens(root, config, r, error) && read_teacher(root, config, r, error) &&
        read_tokens(root, config, r, error)) {
        out->request = r;
        return LINE_REQUEST;
    }
    out->id = r->id;
    r->id = NULL;
    request_release(r);
    return LINE_WRONG;
}

static line_kind read_cancel(const cJSON *root, parsed_line *out)
{
    double index = -1;

    if (!read_id(root, "cancel", &out->id, &out->error) ||
        !number_field(root, "index", 0, MAX_SAMPLES, false, true, &index, &out->error))
        return LINE_WRONG;
    out->index = (int32_t)index;
    return LINE_CANCEL;
}

static line_kind read_stats(const cJSON *root, parsed_line *out)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "stats");

    out->map = cJSON_IsString(item) && strcmp(item->valuestring, "map") == 0;
    if (out->map || cJSON_IsTrue(item))
        return LINE_STATS;
    fail(&out->error, INVALID, "stats is %s, neither true nor \"map\"", kind_of(item));
    return LINE_WRONG;
}

void request_parse(const char *text, int64_t line, const model_config *config, parsed_line *out)
{
    const char *end = NULL;
    int64_t bad = first_bad_byte(text);

    *out = (parsed_line){.kind = LINE_WRONG};
    if (bad >= 0) {
        fail(&out->error, INVALID, "no JSON: byte %lld of the line is not UTF-8", (long long)bad);
        return;
    }
    cJSON *root = cJSON_ParseWithOpts(text, &end, 1);
    if (root == NULL)
        fail(&out->error, INVALID, "no JSON: error at byte %d, near '%.24s'", (int)(end ? end - text : 0),
             end ? end : "");
    else if (!cJSON_IsObject(root))
        fail(&out->error, INVALID, "the line is %s, not an object", kind_of(root));
    else if (cJSON_HasObjectItem(root, "cancel"))
        out->kind = read_cancel(root, out);
    else if (cJSON_HasObjectItem(root, "stats"))
        out->kind = read_stats(root, out);
    else
        out->kind = read_request(root, line, config, out);
    cJSON_Delete(root);
}
