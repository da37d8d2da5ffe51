/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "common/cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const cli_dtypes[] = {"f16", "bf16", "f32", NULL};

enum { NUM_STANDARD = 5, HELP_COLUMN = 26 };

/* The options every program has; help and version are told from the others by their value being NULL. */
static int standard_options(cli *program, cli_option out[NUM_STANDARD])
{
    int count = 0;
    if (!program->no_device)
        out[count++] = (cli_option){"device",
                                    "SUBSTRING",
                                    "of platform or device name; default: the best by type",
                                    CLI_STRING,
                                    &program->device,
                                    0,
                                    0,
                                    NULL};
    out[count++] = (cli_option){"json", NULL, "one JSON object a line on stdout", CLI_FLAG, &program->json, 0, 0, NULL};
    out[count++] =
        (cli_option){"verbose", NULL, "the library's log on stderr", CLI_FLAG, &program->verbose, 0, 0, NULL};
    out[count++] = (cli_option){"help", NULL, "this text", CLI_FLAG, NULL, 0, 0, NULL};
    out[count++] = (cli_option){"version", NULL, "the version", CLI_FLAG, NULL, 0, 0, NULL};
    return count;
}

void cli_usage(const cli *program, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", program->name);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n%s --help says what there is.\n", program->name);
    va_end(args);
    exit(CLI_USAGE);
}

static void print_default(const cli_option *option)
{
    if (option->kind == CLI_INT)
        printf(" (%d)", *(int *)option->value);
    else if (option->kind == CLI_SEED)
        printf(" (%llu)", (unsigned long long)*(uint64_t *)option->value);
    else if (option->kind == CLI_FLOAT)
        printf(" (%g)", *(double *)option->value);
    else if (option->kind == CLI_STRING && *(const char **)option->value)
        printf(" (%s)", *(const char **)option->value);
    if (option->kind != CLI_CHOICE)
        return;
    for (int i = 0; option->choices[i]; i++)
        printf("%s%s", i ? ", " : ": ", option->choices[i]);
    int given = *(int *)option->value;
    if (given >= 0)
        printf(" (%s)", option->choices[given]);
}

static void print_option(const cli_option *option)
{
    int width =
        printf("  --%s%s%s", option->name, option->argument ? " " : "", option->argument ? option->argument : "");
    printf("%*s%s", width < HELP_COLUMN ? HELP_COLUMN - width : 2, "", option->help);
    if (option->value)
        print_default(option);
    printf("\n");
}

static void print_help(const cli *program, const cli_option *standard, int num_standard)
{
    printf("Usage: %s%s%s [options]\n\n%s\n\nOptions (with their defaults):\n", program->name,
           program->arguments_help ? " " : "", program->arguments_help ? program->arguments_help : "",
           program->summary);
    for (int i = 0; i < program->num_options; i++)
        print_option(&program->options[i]);
    for (int i = 0; i < num_standard; i++)
        print_option(&standard[i]);
    if (program->notes)
        printf("\n%s\n", program->notes);
}

static const cli_option *find_option(const cli_option *options, int count, const char *name, size_t length)
{
    for (int i = 0; i < count; i++) {
        if (strlen(options[i].name) == length && memcmp(options[i].name, name, length) == 0)
            return &options[i];
    }
    return NULL;
}

static void check_range(const cli *program, const cli_option *option, double value)
{
    bool any = option->low == 0 && option->high == 0;
    if (!any && !(value >= option->low && value <= option->high))
        cli_usage(program, "--%s is %.15g, must be %.15g .. %.15g", option->name, value, option->low, option->high);
}

static void set_choice(const cli *program, const cli_option *option, const char *text)
{
    char names[256] = "";
    for (int i = 0; option->choices[i]; i++) {
        if (strcmp(option->choices[i], text) == 0) {
            *(int *)option->value = i;
            return;
        }
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", option->choices[i]);
    }
    cli_usage(program, "--%s is \"%s\", must be one of %s", option->name, text, names);
}

static void set_number(const cli *program, const cli_option *option, const char *text)
{
    char *end = NULL;
    errno = 0;
    if (option->kind == CLI_FLOAT) {
        double value = strtod(text, &end);
        if (end == text || *end || !isfinite(value))
            cli_usage(program, "--%s is \"%s\", must be a number", option->name, text);
        check_range(program, option, value);
        *(double *)option->value = value;
    } else if (option->kind == CLI_SEED) {
        unsigned long long value = strtoull(text, &end, 0);
        if (end == text || *end || errno || text[0] == '-')
            cli_usage(program, "--%s is \"%s\", must be an integer from 0 to 2^64 - 1", option->name, text);
        *(uint64_t *)option->value = value;
    } else {
        long long value = strtoll(text, &end, 10);
        if (end == text || *end || errno || value < INT32_MIN || value > INT32_MAX)
            cli_usage(program, "--%s is \"%s\", must be an integer", option->name, text);
        check_range(program, option, (double)value);
        *(int *)option->value = (int)value;
    }
}

static void set_value(const cli *program, const cli_option *option, const char *text)
{
    if (option->kind == CLI_STRING)
        *(const char **)option->value = text;
    else if (option->kind == CLI_CHOICE)
        set_choice(program, option, text);
    else
        set_number(program, option, text);
}

void cli_parse(cli *program, int argc, char **argv)
{
    cli_option standard[NUM_STANDARD];
    int num_standard = standard_options(program, standard);
    program->arguments = argv;
    program->num_arguments = 0;
    bool options_ended = false, help = false, version = false;
    for (int i = 1; i < argc; i++) {
        const char *text = argv[i];
        if (options_ended || strncmp(text, "--", 2) != 0) {
            if (!options_ended && text[0] == '-' && text[1])
                cli_usage(program, "unknown option %s", text);
            argv[program->num_arguments++] = argv[i];
            continue;
        }
        if (text[2] == 0) {
            options_ended = true;
            continue;
        }
        size_t length = strcspn(text + 2, "=");
        const cli_option *option = find_option(program->options, program->num_options, text + 2, length);
        if (!option)
            option = find_option(standard, num_standard, text + 2, length);
        if (!option)
            cli_usage(program, "unknown option %s", text);
        const char *value = text[2 + length] == '=' ? text + 2 + length + 1 : NULL;
        if (option->kind == CLI_FLAG && value)
            cli_usage(program, "--%s takes no value", option->name);
        if (!option->value)
            *(strcmp(option->name, "help") == 0 ? &help : &version) = true;
        else if (option->kind == CLI_FLAG)
            *(bool *)option->value = true;
        else if (value)
            set_value(program, option, value);
        else if (i + 1 < argc)
            set_value(program, option, argv[++i]);
        else
            cli_usage(program, "--%s needs a value, %s", option->name, option->argument);
    }
    if (help)
        print_help(program, standard, num_standard);
    else if (version)
        printf("%s %s\n", program->name, kvleaf_version());
    if (help || version)
        exit(CLI_OK);
    if (program->num_arguments > 0 && !program->arguments_help)
        cli_usage(program, "unexpected argument \"%s\"", program->arguments[0]);
}

void cli_check_shape(const cli *program, const cli_shape *shape)
{
    if (shape->heads % shape->kv_heads != 0)
        cli_usage(program, "--heads is %d, must be a multiple of --kv-heads %d", shape->heads, shape->kv_heads);
}
