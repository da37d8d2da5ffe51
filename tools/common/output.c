/* SPDX-License-Identifier: Apache-2.0 */
/* The device a program opens, and what it prints. */
#define _POSIX_C_SOURCE 200809L
#include "common/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void log_line(void *user, kvleaf_log_level level, const char *message)
{
    static const char *const names[] = {"error", "warning", "info", "debug"};
    (void)user;
    fprintf(stderr, "kvleaf %s: %s\n", names[level], message);
}

/* NULL where it is unset or empty. */
static const char *environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* $XDG_CACHE_HOME/kvleaf, else ~/.cache/kvleaf, else none. */
static const char *cache_folder(void)
{
    static char path[4096];
    const char *cache = environment("XDG_CACHE_HOME"), *home = environment("HOME");
    int length = -1;
    if (cache)
        length = snprintf(path, sizeof path, "%s/kvleaf", cache);
    else if (home)
        length = snprintf(path, sizeof path, "%s/.cache/kvleaf", home);
    return length > 0 && (size_t)length < sizeof path ? path : NULL;
}

void cli_device_params(const cli *program, kvleaf_device_params *params)
{
    *params = (kvleaf_device_params){.struct_size = sizeof *params,
                                     .select = program->device,
                                     .kernel_dir = environment("KVLEAF_KERNEL_DIR"),
                                     .variants = environment("KVLEAF_VARIANT"),
                                     .cache_dir = cache_folder(),
                                     .log = log_line,
                                     .log_level = program->verbose ? KVLEAF_LOG_DEBUG : KVLEAF_LOG_WARNING};
}

int cli_fail(const cli *program, const char *what)
{
    const kvleaf_error *error = kvleaf_last_error();
    fprintf(stderr, "%s: %s: %s (%s)\n", program->name, what, error->message, kvleaf_status_name(error->status));
    if (*error->build_log)
        fprintf(stderr, "%s\n", error->build_log);
    return CLI_FAILED;
}

kvleaf_status cli_device_open(const cli *program, kvleaf_device **out)
{
    kvleaf_device_params params;
    cli_device_params(program, &params);
    kvleaf_status status = kvleaf_device_open(&params, out);
    if (status != KVLEAF_OK)
        cli_fail(program, "can't open a device");
    return status;
}

void cli_row(cJSON *row)
{
    char *text = cJSON_PrintUnformatted(row);
    cJSON_Delete(row);
    if (!text) {
        fprintf(stderr, "no memory for a JSON row\n");
        exit(CLI_FAILED);
    }
    puts(text);
    fflush(stdout);
    cJSON_free(text);
}

const char *cli_colour(cli_style style)
{
    static const char *const escapes[] = {"\033[0m",  "\033[1m",  "\033[2m",  "\033[31m",
                                          "\033[32m", "\033[33m", "\033[34m", "\033[36m"};
    const char *terminal = environment("TERM");
    bool takes = isatty(STDOUT_FILENO) && !environment("NO_COLOR") && terminal && strcmp(terminal, "dumb") != 0;
    return takes ? escapes[style] : "";
}

void cli_progress(const char *what, int64_t done, int64_t total)
{
    if (!isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s %lld/%lld%s", what, (long long)done, (long long)total, done == total ? "\n" : "");
    fflush(stderr);
}
