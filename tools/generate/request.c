/* SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <errno.h>
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

static const char *const known_fields[] = {"id",   "tokens", "max_new_tokens", "temperature", "top_p",
                                           "seed", "n",      "beam",           "stop_tokens", "teacher"};

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

static bool read_id(const cJSON *root, request *r, failure *error)
{
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(root, "id");

    if (id == NULL)
        return fail(error, INVALID, "id is missing");
    if (!cJSON_IsString(id) && !cJSON_IsNumber(id))
        return fail(error, INVALID, "id is %s, neither a string nor a number", kind_of(id));
    r->id = cJSON_PrintUnformatted(id);
    return r->id != NULL || fail(error, NO_MEMORY, "no memory for an id");
}

static bool read_sampling(const cJSON *root, request *r, failure *error)
{
    double temperature = 0, top_p = 1, seed = 0, samples = 1, max_new = DEFAULT_NEW_TOKENS;
    const cJSON *beam = cJSON_GetObjectItemCaseSensitive(root, "beam");

    if (!number_field(root, "max_new_tokens", 1, 1 << 24, false, true, &max_new, error) ||
        !number_field(root, "temperature", 0, MAX_TEMPERATURE, false, false, &temperature, error) ||
        !number_field(root, "top_p", 0, 1, true, false, &top_p, error) ||
        !number_field(root, "seed", 0, MAX_EXACT, false, true, &seed, error) ||
        !number_field(root, "n", 1, 1 << 20, false, true, &samples, error))
        return false;
    if (samples != 1)
        return fail(error, UNSUPPORTED, "n is %g, only 1 sample a request is supported", samples);
    if (beam != NULL && !(cJSON_IsNumber(beam) && beam->valuedouble == 1))
        return fail(error, UNSUPPORTED, "beam is not supported");
    r->max_new = (int32_t)max_new;
    r->max_new_given = cJSON_HasObjectItem(root, "max_new_tokens");
    r->temperature = (float)temperature;
    /* A share that rounds to 0 in float32 still keeps the best token. */
    r->top_p = (float)top_p > 0 ? (float)top_p : 1e-30f;
    r->seed = (uint64_t)seed;
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

static bool read_tokens(const cJSON *root, const model_config *config, request *r, failure *error)
{
    const cJSON *teacher = cJSON_GetObjectItemCaseSensitive(root, "teacher");

    if (teacher != NULL) {
        int32_t count;
        if (!token_array(teacher, "teacher", config->vocab_size, 0, &r->teacher, &count, error))
            return false;
        if (count == 0)
            return fail(error, INVALID, "teacher is empty");
        r->max_new = count;
        r->max_new_given = true;
        r->num_stop_tokens = 0;
        r->reports = calloc((size_t)count, sizeof *r->reports);
        if (r->reports == NULL)
            return fail(error, NO_MEMORY, "no memory for %d reports", (int)count);
    }
    const cJSON *tokens = cJSON_GetObjectItemCaseSensitive(root, "tokens");
    if (!token_array(tokens, "tokens", config->vocab_size, r->max_new, &r->tokens, &r->prompt, error))
        return false;
    if (r->prompt == 0)
        return fail(error, INVALID, "tokens is empty, at least 1 is needed");
    r->length = r->prompt;
    return true;
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

/* A request of one line; r->id is set as soon as it is known, for the error line. */
static bool parse_request(const char *text, const model_config *config, request *r, failure *error)
{
    const char *end = NULL;
    int64_t bad = first_bad_byte(text);
    if (bad >= 0)
        return fail(error, INVALID, "no JSON: byte %lld of the line is not UTF-8", (long long)bad);
    cJSON *root = cJSON_ParseWithOpts(text, &end, 1);
    if (root == NULL)
        return fail(error, INVALID, "no JSON: error at byte %d, near '%.24s'", (int)(end ? end - text : 0),
                    end ? end : "");
    bool right = cJSON_IsObject(root) || fail(error, INVALID, "the line is %s, not an object", kind_of(root));
    right = right && read_id(root, r, error) && check_names(root, error) && read_sampling(root, r, error) &&
            read_stop_tokens(root, config, r, error) && read_tokens(root, config, r, error);
    cJSON_Delete(root);
    return right;
}

static void release_request(request *r)
{
    cJSON_free(r->id);
    free(r->tokens);
    free(r->teacher);
    free(r->reports);
    memset(r, 0, sizeof *r);
}

/* One line of any length without its newline; *text grows as needed. 1 read, 0 at the end, -1 no memory. */
static int read_line(FILE *file, char **text, size_t *capacity)
{
    size_t length = 0;
    int c;

    while ((c = getc(file)) != EOF && c != '\n') {
        if (length + 1 >= *capacity) {
            size_t larger = *capacity ? *capacity * 2 : 4096;
            char *grown = realloc(*text, larger);
            if (grown == NULL)
                return -1;
            *text = grown;
            *capacity = larger;
        }
        /* A NUL would end the text early and hide what follows. */
        (*text)[length++] = c == '\0' ? '\1' : (char)c;
    }
    if (c == EOF && length == 0)
        return 0;
    if (*text == NULL && (*text = malloc(*capacity = 4096)) == NULL)
        return -1;
    (*text)[length] = '\0';
    return 1;
}

static bool blank(const char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    return *text == '\0';
}

static request *next_slot(request_list *list)
{
    if (list->count == list->capacity) {
        int32_t larger = list->capacity ? list->capacity * 2 : 64;
        request *grown = realloc(list->items, (size_t)larger * sizeof *grown);
        if (grown == NULL)
            return NULL;
        list->items = grown;
        list->capacity = larger;
    }
    memset(&list->items[list->count], 0, sizeof *list->items);
    return &list->items[list->count];
}

bool requests_read(request_list *list, FILE *file, const model_config *config, FILE *out, failure *error)
{
    char *text = NULL;
    size_t capacity = 0;
    int64_t line = 0;
    int got;

    memset(list, 0, sizeof *list);
    while ((got = read_line(file, &text, &capacity)) == 1) {
        failure wrong;
        line++;
        if (blank(text))
            continue;
        request *r = next_slot(list);
        if (r == NULL) {
            got = -1;
            break;
        }
        r->line = line;
        if (parse_request(text, config, r, &wrong)) {
            list->count++;
            continue;
        }
        print_request_error(out, r->id, line, &wrong);
        release_request(r);
        list->errors++;
    }
    free(text);
    if (got < 0)
        return fail(error, NO_MEMORY, "no memory for line %lld of the requests", (long long)line);
    return !ferror(file) || fail(error, INVALID, "the requests can't be read: %s", strerror(errno));
}

void requests_release(request_list *list)
{
    for (int32_t i = 0; i < list->count; i++)
        release_request(&list->items[i]);
    free(list->items);
    memset(list, 0, sizeof *list);
}
