/* SPDX-License-Identifier: Apache-2.0 */
#include <cjson/cJSON.h>

#include "request.h"

/* A message may quote a piece of the input, cut anywhere: what is not ASCII becomes a question mark. */
static void print_message(FILE *out, const failure *error)
{
    char text[sizeof error->message];
    size_t i = 0;

    for (; error->message[i] != '\0'; i++)
        text[i] = (unsigned char)error->message[i] < 0x80 ? error->message[i] : '?';
    text[i] = '\0';
    cJSON *item = cJSON_CreateString(text);
    char *json = item ? cJSON_PrintUnformatted(item) : NULL;

    fputs(json ? json : "\"\"", out);
    cJSON_free(json);
    cJSON_Delete(item);
}

void print_request_error(FILE *out, const char *id, int64_t line, const failure *error)
{
    fprintf(out, "{\"id\":%s,\"line\":%lld,\"error\":{\"status\":\"%s\",\"message\":", id ? id : "null",
            (long long)line, error->status);
    print_message(out, error);
    fputs("}}\n", out);
    fflush(out);
}

void print_token(FILE *out, const request *r, int32_t index, int32_t token)
{
    fprintf(out, "{\"id\":%s,\"index\":%d,\"token\":%d}\n", r->id, (int)index, (int)token);
    fflush(out);
}

static void print_reports(FILE *out, const request *r, int32_t count)
{
    fputs(",\"steps\":{\"argmax\":[", out);
    for (int32_t i = 0; i < count; i++)
        fprintf(out, i ? ",%d" : "%d", (int)r->reports[i].best[0].token);
    fputs("],\"margins\":[", out);
    for (int32_t i = 0; i < count; i++)
        fprintf(out, i ? ",%.9g" : "%.9g", (double)r->reports[i].best[0].logit - (double)r->reports[i].best[1].logit);
    fputs("],\"top_ids\":[", out);
    for (int32_t i = 0; i < count; i++)
        for (int k = 0; k < REPORTED; k++)
            fprintf(out, "%s%d%s",
                    k   ? ","
                    : i ? ",["
                        : "[",
                    (int)r->reports[i].best[k].token, k == REPORTED - 1 ? "]" : "");
    fputs("],\"top_logits\":[", out);
    for (int32_t i = 0; i < count; i++)
        for (int k = 0; k < REPORTED; k++)
            fprintf(out, "%s%.9g%s",
                    k   ? ","
                    : i ? ",["
                        : "[",
                    (double)r->reports[i].best[k].logit, k == REPORTED - 1 ? "]" : "");
    fputs("]}", out);
}

static void print_answer(FILE *out, const request *r, int32_t index, const int32_t *tokens, int32_t count,
                         const char *finish_reason)
{
    const sample *at = &r->samples[index];

    fprintf(out, "{\"id\":%s,\"index\":%d,\"tokens\":[", r->id, (int)index);
    for (int32_t i = 0; i < count; i++)
        fprintf(out, i ? ",%d" : "%d", (int)tokens[i]);
    fprintf(out,
            "],\"finish_reason\":\"%s\",\"usage\":{\"prompt\":%d,\"cached\":%d,\"generated\":%d,\"peak_blocks\":%d,"
            "\"shared_blocks\":%d}",
            finish_reason, (int)r->prompt, (int)r->cached, (int)count, (int)at->peak_blocks, (int)at->shared_blocks);
}

void print_sample(FILE *out, const request *r, int32_t index, const char *finish_reason)
{
    const sample *at = &r->samples[index];
    int32_t generated = at->length - r->prompt;

    print_answer(out, r, index, at->tokens + r->prompt, generated, finish_reason);
    if (r->reports != NULL)
        print_reports(out, r, generated);
    fputs("}\n", out);
    fflush(out);
}

void print_hypothesis(FILE *out, const request *r, int32_t index)
{
    const hypothesis *h = &r->finished[index];

    print_answer(out, r, index, h->tokens, h->length, h->stopped ? "stop" : "length");
    fprintf(out, ",\"score\":%.9g}\n", h->score);
    fflush(out);
}

void print_stats(FILE *out, const kvleaf_blocks_stats *stats, int32_t running, int32_t waiting, const char *map)
{
    const struct {
        const char *name;
        double value;
    } rows[] = {
        {"running", running},
        {"waiting", waiting},
        {"total", stats->total},
        {"used", stats->used},
        {"cached", stats->cached},
        {"free", stats->free},
        {"pinned", stats->pinned},
        {"sequences", stats->sequences},
        {"swapped", stats->swapped},
        {"indexed", stats->indexed},
        {"host_total", stats->host_total},
        {"host_used", stats->host_used},
        {"tokens", (double)stats->tokens},
        {"slots_wasted", (double)stats->slots_wasted},
        {"copies", (double)stats->copies},
        {"looked_up", (double)stats->looked_up},
        {"hits", (double)stats->hits},
        {"evictions", (double)stats->evictions},
        {"swapped_out", (double)stats->swapped_out},
        {"swapped_in", (double)stats->swapped_in},
    };
    cJSON *outer = cJSON_CreateObject(), *row = cJSON_AddObjectToObject(outer, "stats");

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        cJSON_AddNumberToObject(row, rows[i].name, rows[i].value);
    if (map != NULL)
        cJSON_AddStringToObject(outer, "map", map);
    char *text = cJSON_PrintUnformatted(outer);
    fprintf(out, "%s\n", text ? text : "{\"stats\":{}}");
    fflush(out);
    cJSON_free(text);
    cJSON_Delete(outer);
}
