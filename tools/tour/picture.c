/* SPDX-License-Identifier: Apache-2.0 */
/* The scene of the picture and the grid in the terminal. */
#include "picture.h"
#include "tour.h"

#include <stdio.h>
#include <stdlib.h>

#define ROW_BLOCKS          8
#define SLOTS_PER_CHARACTER 2

int picture_holders(const picture *p, int32_t block, int *holders)
{
    int count = 0;
    for (int s = 0; s < p->num_seqs; s++) {
        for (int32_t i = 0; i < p->seqs[s].num_blocks; i++) {
            if (p->seqs[s].table[i] == block)
                holders[count++] = s;
        }
    }
    return count;
}

static int32_t filled_by(const picture_seq *seq, int32_t block)
{
    for (int32_t i = 0; i < seq->num_blocks; i++) {
        int32_t behind = seq->length - i * PICTURE_BLOCK_SIZE;
        if (seq->table[i] == block)
            return behind < PICTURE_BLOCK_SIZE ? behind : PICTURE_BLOCK_SIZE;
    }
    return 0;
}

int32_t picture_filled(const picture *p, int32_t block)
{
    int32_t most = 0;
    for (int s = 0; s < p->num_seqs; s++) {
        int32_t filled = filled_by(&p->seqs[s], block);
        most = filled > most ? filled : most;
    }
    return most;
}

int32_t picture_unshared(const picture *p)
{
    int32_t count = 0;
    for (int s = 0; s < p->num_seqs; s++)
        count += p->seqs[s].num_blocks;
    return count;
}

static const char *background(int seq)
{
    static const char *const codes[] = {"\033[48;5;67;38;5;231m",  "\033[48;5;208;38;5;16m",  "\033[48;5;71;38;5;231m",
                                        "\033[48;5;167;38;5;231m", "\033[48;5;139;38;5;231m", "\033[48;5;73;38;5;16m",
                                        "\033[48;5;178;38;5;16m",  "\033[48;5;95;38;5;231m"};
    return *cli_colour(CLI_BOLD) ? codes[seq % PICTURE_SEQS] : "";
}

static void print_block(const picture *p, int32_t block)
{
    int holders[PICTURE_SEQS], count = picture_holders(p, block, holders);
    int32_t filled = picture_filled(p, block);

    for (int i = 0; i < PICTURE_BLOCK_SIZE / SLOTS_PER_CHARACTER; i++) {
        if (count == 0) {
            printf("%s-%s", cli_colour(CLI_DIM), cli_colour(CLI_PLAIN));
        } else if (i * SLOTS_PER_CHARACTER < filled) {
            int seq = holders[i % count];
            printf("%s%c%s", background(seq), 'A' + seq, cli_colour(CLI_PLAIN));
        } else {
            printf("%s.%s", cli_colour(CLI_RED), cli_colour(CLI_PLAIN));
        }
    }
}

void picture_print(const picture *p)
{
    printf("\n%sThe pool: %d blocks of %d slots, a character is %d slots%s\n\n", cli_colour(CLI_BOLD), PICTURE_BLOCKS,
           PICTURE_BLOCK_SIZE, SLOTS_PER_CHARACTER, cli_colour(CLI_PLAIN));
    for (int32_t block = 0; block < PICTURE_BLOCKS; block++) {
        if (block % ROW_BLOCKS == 0)
            printf("   %s%2d%s ", cli_colour(CLI_DIM), block, cli_colour(CLI_PLAIN));
        print_block(p, block);
        printf(block % ROW_BLOCKS == ROW_BLOCKS - 1 ? "\n" : " ");
    }
    printf("\n   several letters: a shared block   %s.%s unused slots of a block in use   %s-%s free block\n\n",
           cli_colour(CLI_RED), cli_colour(CLI_PLAIN), cli_colour(CLI_DIM), cli_colour(CLI_PLAIN));
    for (int s = 0; s < p->num_seqs; s++) {
        const picture_seq *seq = &p->seqs[s];
        printf("   %s %c %s %-30s %4d tokens, blocks", background(s), 'A' + s, cli_colour(CLI_PLAIN), seq->label,
               seq->length);
        for (int32_t i = 0; i < seq->num_blocks; i++)
            printf(" %d", seq->table[i]);
        printf("\n");
    }
    printf(
        "\n   %d blocks in use, %d free; %d without sharing. Unused slots: %lld paged, %lld with %d reserved each.\n",
        p->stats.used, p->stats.free, picture_unshared(p), (long long)p->stats.slots_wasted,
        (long long)p->num_seqs * p->reserved - (long long)p->stats.tokens, p->reserved);
}

/* Extends a sequence and computes the tokens, as a step does. */
static void advance(tour *t, kvleaf_blocks *blocks, kvleaf_seq seq, int32_t count)
{
    const kvleaf_block_copy *copies = NULL;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = count};
    int32_t pending = 0;

    MUST(kvleaf_blocks_seq_extend(blocks, seq, &tokens, NULL));
    MUST(kvleaf_blocks_step_begin(blocks, &seq, &count, 1));
    MUST(kvleaf_blocks_copies(blocks, 0, &copies, &pending));
    MUST(kvleaf_blocks_copies_done(blocks, 0, pending));
    MUST(kvleaf_blocks_step_commit(blocks, &seq, NULL, 1));
}

/* Seven requests that grow beside each other; one is done early and a waiting one takes its blocks; three are samples
 * of one prompt. */
static void make_scene(tour *t, picture *p)
{
    enum { CHAT, SUMMARY, SAMPLE_0, SAMPLE_1, SAMPLE_2, LATE, SEQS };
    static const char *const labels[SEQS] = {"chat",           "summary",        "sample 1 of a prompt",
                                             "sample 2 of it", "sample 3 of it", "waited, then took freed blocks"};
    static const int32_t tails[] = {4, 15, 26};
    kvleaf_blocks *blocks = NULL;
    kvleaf_seq seqs[SEQS] = {0}, done;

    MUST(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = PICTURE_BLOCKS, .block_size = PICTURE_BLOCK_SIZE),
                              &blocks));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[CHAT]));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[SUMMARY]));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &done));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[SAMPLE_0]));
    for (int i = 0; i < 4; i++) {
        advance(t, blocks, seqs[CHAT], 13);
        advance(t, blocks, seqs[SUMMARY], 30);
        advance(t, blocks, done, 28);
    }
    advance(t, blocks, seqs[SAMPLE_0], 44);
    MUST(kvleaf_blocks_seq_fork(blocks, seqs[SAMPLE_0], 44, &seqs[SAMPLE_1]));
    MUST(kvleaf_blocks_seq_fork(blocks, seqs[SAMPLE_0], 44, &seqs[SAMPLE_2]));
    for (int i = 0; i < 3; i++)
        advance(t, blocks, seqs[SAMPLE_0 + i], tails[i]);
    MUST(kvleaf_blocks_seq_destroy(blocks, &done));
    MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[LATE]));
    advance(t, blocks, seqs[LATE], 117);

    *p = (picture){.num_seqs = SEQS, .reserved = 256};
    for (int s = 0; s < SEQS; s++) {
        kvleaf_seq_info info = {.struct_size = sizeof info};

        MUST(kvleaf_blocks_seq_query(blocks, seqs[s], &info));
        MUST(kvleaf_blocks_seq_table(blocks, seqs[s], 0, p->seqs[s].table, PICTURE_TABLE, &p->seqs[s].num_blocks));
        p->seqs[s].label = labels[s];
        p->seqs[s].length = (int32_t)info.extended;
    }
    p->stats.struct_size = sizeof p->stats;
    MUST(kvleaf_blocks_query(blocks, &p->stats));
    kvleaf_blocks_destroy(&blocks);
}

void tour_picture(tour *t, const char *svg_path)
{
    picture scene;

    make_scene(t, &scene);
    if (!t->program->json)
        picture_print(&scene);
    if (!svg_path)
        return;
    if (!picture_write_svg(&scene, svg_path)) {
        fprintf(stderr, "%s: can't write %s\n", t->program->name, svg_path);
        exit(CLI_FAILED);
    }
    if (!t->program->json)
        printf("   The same as a picture: %s\n", svg_path);
}
