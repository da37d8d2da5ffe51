/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/serving.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double means[] = {161, 338}, deviations[] = {1.0, 0.9};

static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) * 0x1p-53;
}

/* By Box and Muller; its mean is `mean`. */
static int log_normal(uint64_t *state, double mean, double deviation, int most)
{
    double a = uniform(state), b = uniform(state);
    double normal = sqrt(-2 * log(a)) * cos(2 * 3.14159265358979323846 * b);
    double length = exp(log(mean) - deviation * deviation / 2 + deviation * normal);
    return length < 1 ? 1 : length > most ? most : (int)length;
}

static int draw(const serving_options *options, serving_length *lengths, int count)
{
    uint64_t state = options->seed;
    for (int i = 0; i < count; i++) {
        lengths[i].prompt = log_normal(&state, means[0], deviations[0], options->max_length / 2);
        lengths[i].output = log_normal(&state, means[1], deviations[1], options->max_length / 2);
    }
    return CLI_OK;
}

static int fail_line(const serving_options *options, int line, const char *why)
{
    fprintf(stderr, "kvleaf-bench: %s, line %d: %s\n", options->lengths, line, why);
    return CLI_FAILED;
}

int serving_lengths(const serving_options *options, serving_length *lengths, int count)
{
    if (!options->lengths)
        return draw(options, lengths, count);
    FILE *file = fopen(options->lengths, "r");
    if (!file) {
        fprintf(stderr, "kvleaf-bench: %s: %s\n", options->lengths, strerror(errno));
        return CLI_FAILED;
    }
    int read = 0, line = 0, status = CLI_OK;
    char text[256];
    while (status == CLI_OK && read < count && fgets(text, sizeof(text), file)) {
        serving_length *at = &lengths[read++];
        line++;
        if (sscanf(text, "%d %d", &at->prompt, &at->output) != 2 || at->prompt < 1 || at->output < 1)
            status = fail_line(options, line, "not two lengths of 1 or more, prompt and output");
        else if (at->prompt > options->max_length - at->output)
            status = fail_line(options, line, "longer than --max-length in all");
    }
    fclose(file);
    if (status == CLI_OK && read == 0)
        status = fail_line(options, 1, "no lengths");
    for (int i = read; status == CLI_OK && i < count; i++)
        lengths[i] = lengths[i % read];
    return status;
}
