/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_TOOLS_CLI_H
#define KVLEAF_TOOLS_CLI_H

/* What every program of tools/ has in common: its options, the device it opens, JSON rows on stdout, and everything
 * that is for people on stderr. Exit codes: 0 right, 1 wrong result or failure, 2 bad usage. */

#include <cjson/cJSON.h>
#include <kvleaf/device.h>

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

typedef enum cli_kind {
    CLI_FLAG,   /* bool */
    CLI_INT,    /* int */
    CLI_SEED,   /* uint64_t, decimal or 0x... */
    CLI_FLOAT,  /* double */
    CLI_STRING, /* const char *, into argv */
    CLI_CHOICE  /* int: index into choices */
} cli_kind;

typedef struct cli_option {
    const char *name;     /* "kv-heads", without dashes */
    const char *argument; /* "N"; NULL for flags */
    const char *help;     /* one line */
    cli_kind kind;
    void *value;                /* of the kind's type; holds the default before and the given value after */
    double low, high;           /* CLI_INT and CLI_FLOAT; both 0 = any */
    const char *const *choices; /* CLI_CHOICE: names, NULL at the end */
} cli_option;

/* A program: what it fills in itself, and what cli_parse reads off the command line. */
typedef struct cli {
    const char *name;           /* "kvleaf-bench" */
    const char *arguments_help; /* "decode | prefill", NULL where it takes no arguments but options */
    const char *summary;        /* one sentence */
    const char *notes;          /* printed below the options, or NULL */
    const cli_option *options;
    int num_options;
    bool no_device; /* leaves --device out */

    const char *device; /* --device, or NULL */
    bool json, verbose;
    char **arguments; /* what is no option, in order */
    int num_arguments;
} cli;

/* Reads the command line: the program's options and --help, --version, --device, --json, --verbose; "--" ends the
 * options. Leaves the program for --help and --version (0) and for bad usage (2). Reorders argv. */
void cli_parse(cli *program, int argc, char **argv);

/* Bad usage found by the program itself: message, hint, exit code 2. */
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 2, 3)))
#endif
void cli_usage(const cli *program, const char *format, ...);

/* Fills the params of the device that --device asks for: KVLEAF_KERNEL_DIR and KVLEAF_VARIANT from the environment, the
 * disk cache in the user's cache folder, warnings (everything with --verbose) to stderr. The strings live as long as
 * the process. */
void cli_device_params(const cli *program, kvleaf_device_params *params);

/* Opens that device; on failure says why on stderr. */
kvleaf_status cli_device_open(const cli *program, kvleaf_device **out);

/* Says on stderr that `what` failed and why (the last error and its build log); returns CLI_FAILED. */
int cli_fail(const cli *program, const char *what);

/* Prints one object as a line on stdout and deletes it. */
void cli_row(cJSON *row);

/* Escape sequences where stdout is a terminal that takes them, else "". */
typedef enum cli_style { CLI_PLAIN, CLI_BOLD, CLI_DIM, CLI_RED, CLI_GREEN, CLI_YELLOW, CLI_BLUE, CLI_CYAN } cli_style;
const char *cli_colour(cli_style style);

/* Rewrites one line on stderr where that is a terminal; done == total ends it. Thread rule: the main thread. */
void cli_progress(const char *what, int64_t done, int64_t total);

/* The shape options that several programs share. */
typedef struct cli_shape {
    int heads, kv_heads, head_dim, block_size, window;
    double softcap;
    int q_dtype, kv_dtype; /* kvleaf_dtype */
} cli_shape;

#define CLI_SHAPE_DEFAULTS                                                                                             \
    {                                                                                                                  \
        32, 8, 128, 16, 0, 0, KVLEAF_F16, KVLEAF_F16                                                                   \
    }

extern const char *const cli_dtypes[]; /* f16, bf16, f32 in the order of kvleaf_dtype */

/* Members of an option table: { CLI_SHAPE_OPTIONS(shape), {"batch", ...}, ... }. */
#define CLI_SHAPE_OPTIONS(shape)                                                                                       \
    {"heads", "N", "query heads", CLI_INT, &(shape).heads, 1, 1024, NULL},                                             \
        {"kv-heads", "N", "KV heads; query heads must be a multiple", CLI_INT, &(shape).kv_heads, 1, 1024, NULL},      \
        {"head-dim", "N", "elements of a head", CLI_INT, &(shape).head_dim, 1, 256, NULL},                             \
        {"block-size", "N", "tokens of a block; 0 = contiguous K/V", CLI_INT, &(shape).block_size, 0, 256, NULL},      \
        {"window", "N", "tokens a row sees, its own included; 0 = all", CLI_INT, &(shape).window, 0, 1 << 24, NULL},   \
        {"softcap", "C", "bound of the scores; 0 = none", CLI_FLOAT, &(shape).softcap, 0, 1e6, NULL},                  \
        {"q-dtype", "TYPE", "type of q and out", CLI_CHOICE, &(shape).q_dtype, 0, 0, cli_dtypes},                      \
    {                                                                                                                  \
        "kv-dtype", "TYPE", "type of K and V", CLI_CHOICE, &(shape).kv_dtype, 0, 0, cli_dtypes                         \
    }

/* Bad usage where heads are no multiple of KV heads. */
void cli_check_shape(const cli *program, const cli_shape *shape);

#endif
