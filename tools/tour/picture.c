/* SPDX-License-Identifier: Apache-2.0 */
/* A few requests in one pool, and the block map that the library draws of it. */
#include "tour.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 40, PROMPT = 112, COMMON = 60, BLOCK_SIZE = 16, RESERVED = 256, MAP_AT = 10 };

/* By the slots in which the sequences live: the library numbers them from 0 and gives a freed number out again. */
enum { CHAT, SUMMARY, LATE, SAMPLE_0, SAMPLE_1, SAMPLE_2, SEQS };
static const char *const labels[SEQS] = {
    "chat", "summary", "finds a cached prompt", "sample 1 of a prompt", "sample 2 of it", "sample 3 of it"};

/* Extends a sequence and computes what was not found, as a step does. `ids` NULL: of unknown ids. */
static void advance(tour *t, kvleaf_blocks *blocks, kvleaf_seq seq, const int32_t *ids, int32_t count)
{
    const kvleaf_block_copy *copies = NULL;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .count = count};
    int64_t cached = 0;
    int32_t pending = 0;

    MUST(kvleaf_blocks_seq_extend(blocks, seq, &tokens, &cached));
    count -= (int32_t)cached;
    MUST(kvleaf_blocks_step_begin(blocks, &seq, &count, 1));
    MUST(kvleaf_blocks_copies(blocks, 0, &copies, &pending));
    MUST(kvleaf_blocks_copies_done(blocks, 0, pending));
    MUST(kvleaf_blocks_step_commit(blocks, &seq, NULL, 1));
}

/* Requests that grow beside each other. One is done early; its prompt stays cached, and a later one finds a part of it.
 * Three are samples of one prompt. */
static kvleaf_blocks *make_scene(tour *t)
{
    static const int32_t tails[] = {4, 15, 26};
    kvleaf_blocks *blocks = NULL;
    kvleaf_seq seqs[SEQS] = {0}, done;
    int32_t prompt[PROMPT];

    for (int32_t i = 0; i < PROMPT; i++)
        prompt[i] = i;
    MUST(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = BLOCKS, .block_size = BLOCK_SIZE), &blocks));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[CHAT]));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[SUMMARY]));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &done));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[SAMPLE_0]));
    for (int i = 0; i < 4; i++) {
        advance(t, blocks, seqs[CHAT], NULL, 13);
        advance(t, blocks, seqs[SUMMARY], NULL, 30);
        advance(t, blocks, done, prompt + i * PROMPT / 4, PROMPT / 4);
    }
    advance(t, blocks, seqs[SAMPLE_0], NULL, 44);
    MUST(kvleaf_blocks_seq_fork(blocks, seqs[SAMPLE_0], 44, &seqs[SAMPLE_1]));
    MUST(kvleaf_blocks_seq_fork(blocks, seqs[SAMPLE_0], 44, &seqs[SAMPLE_2]));
    for (int i = 0; i < 3; i++)
        advance(t, blocks, seqs[SAMPLE_0 + i], NULL, tails[i]);
    MUST(kvleaf_blocks_seq_destroy(blocks, &done));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[LATE]));
    for (int32_t i = COMMON; i < PROMPT; i++)
        prompt[i] = -i;
    advance(t, blocks, seqs[LATE], prompt, PROMPT);
    return blocks;
}

static char *describe(tour *t, const kvleaf_blocks *blocks, kvleaf_format format)
{
    size_t size = 0;
    kvleaf_blocks_describe(blocks, format, NULL, 0, &size);
    char *text = malloc(size);
    if (!text)
        exit(CLI_FAILED);
    MUST(kvleaf_blocks_describe(blocks, format, text, size, &size));
    return text;
}

/* Where a sequence is named up to `end`, its label stands instead. */
static void put_labelled(FILE *file, const char *text, char end)
{
    static const char name[] = "sequence ";
    for (const char *at; (at = strstr(text, name)); text = at) {
        char *behind = NULL;
        long slot = strtol(at + strlen(name), &behind, 10);
        fwrite(text, 1, (size_t)(at - text), file);
        if (*behind == end && slot >= 0 && slot < SEQS) {
            fputs(labels[slot], file);
            at = behind;
        } else {
            fputc(*at++, file);
        }
    }
    fputs(text, file);
}

static const char *colour_of(char block)
{
    static const char *const codes[] = {"\033[48;5;67;38;5;231m",  "\033[48;5;208;38;5;16m",  "\033[48;5;71;38;5;231m",
                                        "\033[48;5;167;38;5;231m", "\033[48;5;139;38;5;231m", "\033[48;5;73;38;5;16m"};
    if (block < 'A' || block > 'Z' || !*cli_colour(CLI_BOLD))
        return cli_colour(block == '.' ? CLI_DIM : block == 'c' ? CLI_CYAN : CLI_BOLD);
    return codes[(block - 'A') % (int)(sizeof codes / sizeof *codes)];
}

/* The map's characters in colour, the rest as it is. */
static void print_map(char *text)
{
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        bool row = strlen(line) > MAP_AT && line[MAP_AT - 3] >= '0' && line[MAP_AT - 3] <= '9';
        printf("   ");
        for (const char *at = line; row && *at; at++)
            printf("%s%c%s", at < line + MAP_AT || *at == ' ' ? "" : colour_of(*at), *at,
                   at < line + MAP_AT || *at == ' ' ? "" : cli_colour(CLI_PLAIN));
        if (!row)
            put_labelled(stdout, line, ':');
        printf("\n");
    }
}

static void write_svg(tour *t, const kvleaf_blocks *blocks, const char *path)
{
    char *text = describe(t, blocks, KVLEAF_FORMAT_SVG);
    FILE *file = fopen(path, "w");
    if (file)
        put_labelled(file, text, '<');
    if (!file || fclose(file) != 0) {
        fprintf(stderr, "%s: can't write %s\n", t->program->name, path);
        exit(CLI_FAILED);
    }
    free(text);
}

void tour_picture(tour *t, const char *svg_path)
{
    kvleaf_blocks *blocks = make_scene(t);
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};

    MUST(kvleaf_blocks_query(blocks, &stats));
    if (!t->program->json) {
        char *text = describe(t, blocks, KVLEAF_FORMAT_TEXT);
        printf("\n%sThe pool%s, as kvleaf_blocks_describe tells it\n\n", cli_colour(CLI_BOLD), cli_colour(CLI_PLAIN));
        print_map(text);
        printf("\n   With %d slots reserved for each sequence %lld would be unused, here %lld are.\n", RESERVED,
               (long long)stats.sequences * RESERVED - (long long)stats.tokens, (long long)stats.slots_wasted);
        free(text);
    }
    if (svg_path) {
        write_svg(t, blocks, svg_path);
        if (!t->program->json)
            printf("   The same as a picture: %s\n", svg_path);
    }
    kvleaf_blocks_destroy(&blocks);
}
