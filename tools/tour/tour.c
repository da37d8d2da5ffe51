/* SPDX-License-Identifier: Apache-2.0 */
#include "tour.h"

#include <stdarg.h>
#include <stdio.h>

#define PER_LINE 16

void tour_begin(tour *t, int figure, const char *title, const char *documents)
{
    t->right = true;
    t->row = cJSON_CreateObject();
    cJSON_AddNumberToObject(t->row, "figure", figure);
    cJSON_AddStringToObject(t->row, "title", title);
    cJSON_AddStringToObject(t->row, "documents", documents);
    if (!t->program->json)
        printf("\n%s%d. %s%s  %s(documents %s)%s\n", cli_colour(CLI_BOLD), figure, title, cli_colour(CLI_PLAIN),
               cli_colour(CLI_DIM), documents, cli_colour(CLI_PLAIN));
}

void tour_say(tour *t, const char *format, ...)
{
    va_list args;
    if (t->program->json)
        return;
    va_start(args, format);
    printf("   ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

void tour_ints(tour *t, const char *name, const int32_t *values, int count)
{
    cJSON_AddItemToObject(t->row, name, cJSON_CreateIntArray(values, count));
    if (t->program->json)
        return;
    printf("   %s%-22s%s [", cli_colour(CLI_CYAN), name, cli_colour(CLI_PLAIN));
    for (int i = 0; i < count; i++)
        printf("%s%d", i == 0 ? "" : i % PER_LINE ? ", " : ",\n                           ", values[i]);
    printf("]\n");
}

void tour_floats(tour *t, const char *name, const float *values, int count)
{
    cJSON_AddItemToObject(t->row, name, cJSON_CreateFloatArray(values, count));
    if (t->program->json)
        return;
    printf("   %s%-22s%s [", cli_colour(CLI_CYAN), name, cli_colour(CLI_PLAIN));
    for (int i = 0; i < count; i++)
        printf("%s%g", i == 0 ? "" : i % PER_LINE ? ", " : ",\n                           ", (double)values[i]);
    printf("]\n");
}

void tour_check(tour *t, bool right, const char *claim)
{
    t->right = t->right && right;
    if (!t->program->json)
        printf("   %s%s%s  %s\n", cli_colour(right ? CLI_GREEN : CLI_RED), right ? "right" : "WRONG",
               cli_colour(CLI_PLAIN), claim);
    else if (!right)
        fprintf(stderr, "%s: wrong: %s\n", t->program->name, claim);
}

void tour_end(tour *t)
{
    *(t->right ? &t->passed : &t->failed) += 1;
    cJSON_AddBoolToObject(t->row, "right", t->right);
    if (t->program->json)
        cli_row(t->row);
    else
        cJSON_Delete(t->row);
    t->row = NULL;
}

void tour_skip(tour *t, int figure, const char *title, const char *why)
{
    t->skipped++;
    if (!t->program->json) {
        printf("\n%s%d. %s%s\n   %sskipped%s  %s\n", cli_colour(CLI_BOLD), figure, title, cli_colour(CLI_PLAIN),
               cli_colour(CLI_YELLOW), cli_colour(CLI_PLAIN), why);
        return;
    }
    cJSON *row = cJSON_CreateObject();
    cJSON_AddNumberToObject(row, "figure", figure);
    cJSON_AddStringToObject(row, "title", title);
    cJSON_AddStringToObject(row, "skipped", why);
    cli_row(row);
}

static void finish(tour *t)
{
    if (!t->program->json) {
        printf("\n%d figures right, %d wrong, %d skipped\n", t->passed, t->failed, t->skipped);
        return;
    }
    cJSON *row = cJSON_CreateObject();
    cJSON_AddNumberToObject(row, "passed", t->passed);
    cJSON_AddNumberToObject(row, "failed", t->failed);
    cJSON_AddNumberToObject(row, "skipped", t->skipped);
    cli_row(row);
}

int main(int argc, char **argv)
{
    static const char *svg;
    static const cli_option options[] = {
        {"svg", "FILE", "write the picture of the block pool there", CLI_STRING, &svg, 0, 0, NULL}};
    cli program = {.name = "kvleaf-tour",
                   .summary =
                       "Shows paged attention by the worked figures of the seed documents: the table, the slots, "
                       "the result, right or wrong.",
                   .options = options,
                   .num_options = (int)(sizeof options / sizeof options[0])};
    tour t = {.program = &program};
    kvleaf_caps caps = {.struct_size = sizeof caps};

    cli_parse(&program, argc, argv);
    if (program.num_arguments)
        cli_usage(&program, "takes no argument: %s", program.arguments[0]);
    if (cli_device_open(&program, &t.device) != KVLEAF_OK)
        return CLI_FAILED;
    tour_must(&t, kvleaf_device_queue_create(t.device, &t.queue), "can't make a queue");
    tour_must(&t, kvleaf_device_query(t.device, &caps), "can't query the device");
    if (!program.json)
        printf("kvleaf %s on %s (%s)\n", kvleaf_version(), caps.device_name, caps.platform_name);

    figure_varlen(&t);
    figure_decode(&t);
    figure_scalar_head(&t);
    figure_scattered(&t);
    figure_copy_on_write(&t);
    figure_samples(&t);
    tour_skip(&t, 7, "An 8-bit cache holds twice the tokens", "8-bit caches are not in this version");
    figure_waste(&t);
    figure_size(&t);
    figure_prefix_cache(&t);
    tour_picture(&t, svg);
    finish(&t);

    clReleaseCommandQueue(t.queue);
    kvleaf_device_destroy(&t.device);
    return t.failed ? CLI_FAILED : CLI_OK;
}
